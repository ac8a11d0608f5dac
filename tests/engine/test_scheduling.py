"""The event-driven scheduler through the engine's own tasks, in virtual time: timers, deadlines, overload, faults."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import os
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest
import uvloop
from virtual import Virtual, request, run

from atom_async.engine.client import EngineDead, EngineDraining, QueueFull
from atom_async.engine.local import LONGEST_TIMER_S
from atom_async.engine.workers import WorkerFailure
from atom_async.events.schema import (
    PrefillFired,
    PrefillHeld,
    RequestFailed,
    RequestParked,
    RequestRejected,
    StepSubmitted,
)
from atom_async.sim.loop import VirtualLoop
from atom_async.wire.simulation import SimulationOptions, expected_tokens

SLOW_DECODES = SimulationOptions(vocab_size=1000, decode_fixed_ms=20_000.0)


class CountingLoop(VirtualLoop):
    """Counts timers that ring."""

    def __init__(self) -> None:
        super().__init__()
        self.jumps = 0

    def jump(self, seconds: float) -> None:
        self.jumps += seconds > 0
        super().jump(seconds)


def test_h5_held_prefill_wakes_up_only_for_deadlines() -> None:
    """50 requests are held while one decode step takes 20 s: until the bound, nothing happens at all."""

    async def scenario() -> tuple[int, int]:
        world = Virtual(
            options=SLOW_DECODES,
            max_num_seqs=64,
            max_num_batched_tokens=4096,
            blocks=2048,
            coalesce_target_fill=1.0,
            coalesce_quiet_ms=60_000.0,
            coalesce_max_hold_ms=60_000.0,
            prefill_max_queue_ms=60_000.0,
            max_steps_in_flight=1,
        )
        await world.engine.start()
        first = world.start(request("decoding", [1], max_tokens=10))
        await asyncio.sleep(1)
        held = [world.start(request(f"r{n}", [n] * 10)) for n in range(50)]
        await asyncio.sleep(0)
        loop = asyncio.get_running_loop()
        assert isinstance(loop, CountingLoop)
        before, steps = loop.jumps, len(world.named(StepSubmitted))
        await asyncio.sleep(10)
        woken, submitted = loop.jumps - before - 1, len(world.named(StepSubmitted)) - steps
        await asyncio.gather(first, *held)
        await world.engine.stop()
        return woken, submitted

    with asyncio.Runner(loop_factory=CountingLoop) as runner:
        woken, submitted = runner.run(scenario())
    assert (woken, submitted) == (0, 0)


def test_h5_an_idle_engine_has_no_timer() -> None:
    async def scenario(world: Virtual) -> None:
        await world.collect(request("a", [1] * 10, deadline_ms=50_000.0))
        loop: Any = asyncio.get_running_loop()
        assert not [handle for handle in loop._scheduled if not handle.cancelled()]

    run(scenario)


def test_a_hold_ends_at_its_deadline_when_the_pipeline_has_room() -> None:
    """The one decoding has its last token in flight for 20 s; then nothing decodes, and that fires at once."""

    async def scenario(world: Virtual) -> None:
        first = world.start(request("decoding", [1], max_tokens=30))
        await asyncio.sleep(0.1)
        await world.collect(request("held", [2] * 10, max_tokens=1))
        (held,), fired = world.named(PrefillHeld), world.named(PrefillFired)[-1]
        assert (held.bound, fired.reason) == ("max_hold", "max_hold")
        assert fired.held_ms == pytest.approx(150, abs=12)
        await first

    run(scenario, coalesce_target_fill=1.0, coalesce_quiet_ms=1000.0, coalesce_max_hold_ms=150.0)


def test_l4_a_deadline_that_passes_in_the_queue_ends_the_stream_with_an_error() -> None:
    async def scenario(world: Virtual) -> None:
        busy = world.start(request("busy", [1], max_tokens=100))
        await asyncio.sleep(0.05)
        (output,) = await world.collect(request("late", [2] * 9, deadline_ms=300.0))
        assert (output.finish_reason, output.error_kind) == ("error", "deadline")
        assert "deadline" in output.error
        (failed,) = world.named(RequestFailed)
        assert failed.state == "ready"
        assert (await world.engine.stats()).expired == 1
        await busy

    run(scenario, max_num_seqs=1)


def test_a_deadline_wakes_an_engine_that_has_nothing_else_to_do() -> None:
    """Memory is full and no step ends for 20 s: the deadline is kept all the same."""

    async def scenario(world: Virtual) -> None:
        busy = world.start(request("busy", [1], max_tokens=4))
        await asyncio.sleep(1)
        begin = world.now
        (output,) = await world.collect(request("late", [2] * 9, deadline_ms=2500.0))
        assert output.error_kind == "deadline"
        assert world.now - begin == pytest.approx(2.5)
        await busy

    run(scenario, options=SLOW_DECODES, max_num_seqs=1)


@pytest.mark.parametrize(
    "settings", [{"max_queued_requests": 2}, {"max_queued_tokens": 25}], ids=["requests", "tokens"]
)
def test_l4_a_full_queue_refuses_and_says_when_to_come_back(settings: dict[str, int]) -> None:
    async def scenario(world: Virtual) -> None:
        busy = world.start(request("busy", [1], max_tokens=30))
        await asyncio.sleep(0.05)
        waiting = [world.start(request(f"w{n}", [10 + n] * 10)) for n in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(QueueFull, match="the queue is full") as refused:
            await world.collect(request("one too many", [99] * 10))
        assert refused.value.retry_after_s >= 1
        assert [e.reason for e in world.named(RequestRejected)] == ["queue_full"]
        await asyncio.gather(busy, *waiting)
        assert await world.collect(request("later", [98] * 10))

    run(scenario, max_num_seqs=1, **settings)


def test_a_prompt_larger_than_the_token_bound_still_runs_when_nothing_waits() -> None:
    async def scenario(world: Virtual) -> None:
        assert (await world.collect(request("large", [1] * 100)))[-1].finish_reason == "length"

    run(scenario, max_queued_tokens=10)


def test_times_that_never_come_are_no_trouble_to_any_loop() -> None:
    never = {"max_bypass_ms": float("inf"), "prefill_max_queue_ms": float("inf"), "coalesce_max_hold_ms": 1e300}

    async def main() -> None:
        world = Virtual(**never, coalesce_target_fill=1.0, coalesce_quiet_ms=50.0, max_num_seqs=2, blocks=60)
        await world.engine.start()
        asked = [request(f"r{n}", [n] * 90, deadline_ms=1e300 if n % 2 else None) for n in range(4)]
        for outputs in await asyncio.gather(*(world.collect(a) for a in asked)):
            assert outputs[-1].finish_reason == "length"
        await world.engine.stop()

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(main())


def test_a_real_loop_takes_the_longest_timer() -> None:
    loop = uvloop.new_event_loop()
    before = loop.time()
    timer = loop.call_later(LONGEST_TIMER_S, loop.stop)
    assert timer.when() == pytest.approx(before + LONGEST_TIMER_S, abs=1)
    loop.call_later(0.001, loop.stop)
    loop.run_forever()
    assert not timer.cancelled()
    timer.cancel()
    loop.close()


def test_draining_ends_every_hold() -> None:
    async def scenario(world: Virtual) -> None:
        first = world.start(request("decoding", [1], max_tokens=200))
        await asyncio.sleep(0.05)
        held = world.start(request("held", [2] * 10))
        await asyncio.sleep(0.05)
        assert world.named(PrefillHeld)
        await world.engine.drain()
        assert world.named(PrefillFired)[-1].reason == "drain"
        with pytest.raises(EngineDraining):
            await world.collect(request("late", [3]))
        assert len(await held) == 4
        await first

    forever = {"coalesce_max_hold_ms": 1e6, "coalesce_quiet_ms": 1e6, "prefill_max_queue_ms": 1e6}
    run(scenario, coalesce_target_fill=1.0, **forever)


def test_w1_a_stampede_through_the_engine_is_computed_once() -> None:
    async def scenario(world: Virtual) -> None:
        shared = list(range(400))
        tasks = [world.start(request(f"r{n}", [*shared, 900 + n], max_tokens=2)) for n in range(16)]
        await asyncio.gather(*tasks)
        computed = sum(e.prefill_tokens for e in world.named(StepSubmitted))
        assert computed <= 400 + 16 + 16 * 4
        assert len(world.named(RequestParked)) == 15

    run(scenario, blocks=512, max_num_seqs=16)


def test_decodes_keep_their_cadence_under_a_stream_of_small_prefills() -> None:
    """The bound on a step's time holds for every step that carries a decode."""

    async def scenario(world: Virtual) -> None:
        decoding = world.start(request("decoding", [1, 2], max_tokens=300))
        await asyncio.sleep(0.5)
        tasks = []
        for number in range(60):
            prompt = [number * 100 + i for i in range(90)]
            tasks.append(world.start(request(f"p{number}", prompt, max_tokens=1)))
            await asyncio.sleep(0.03)
        await asyncio.gather(decoding, *tasks)
        predicted = [e.predicted_ms for e in world.named(StepSubmitted)[60:] if e.decode_requests]
        assert max(predicted) <= 31
        assert sum(e.prefill_tokens for e in world.named(StepSubmitted)) >= 60 * 90

    run(scenario, blocks=2048, max_num_batched_tokens=1024, itl_target_ms="30")


@pytest.mark.parametrize("moment", range(40))
def test_l1_an_abort_at_any_moment_of_any_state(moment: int) -> None:
    """Every 7 ms of a busy second, each request alive is aborted in a run of its own; the ledger is checked."""

    async def scenario(world: Virtual, victim: int) -> int:
        shared = list(range(100))
        tasks = [world.start(request("d", [1], max_tokens=40))]
        tasks += [world.start(request(f"s{n}", [*shared, 500 + n], max_tokens=5)) for n in range(4)]
        tasks += [world.start(request("big", [7] * 150, max_tokens=3)), world.start(request("b2", [8] * 140))]
        await asyncio.sleep(0.007 * moment)
        alive = sorted((await world.engine.state())["waiting"] + (await world.engine.state())["running"], key=str)
        if victim < len(alive):
            world.engine.abort(alive[victim]["request_id"])
        answers = await asyncio.gather(*tasks)
        stats = await world.engine.stats()
        assert (stats.running, stats.waiting, stats.kv_blocks_used) == (0, 0, 0)
        reasons = Counter(outputs[-1].finish_reason for outputs in answers)
        assert reasons["abort"] == (victim < len(alive))
        assert sum(reasons.values()) == 7
        return len(alive)

    settings = {"blocks": 52, "max_num_seqs": 4, "max_bypass_ms": 200.0}
    alive = run(functools.partial(scenario, victim=7), **settings)
    for victim in range(alive):
        run(functools.partial(scenario, victim=victim), **settings)


# Seeded lives with faults --------------------------------------------------------------------------


PREFIXES = [[1000 * n + i for i in range(70)] for n in range(3)]


async def one_client(world: Virtual, options: SimulationOptions, own: random.Random, number: int) -> str:
    """A random client; returns how it ended. What it was given is what its prompt alone gives."""
    await asyncio.sleep(own.random())
    prompt = [*own.choice(PREFIXES)[: own.randint(0, 70)], 5000 + number]
    asked = request(
        f"r{number}",
        prompt,
        own.randint(1, 20),
        priority=own.choice([0, 0, 0, 1, -1]),
        deadline_ms=own.choice([None, None, None, 30.0, 300.0]),
    )
    patience = own.choice([None, None, None, own.random() * 0.3])
    outputs = []
    try:
        async with asyncio.timeout(patience), contextlib.aclosing(world.engine.generate(asked)) as stream:
            async for output in stream:
                outputs.append(output)
                if own.random() < 0.1:
                    await asyncio.sleep(0.05)  # a slow client
    except (TimeoutError, QueueFull, EngineDead) as error:
        return type(error).__name__
    last = outputs[-1]
    got = [token for output in outputs for token in output.token_ids]
    assert got == expected_tokens(prompt, asked.sampling, len(got), options)
    assert last.finish_reason != "length" or len(got) == asked.sampling.max_tokens
    return f"{last.finish_reason}{last.error_kind}"


def random_settings(rng: random.Random) -> dict[str, Any]:
    return {
        "blocks": rng.randint(30, 90),
        "max_num_seqs": rng.randint(1, 8),
        "step_policy": rng.choice(["mixed", "mixed", "separate"]),
        "queue_policy": rng.choice(["least-work", "fcfs"]),
        "itl_target_ms": "auto",
        "coalesce_target_fill": rng.choice([0.0, 0.0, 0.5, 1.0]),
        "prefill_decode_interval": rng.choice([0, 0, 2]),
        "max_decode_gap_ms": rng.choice([None, 60.0]),
        "max_chunk_tokens": rng.choice([0, 0, 7]),
        "max_bypass_ms": rng.choice([0.0, 100.0, 1000.0]),
        "prefix_wait_ms": rng.choice([None, 50.0]),
        "max_queued_requests": rng.choice([None, None, 12]),
        "max_steps_in_flight": rng.choice([1, 2, 2]),
    }


def life(seed: int) -> tuple[str, Counter[str]]:
    """A random life: settings, arrivals, abort storms, slow clients, late steps, a dying worker. Returns a digest
    of the event log and how requests ended."""
    rng = random.Random(seed)
    settings = random_settings(rng)
    dies_at = rng.uniform(0.1, 1.0) if rng.random() < 0.2 else None
    late = rng.random() < 0.1
    if late:
        settings["step_timeout"] = 0.011
    options = SimulationOptions(
        vocab_size=1000, decode_fixed_ms=rng.choice([1.0, 10.0]), prefill_ms_per_ktoken=rng.choice([10.0, 500.0])
    )

    async def scenario(world: Virtual) -> tuple[str, Counter[str]]:
        clients = [
            asyncio.create_task(one_client(world, options, random.Random(seed * 1009 + n), n)) for n in range(30)
        ]
        if dies_at is not None:
            await asyncio.sleep(dies_at)
            world.workers.fail(WorkerFailure(rank=0, pid=7, step_id=3, message="worker 0 died"))
        if rng.random() < 0.3:
            await asyncio.sleep(0.3)
            for number in range(0, 30, 2):
                world.engine.abort(f"r{number}")  # a storm
        ends = Counter(await asyncio.gather(*clients))
        stats = await world.engine.stats()
        if world.engine.failure is None:
            assert (stats.running, stats.waiting, stats.kv_blocks_used, stats.parked) == (0, 0, 0, 0)
        elif dies_at is None and not late:
            raise AssertionError(world.engine.failure)
        return hashlib.sha256(msgspec.json.encode(world.events)).hexdigest(), ends

    return run(scenario, options=options, **settings)


@pytest.mark.parametrize("block", range(40))
def test_seeded_lives_with_faults(block: int) -> None:
    for seed in range(block * 25, block * 25 + 25):
        try:
            _, ends = life(seed)
        except BaseException as error:
            raise AssertionError(f"python tests/engine/test_scheduling.py {seed}   reproduces: {error!r}") from error
        assert sum(ends.values()) == 30, f"seed {seed}: somebody heard no end"


def test_the_lives_reach_what_matters() -> None:
    ends: Counter[str] = Counter()
    for seed in range(120):
        ends += life(seed)[1]
    assert ends.keys() >= {"length", "abort", "errordeadline", "TimeoutError", "QueueFull", "EngineDead"}


def test_a_seed_gives_the_same_log_under_any_hash_seed() -> None:
    def digests(hash_seed: str) -> str:
        result = subprocess.run(
            [sys.executable, __file__, "3", "8", "21"],
            env=os.environ | {"PYTHONHASHSEED": hash_seed},
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            check=True,
        )
        return result.stdout

    assert digests("0") == digests("1") == digests("4711")


if __name__ == "__main__":
    for text in sys.argv[1:]:
        print(text, *life(int(text)))  # noqa: T201
