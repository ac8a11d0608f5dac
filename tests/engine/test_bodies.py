"""The sequences of one client's request: taken or refused together, under one deadline; and who may come in at all."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
from virtual import Virtual, request, run

from atom_async.engine import ipc
from atom_async.engine.client import EngineOutput, EngineRequest, QueueFull, RequestRejected
from atom_async.events.schema import RequestArrived
from atom_async.events.schema import RequestRejected as Refused
from atom_async.wire.messages import pack_ints
from atom_async.wire.sampling import SamplingParams


def choices(name: str, prompt: list[int], n: int, max_tokens: int = 4, **fields: object) -> list[EngineRequest]:
    packed = pack_ints(prompt)
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    return [
        EngineRequest(request_id=f"{name}-{i}", prompt_token_ids=packed, sampling=sampling, **fields) for i in range(n)
    ]


async def collect_all(world: Virtual, body: list[EngineRequest]) -> dict[str, list[EngineOutput]]:
    got: dict[str, list[EngineOutput]] = {asked.request_id: [] for asked in body}
    async with contextlib.aclosing(world.engine.generate_all(body)) as stream:
        async for outputs in stream:
            for output in outputs:
                got[output.request_id].append(output)
    return got


def ends(answers: dict[str, list[EngineOutput]]) -> list[str]:
    return [f"{outputs[-1].finish_reason}{outputs[-1].error_kind}" for outputs in answers.values()]


@pytest.mark.parametrize("n", [1, 2, 8, 10])
def test_l4_what_can_start_at_once_does_not_wait(n: int) -> None:
    """Eight slots and a queue of two: a body of ten on an idle engine is taken."""

    async def scenario(world: Virtual) -> None:
        assert ends(await collect_all(world, choices("a", [1] * 10, n))) == ["length"] * n

    run(scenario, max_queued_requests=2)


@pytest.mark.parametrize(("n", "queue"), [(11, 2), (10, 1), (100, 5)])
def test_l4_a_body_that_never_fits_is_rejected_for_good(n: int, queue: int) -> None:
    async def scenario(world: Virtual) -> None:
        with pytest.raises(RequestRejected, match=f"{n} sequences at once; 8 can run"):
            await collect_all(world, choices("a", [1] * 10, n))
        assert not world.named(RequestArrived)

    run(scenario, max_queued_requests=queue)


def test_l4_a_burst_at_an_idle_engine_fills_slots_and_queue_and_no_more() -> None:
    async def scenario(world: Virtual) -> None:
        asked = [world.start(request(f"r{n}", [n] * 10)) for n in range(32)]
        answers = await asyncio.gather(*asked, return_exceptions=True)
        refused = [a for a in answers if isinstance(a, QueueFull)]
        assert len(refused) == 32 - 8 - 2
        assert all("2 requests wait already; at most 2 may" in str(a) for a in refused)

    run(scenario, max_queued_requests=2, blocks=200)


def test_l4_a_body_is_refused_as_a_whole_and_leaves_nothing() -> None:
    async def scenario(world: Virtual) -> None:
        busy = [world.start(request(f"r{n}", [n] * 10, max_tokens=30)) for n in range(7)]
        await asyncio.sleep(0.2)
        with pytest.raises(QueueFull, match="0 requests wait and the body has 4; at most 2 may"):
            await collect_all(world, choices("a", [1] * 10, 4))
        assert len(world.named(Refused)) == 4
        assert len(world.named(RequestArrived)) == 7
        assert ends(await collect_all(world, choices("b", [1] * 10, 3))) == ["length"] * 3
        await asyncio.gather(*busy)

    run(scenario, max_queued_requests=2, blocks=200)


def test_l4_the_token_bound_counts_what_would_be_computed() -> None:
    """A cached prompt adds next to nothing to the queue, nor do further choices of one prompt."""
    shared = list(range(80))

    async def scenario(world: Virtual) -> None:
        await world.collect(request("first", shared))
        busy = [world.start(request(f"r{n}", [200 + n] * 4, max_tokens=60)) for n in range(8)]
        await asyncio.sleep(0.3)
        waiting = world.start(request("waiting", [300] * 20))
        await asyncio.sleep(0)
        cached = world.start(request("cached", [*shared, 1, 2]))
        body = asyncio.create_task(collect_all(world, choices("body", [400] * 12, 5)))
        await asyncio.sleep(0)
        with pytest.raises(QueueFull, match="wait already and the request adds 40; at most 50 may"):
            await world.collect(request("new", [500] * 40))
        assert (await cached)[-1].finish_reason == "length"
        assert ends(await body) == ["length"] * 5
        await asyncio.gather(*busy, waiting)

    run(scenario, max_queued_tokens=50, blocks=200)


@pytest.mark.parametrize("number", [1, 4])
def test_retry_after_foresees_how_long_slots_stay_taken(number: int) -> None:
    """Sequences of four seconds on one slot: with four waiting it is 16 s until all have begun, not one."""

    async def scenario(world: Virtual) -> None:
        asked = [world.start(request(f"r{n}", [n] * 4, max_tokens=400)) for n in range(number + 1)]
        await asyncio.sleep(6)
        asked += [world.start(request(f"s{n}", [90 + n] * 4, max_tokens=400)) for n in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(QueueFull) as refused:
            await world.collect(request("late", [99]))
        waits = (await world.engine.stats()).waiting
        assert waits == number
        assert refused.value.retry_after_s == pytest.approx(waits * 4.06, rel=0.05)
        await asyncio.gather(*asked, return_exceptions=True)

    run(scenario, max_num_seqs=1, max_queued_requests=number, blocks=1000)


# Deadlines -----------------------------------------------------------------------------------------


def test_a_body_that_began_keeps_its_choices_past_the_deadline() -> None:
    """One slot, two choices of half a second: the second starts long after the deadline."""

    async def scenario(world: Virtual) -> None:
        answers = await collect_all(world, choices("a", [1] * 10, 2, max_tokens=50, deadline_ms=300.0))
        assert ends(answers) == ["length", "length"]
        assert world.now > 1.0
        assert (await world.engine.stats()).expired == 0

    run(scenario, max_num_seqs=1)


def test_a_body_that_could_not_begin_expires_as_a_whole() -> None:
    async def scenario(world: Virtual) -> None:
        busy = world.start(request("busy", [1], max_tokens=100))
        await asyncio.sleep(0.1)
        answers = await collect_all(world, choices("a", [1] * 10, 3, deadline_ms=200.0))
        assert ends(answers) == ["errordeadline"] * 3
        await busy

    run(scenario, max_num_seqs=1)


# The door ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("token", [-1, 50_000, 2**31 - 1])
@pytest.mark.parametrize("length", [1, 100, 3000])
@pytest.mark.parametrize("caching", [True, False])
def test_an_id_outside_the_vocabulary_never_reaches_a_worker(token: int, length: int, caching: bool) -> None:
    async def scenario(world: Virtual) -> None:
        with pytest.raises(RequestRejected, match=f"token id {token} is not in the model's vocabulary of 50000"):
            await world.collect(request("bad", [5] * (length - 1) + [token]))
        assert (await world.collect(request("good", [49_999] * 5)))[-1].finish_reason == "length"

    run(scenario, enable_prefix_caching=caching, blocks=1000)


def test_equal_ids_in_one_body_are_rejected() -> None:
    async def scenario(world: Virtual) -> None:
        with pytest.raises(RequestRejected, match="same id"):
            await collect_all(world, choices("a", [1], 1) * 2)
        assert ends(await collect_all(world, choices("a", [1], 2))) == ["length"] * 2

    run(scenario)


@pytest.mark.parametrize(("length", "top", "taken"), [(100, 20, True), (50, 20_971, False), (50, 20_970, True)])
def test_prompt_logprobs_are_bounded_by_what_they_take(length: int, top: int, taken: bool) -> None:
    async def scenario(world: Virtual) -> None:
        sampling = SamplingParams(max_tokens=1, prompt_logprobs=top)
        asked = EngineRequest(request_id="a", prompt_token_ids=pack_ints([1] * length), sampling=sampling)
        if taken:
            assert (await world.collect(asked))[-1].finish_reason == "length"
        else:
            with pytest.raises(RequestRejected, match=f"would be {length * (top + 1)} entries; at most 1048576"):
                await world.collect(asked)

    run(scenario, max_logprobs=50_000)


# On the way ----------------------------------------------------------------------------------------


def test_a_prompt_of_many_choices_travels_once() -> None:
    body = choices("a", list(range(1000)), 5) + choices("b", [7], 2)
    message = ipc.Submit.of(body)
    assert message.prompt_of == [0, 0, 0, 0, 0, 5, 5]
    assert sum(len(bare.prompt_token_ids) for bare in message.requests) == 4004
    assert message.body() == body
