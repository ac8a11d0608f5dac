"""The engine's tasks in virtual time, on simulated workers that check every plan."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable

import pytest

from atom_async.config import EngineConfig
from atom_async.engine.client import (
    EngineDead,
    EngineDraining,
    EngineOutput,
    EngineRequest,
    RequestRejected,
)
from atom_async.engine.local import LocalEngine
from atom_async.engine.workers import WorkerFailure
from atom_async.sim.loop import VirtualLoop
from atom_async.sim.workers import SimulatedWorkers
from atom_async.wire.messages import pack_ints
from atom_async.wire.sampling import Grammar, SamplingParams
from atom_async.wire.simulation import SimulationOptions, expected_tokens

OPTIONS = SimulationOptions(vocab_size=1000, decode_fixed_ms=10.0, prefill_fixed_ms=20.0)


async def inline(function: Callable[..., bytes], *args: object) -> bytes:
    return function(*args)


def make_engine(*, blocks: int = 64, **settings: int | float) -> tuple[LocalEngine, SimulatedWorkers]:
    config = EngineConfig(
        **{"max_num_seqs": 8, "max_num_batched_tokens": 32, "block_size": 4, "device": "simulated"} | settings
    )
    workers = SimulatedWorkers(
        OPTIONS, block_size=config.block_size, max_num_seqs=config.max_num_seqs, num_kv_blocks=blocks
    )
    loop = asyncio.get_running_loop()
    engine = LocalEngine(
        config,
        workers,
        max_model_len=4096,
        vocab_size=1000,
        dtype="float32",
        clock=loop.time,
        offload=inline,
        checked=True,
    )
    return engine, workers


def request(name: str, prompt: list[int], max_tokens: int = 4, **sampling: object) -> EngineRequest:
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, **sampling)
    return EngineRequest(request_id=name, prompt_token_ids=pack_ints(prompt), sampling=params)


async def collect(engine: LocalEngine, asked: EngineRequest) -> list[EngineOutput]:
    return [output async for output in engine.generate(asked)]


def tokens_of(outputs: list[EngineOutput]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


def run(scenario: Callable[[LocalEngine, SimulatedWorkers], Awaitable[None]], **settings: int | float) -> None:
    async def main() -> None:
        engine, workers = make_engine(**settings)
        await engine.start()
        await scenario(engine, workers)
        await engine.stop()

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(main())


def test_generates_what_the_prompt_alone_gives_and_tells_the_times() -> None:
    async def scenario(engine: LocalEngine, workers: SimulatedWorkers) -> None:
        asked = request("a", list(range(10)), max_tokens=5)
        outputs = await collect(engine, asked)
        assert tokens_of(outputs) == expected_tokens(list(range(10)), asked.sampling, 5, OPTIONS)
        assert [o.finish_reason for o in outputs] == [None] * 4 + ["length"]
        timings = outputs[-1].timings
        assert timings.queue_s == 0
        assert timings.prefill_s == pytest.approx(0.020)
        assert timings.decode_s == pytest.approx(0.040)

    run(scenario)


def test_many_at_once_give_the_same_as_one_by_one() -> None:
    async def scenario(engine: LocalEngine, workers: SimulatedWorkers) -> None:
        rng = random.Random(5)
        asked = [
            request(f"r{n}", [*list(range(rng.randint(0, 30))), n], max_tokens=rng.randint(1, 20)) for n in range(30)
        ]
        answers = await asyncio.gather(*(collect(engine, a) for a in asked))
        for one, outputs in zip(asked, answers, strict=True):
            prompt = list(memoryview(one.prompt_token_ids).cast("i"))
            assert tokens_of(outputs) == expected_tokens(prompt, one.sampling, one.sampling.max_tokens, OPTIONS)
        stats = await engine.stats()
        assert (stats.running, stats.waiting, stats.kv_blocks_used) == (0, 0, 0)

    run(scenario, blocks=40)


@pytest.mark.parametrize("seed", range(12))
def test_seeded_clients_come_go_and_vanish(seed: int) -> None:
    async def client(engine: LocalEngine, rng: random.Random, number: int) -> None:
        await asyncio.sleep(rng.random())
        prompt = [*list(range(rng.randint(0, 40))), number]
        asked = request(f"r{number}", prompt, max_tokens=rng.randint(1, 30))
        patience = rng.choice([None, None, rng.random() * 0.4])
        try:
            async with asyncio.timeout(patience):
                outputs = await collect(engine, asked)
        except TimeoutError:
            return
        assert tokens_of(outputs) == expected_tokens(prompt, asked.sampling, asked.sampling.max_tokens, OPTIONS)

    async def scenario(engine: LocalEngine, workers: SimulatedWorkers) -> None:
        rng = random.Random(seed)
        await asyncio.gather(*(client(engine, random.Random(rng.random()), n) for n in range(40)))
        stats = await engine.stats()
        assert (stats.running, stats.waiting, stats.kv_blocks_used) == (0, 0, 0)

    run(scenario, blocks=30)


def test_leaving_the_iterator_aborts_and_frees() -> None:
    async def scenario(engine: LocalEngine, workers: SimulatedWorkers) -> None:
        stream = engine.generate(request("a", list(range(10)), max_tokens=50))
        await anext(stream)
        assert (await engine.stats()).kv_blocks_used > 0
        await stream.aclose()
        stats = await engine.stats()
        assert (stats.kv_blocks_used, stats.aborted) == (0, 1)

    run(scenario)


def test_abort_ends_the_stream_with_the_reason() -> None:
    async def scenario(engine: LocalEngine, workers: SimulatedWorkers) -> None:
        task = asyncio.create_task(collect(engine, request("a", list(range(10)), max_tokens=50)))
        await asyncio.sleep(0.05)
        engine.abort("a", reason="an operator said so")
        engine.abort("a")
        last = (await task)[-1]
        assert (last.finish_reason, last.error) == ("abort", "an operator said so")

    run(scenario)


def test_finish_ends_the_stream_without_an_abort() -> None:
    async def scenario(engine: LocalEngine, workers: SimulatedWorkers) -> None:
        task = asyncio.create_task(collect(engine, request("a", list(range(10)), max_tokens=50)))
        await asyncio.sleep(0.05)
        engine.finish("a")
        assert (await task)[-1].finish_reason == "stop"
        assert (await engine.stats()).aborted == 0

    run(scenario)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (request("x", []), "empty"),
        (request("x", [1] * 256), "maximum context length is 256"),
        (request("x", [1] * 257, max_tokens=0), "maximum context length is 256"),
    ],
)
def test_what_can_never_run_is_refused(asked: EngineRequest, message: str) -> None:
    async def scenario(engine: LocalEngine, workers: SimulatedWorkers) -> None:
        with pytest.raises(RequestRejected, match=message):
            await collect(engine, asked)

    run(scenario)


def test_an_id_in_use_is_refused() -> None:
    async def scenario(engine: LocalEngine, workers: SimulatedWorkers) -> None:
        first = asyncio.create_task(collect(engine, request("a", [1, 2])))
        await asyncio.sleep(0)
        with pytest.raises(RequestRejected, match="running already"):
            await collect(engine, request("a", [1, 2]))
        assert len(tokens_of(await first)) == 4

    run(scenario)


def test_drain_lets_the_running_end_and_refuses_the_new() -> None:
    async def scenario(engine: LocalEngine, workers: SimulatedWorkers) -> None:
        running = asyncio.create_task(collect(engine, request("a", [1, 2], max_tokens=20)))
        await asyncio.sleep(0.05)
        draining = asyncio.create_task(engine.drain())
        await asyncio.sleep(0)
        with pytest.raises(EngineDraining):
            await collect(engine, request("b", [1]))
        await draining
        assert len(tokens_of(await running)) == 20

    run(scenario)


def test_a_worker_failure_ends_every_stream_with_its_cause() -> None:
    async def scenario(engine: LocalEngine, workers: SimulatedWorkers) -> None:
        tasks = [asyncio.create_task(collect(engine, request(f"r{n}", [n], max_tokens=90))) for n in range(3)]
        await asyncio.sleep(0.1)
        workers.fail(WorkerFailure(rank=0, pid=7, step_id=3, message="worker 0 was killed by SIGKILL"))
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(result, EngineDead)
            assert "SIGKILL" in str(result)
        assert await engine.wait_failed() == engine.failure == "worker 0 was killed by SIGKILL"
        with pytest.raises(EngineDead, match="SIGKILL"):
            await collect(engine, request("late", [1]))

    run(scenario)


def test_a_step_that_takes_too_long_fails_the_engine() -> None:
    async def scenario(engine: LocalEngine, workers: SimulatedWorkers) -> None:
        with pytest.raises(EngineDead, match=r"did not finish step 1 within 0\.005 s"):
            await collect(engine, request("a", [1]))

    run(scenario, step_timeout=0.005)


def test_the_default_length_is_what_the_cache_holds() -> None:
    async def scenario(engine: LocalEngine, workers: SimulatedWorkers) -> None:
        assert engine.info.max_model_len == 64 * 4

    run(scenario)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_model_len": 5000}, "above the model's own limit of 4096"),
        ({"max_model_len": 300}, "does not fit: all of the KV cache holds 256 tokens"),
        ({"max_num_batched_tokens": 4}, "at least --max-num-seqs"),
    ],
)
def test_settings_that_cannot_work_refuse_to_start(settings: dict[str, int], message: str) -> None:
    async def main() -> None:
        engine, _ = make_engine(**settings)
        with pytest.raises(ValueError, match=message):
            await engine.start()

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(main())


def test_an_idle_engine_sets_no_timer() -> None:
    async def scenario(engine: LocalEngine, workers: SimulatedWorkers) -> None:
        await collect(engine, request("a", [1, 2]))
        assert not asyncio.get_running_loop()._scheduled

    run(scenario)


def test_more_logprobs_than_configured_are_refused() -> None:
    async def scenario(engine: LocalEngine, workers: SimulatedWorkers) -> None:
        for wanted in ({"logprobs": 21}, {"prompt_logprobs": 21}):
            with pytest.raises(RequestRejected, match="at most 20 logprobs"):
                await collect(engine, request("a", [1, 2], **wanted))

    run(scenario)


def test_logprobs_come_one_a_token_and_once_for_the_prompt() -> None:
    """With chunks and a preemption-sized cache: every prompt position is described once, in order."""

    async def one(engine: LocalEngine, number: int) -> None:
        prompt = [number, *range(30)]
        outputs = await collect(engine, request(f"r{number}", prompt, 24, logprobs=2, prompt_logprobs=1))
        tokens = tokens_of(outputs)
        assert [entry.token_id for o in outputs for entry in o.logprobs or ()] == tokens
        assert all(len(entry.top) == 2 for o in outputs for entry in o.logprobs or ())
        (whole,) = [o.prompt_logprobs for o in outputs if o.prompt_logprobs is not None]
        assert whole[0] is None
        assert [entry.token_id for entry in whole[1:]] == prompt[1:]

    async def scenario(engine: LocalEngine, workers: SimulatedWorkers) -> None:
        await asyncio.gather(*(one(engine, number) for number in range(6)))
        assert (await engine.stats()).preemptions > 0

    run(scenario, blocks=40)


def test_a_grammar_on_the_simulated_device_is_refused_and_not_ignored() -> None:
    async def scenario(engine: LocalEngine, workers: SimulatedWorkers) -> None:
        free = asyncio.create_task(collect(engine, request("free", [1, 2])))
        bound = await collect(engine, request("bound", [3], grammar=Grammar("regex", "a+")))
        assert (bound[-1].finish_reason, bound[-1].token_ids) == ("error", [])
        assert "cannot follow a grammar" in bound[-1].error
        assert len(tokens_of(await free)) == 4

    run(scenario)


def test_a_steps_age_counts_from_when_it_could_begin_and_not_from_before_an_idle_hour() -> None:
    async def scenario(engine: LocalEngine, workers: SimulatedWorkers) -> None:
        await collect(engine, request("first", [1, 2]))
        assert (await engine.stats()).step_age_s == 0
        await asyncio.sleep(3600)
        task = asyncio.create_task(collect(engine, request("second", [1, 2], max_tokens=30)))
        await asyncio.sleep(0.1)
        stats = await engine.stats()
        assert stats.steps_in_flight > 0
        assert stats.step_age_s <= 0.02
        await task

    run(scenario)


def test_a_grammar_too_large_for_any_message_is_refused() -> None:
    """Or one request could end the engine."""

    async def scenario(engine: LocalEngine, workers: SimulatedWorkers) -> None:
        with pytest.raises(RequestRejected, match="grammar and logit_bias"):
            await collect(engine, request("a", [1], grammar=Grammar("regex", "a" * (9 << 20))))
        assert len(tokens_of(await collect(engine, request("b", [1])))) == 4

    run(scenario)
