"""A real engine process with real worker processes on the simulated model, used, killed and stopped."""

from __future__ import annotations

import asyncio
import os
import random
import signal

import psutil
import pytest

from atom_async.config import EngineConfig
from atom_async.engine import ipc, remote
from atom_async.engine.client import (
    EngineDead,
    EngineDraining,
    EngineError,
    EngineOutput,
    EngineRequest,
    EngineStopped,
    QueueFull,
    RequestRejected,
)
from atom_async.engine.process import _rejection
from atom_async.engine.remote import RemoteEngine, _refusal
from atom_async.engine.workers import WorkerStartError
from atom_async.wire.messages import pack_ints
from atom_async.wire.model import ModelSpec, WeightSource
from atom_async.wire.sampling import Grammar, SamplingParams
from atom_async.wire.simulation import SimulationOptions, expected_tokens

pytestmark = pytest.mark.process

SPEC = ModelSpec(
    architecture="llama",
    hidden_size=8,
    intermediate_size=8,
    num_layers=1,
    num_heads=1,
    num_kv_heads=1,
    head_dim=8,
    vocab_size=32_000,
    max_positions=4096,
    rms_norm_eps=1e-5,
    rope_theta=1e4,
)
FACTS = ipc.ModelFacts(
    spec=SPEC,
    weights=WeightSource(kind="random"),
    device="simulated",
    dtype="float32",
    max_model_len=4096,
    tokenizer_json="",
    end_token_ids=(),
)
OPTIONS = SimulationOptions()
SLOW = '{"decode_fixed_ms": 20, "prefill_fixed_ms": 20}'


class Started:
    """An engine for one test; afterwards none of its processes, descriptors or tasks is left."""

    def __init__(self, **settings: object) -> None:
        self.engine = RemoteEngine(EngineConfig(device="simulated", **settings), FACTS, log_level="warning")

    async def __aenter__(self) -> RemoteEngine:
        self.fds = len(os.listdir("/proc/self/fd"))
        self.info = await self.engine.start()
        return self.engine

    async def __aexit__(self, *error: object) -> None:
        await self.engine.stop()
        await gone([self.info.engine_pid, *self.info.worker_pids])
        assert len(os.listdir("/proc/self/fd")) == self.fds, "descriptors leaked"
        assert len(asyncio.all_tasks()) == 1, asyncio.all_tasks()


async def gone(pids: list[int]) -> None:
    processes = [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]
    _, alive = await asyncio.to_thread(psutil.wait_procs, processes, timeout=5)
    assert not alive, f"left behind: {alive}"


def request(name: str, prompt: list[int], max_tokens: int = 4) -> EngineRequest:
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    return EngineRequest(request_id=name, prompt_token_ids=pack_ints(prompt), sampling=params)


async def collect(engine: RemoteEngine, asked: EngineRequest) -> list[EngineOutput]:
    return [output async for output in engine.generate(asked)]


def tokens_of(outputs: list[EngineOutput]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


async def test_many_clients_get_what_their_prompts_alone_give() -> None:
    async with Started(tp=2, max_num_seqs=16) as engine:
        rng = random.Random(1)
        asked = [request(f"r{n}", [*range(rng.randint(0, 300)), n], max_tokens=rng.randint(1, 60)) for n in range(60)]
        asked.append(request("long", list(range(3000)) + [9] * 1000, max_tokens=3))
        answers = await asyncio.gather(*(collect(engine, a) for a in asked))
        for one, outputs in zip(asked, answers, strict=True):
            prompt = list(memoryview(one.prompt_token_ids).cast("i"))
            assert tokens_of(outputs) == expected_tokens(prompt, one.sampling, one.sampling.max_tokens, OPTIONS)
        stats = await engine.stats()
        assert (stats.running, stats.waiting, stats.kv_blocks_used) == (0, 0, 0)
        assert stats.prefix_cache_hits > 0
        assert (await engine.state())["running"] == []


async def test_the_choices_of_one_body_come_in_one_stream() -> None:
    async with Started() as engine:
        prompt, params = pack_ints(range(100)), SamplingParams(max_tokens=5, temperature=0.0)
        body = [EngineRequest(request_id=f"c{n}", prompt_token_ids=prompt, sampling=params) for n in range(5)]
        got: dict[str, list[int]] = {one.request_id: [] for one in body}
        async for outputs in engine.generate_all(body):
            for output in outputs:
                got[output.request_id] += output.token_ids
        alone = expected_tokens(list(range(100)), params, 5, OPTIONS)
        assert got == {one.request_id: alone for one in body}
        assert (await engine.stats()).prompt_tokens_computed < 2 * 100


@pytest.mark.parametrize("wrong", [-1, 32_000, 2**31 - 1])
async def test_an_id_outside_the_vocabulary_is_refused_with_its_whole_body(wrong: int) -> None:
    async with Started() as engine:
        with pytest.raises(RequestRejected, match=f"token id {wrong} is not"):
            async for _ in engine.generate_all([request("a", [1]), request("b", [1, wrong])]):
                pass
        stats = await engine.stats()
        assert (stats.running, stats.waiting, stats.prompt_tokens) == (0, 0, 0)


async def test_after_the_stop_everything_says_so() -> None:
    engine = RemoteEngine(EngineConfig(device="simulated", simulation=SLOW), FACTS, log_level="warning")
    await engine.start()
    running = engine.generate(request("a", [1], max_tokens=1000))
    await anext(running)
    await engine.stop()
    with pytest.raises(EngineStopped):
        await collect(engine, request("b", [1]))
    with pytest.raises(EngineStopped):
        await engine.stats()
    with pytest.raises(EngineStopped):
        async for _ in running:
            pass
    assert engine.failure is None


async def test_an_engine_that_does_not_answer_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "ANSWER_TIMEOUT_S", 0.1)
    async with Started() as engine:
        os.kill(engine.info.engine_pid, signal.SIGSTOP)
        with pytest.raises(EngineError, match=r"has not answered for 0\.1 s"):
            await engine.stats()
        os.kill(engine.info.engine_pid, signal.SIGCONT)
        monkeypatch.undo()
        assert (await engine.stats()).running == 0


def every(kind: type[EngineError]) -> list[type[EngineError]]:
    return [kind, *(deeper for below in kind.__subclasses__() for deeper in every(below))]


@pytest.mark.parametrize("kind", [k for k in every(EngineError) if k is not EngineError])
def test_a_refusal_is_the_same_on_both_sides(kind: type[EngineError]) -> None:
    error = kind("why", retry_after_s=2.5) if kind is QueueFull else kind("why")
    crossed = _refusal(_rejection("a", error))
    assert (type(crossed), str(crossed), vars(crossed)) == (kind, "why", vars(error))


async def test_a_client_that_leaves_frees_its_blocks() -> None:
    async with Started(simulation=SLOW) as engine:
        stream = engine.generate(request("a", list(range(50)), max_tokens=1000))
        await anext(stream)
        assert (await engine.stats()).kv_blocks_used > 0
        await stream.aclose()
        stats = await engine.stats()
        assert (stats.kv_blocks_used, stats.aborted) == (0, 1)


async def test_abort_finish_and_refusals() -> None:
    async with Started(simulation=SLOW) as engine:
        aborted, finished = (
            asyncio.create_task(collect(engine, request(name, [1, 2], max_tokens=1000))) for name in "ab"
        )
        first = engine.generate(request("c", [3], max_tokens=1000))
        await anext(first)
        with pytest.raises(RequestRejected, match="running already"):
            await collect(engine, request("c", [1]))
        engine.abort("a", reason="enough")
        engine.finish("b")
        assert ((await aborted)[-1].finish_reason, (await aborted)[-1].error) == ("abort", "enough")
        assert (await finished)[-1].finish_reason == "stop"
        with pytest.raises(RequestRejected, match="maximum context length"):
            await collect(engine, request("d", [1] * 4096))
        await first.aclose()


async def test_drain_refuses_the_new_and_waits_for_the_running() -> None:
    async with Started(simulation=SLOW) as engine:
        running = engine.generate(request("a", [1], max_tokens=10))
        await anext(running)
        draining = asyncio.create_task(engine.drain())
        await asyncio.sleep(0)
        with pytest.raises(EngineDraining):
            await collect(engine, request("b", [1]))
        rest = [output async for output in running]
        assert rest[-1].finish_reason == "length"
        await draining


@pytest.mark.parametrize("victim", ["engine", "worker"])
@pytest.mark.parametrize("seed", range(3))
async def test_a_kill_at_any_moment_reaches_every_client_within_a_second(victim: str, seed: int) -> None:
    rng = random.Random(seed)
    async with Started(tp=2, simulation=SLOW) as engine:
        tasks = [asyncio.create_task(collect(engine, request(f"r{n}", [n], max_tokens=2000))) for n in range(20)]
        await asyncio.sleep(rng.random() * 0.3)
        pid = engine.info.engine_pid if victim == "engine" else rng.choice(engine.info.worker_pids)
        os.kill(pid, signal.SIGKILL)
        async with asyncio.timeout(1):
            results = await asyncio.gather(*tasks, return_exceptions=True)
        for result in results:
            assert isinstance(result, EngineDead)
            assert f"pid {pid}" in str(result)
            assert "was killed by SIGKILL" in str(result)
        assert engine.failure == await engine.wait_failed()
        with pytest.raises(EngineDead):
            await engine.stats()
        await gone([engine.info.engine_pid, *engine.info.worker_pids])


async def test_a_start_that_cannot_succeed_says_why() -> None:
    engine = RemoteEngine(EngineConfig(device="simulated", simulation='{"wrong": 1}'), FACTS, log_level="error")
    with pytest.raises(WorkerStartError, match="wrong"):
        await engine.start()
    settings = EngineConfig(device="simulated", max_num_seqs=64, max_num_batched_tokens=8)
    with pytest.raises(WorkerStartError, match="at least --max-num-seqs"):
        await RemoteEngine(settings, FACTS, log_level="error").start()
    assert not psutil.Process().children()


async def test_a_cancelled_start_leaves_nothing() -> None:
    engine = RemoteEngine(EngineConfig(device="simulated", simulation='{"start_delay_ms": 60000}'), FACTS)
    begun = asyncio.Event()
    starting = asyncio.create_task(engine.start(lambda progress: begun.set()))
    await begun.wait()
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert not psutil.Process().children(recursive=True)


async def test_many_large_grammars_at_once_are_answered_and_the_engine_lives() -> None:
    """The simulated device refuses them, each for itself; the plans that carry them must fit the ring."""
    grammar = Grammar("regex", "a" * (1 << 20))
    async with Started(max_num_seqs=16) as engine:
        params = SamplingParams(max_tokens=4, temperature=0.0, grammar=grammar)
        asked = [EngineRequest(request_id=f"g{n}", prompt_token_ids=pack_ints([n]), sampling=params) for n in range(12)]
        answers = await asyncio.gather(*(collect(engine, one) for one in asked))
        assert all("cannot follow a grammar" in outputs[-1].error for outputs in answers)
        assert len(tokens_of(await collect(engine, request("after", [1, 2])))) == 4
