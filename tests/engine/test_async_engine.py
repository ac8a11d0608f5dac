"""`AsyncEngine` as an embedder uses it: real workers on the simulated model, text through the real tokenizer."""

from __future__ import annotations

import asyncio

import psutil
import pytest

import atom_async
from atom_async import AsyncEngine, EngineConfig, SamplingParams, TextOutput
from atom_async.engine.client import EngineDead, EngineDraining, RequestRejected
from atom_async.model.resolve import ResolvedModel

pytestmark = [pytest.mark.process, pytest.mark.usefixtures("default_model")]
VOCABULARY = '{"vocab_size": 49152, "decode_fixed_ms": 5}'


def make_engine(**settings: object) -> AsyncEngine:
    return AsyncEngine("default", device="simulated", simulation=VOCABULARY, **settings)


async def collect(engine: AsyncEngine, *args: object, **kwargs: object) -> list[TextOutput]:
    return [output async for output in engine.generate(*args, **kwargs)]


def text_of(outputs: list[TextOutput]) -> str:
    return "".join(output.text for output in outputs)


async def test_prompts_as_text_ids_and_messages() -> None:
    async with make_engine() as engine:
        by_text = await collect(engine, "one two three", max_tokens=6, temperature=0.0)
        ids = engine.tokenizer.encode("one two three")
        by_ids = await collect(engine, ids, SamplingParams(max_tokens=6, temperature=0.0))
        assert text_of(by_text) == text_of(by_ids) == engine.tokenizer.decode([t for o in by_ids for t in o.token_ids])
        chat = await collect(engine, [{"role": "user", "content": "Hi"}], max_tokens=2)
        assert chat[-1].prompt_tokens > 20
        assert (chat[-1].finish_reason, chat[-1].completion_tokens) == ("length", 2)


async def test_a_stop_string_ends_the_text_and_frees_the_request() -> None:
    async with make_engine() as engine:
        unstopped = await collect(engine, "one two", max_tokens=30, temperature=0.0)
        whole, tokens = text_of(unstopped), [token for output in unstopped for token in output.token_ids]
        stop = whole[10:14]
        outputs = await collect(engine, "one two", max_tokens=30, temperature=0.0, stop=[stop])
        assert text_of(outputs) == whole[: whole.index(stop)]
        assert (outputs[-1].finish_reason, outputs[-1].stop_reason) == ("stop", stop)
        needed = next(n for n in range(30) if stop in engine.tokenizer.decode(tokens[:n]))
        assert outputs[-1].completion_tokens == needed
        stats = await engine.stats()
        assert (stats.running, stats.kv_blocks_used, stats.aborted) == (0, 0, 0)


async def test_leaving_the_loop_aborts() -> None:
    async with make_engine() as engine:
        stream = engine.generate("one", max_tokens=500)
        async for _ in stream:
            break
        await stream.aclose()
        stats = await engine.stats()
        assert (stats.running, stats.kv_blocks_used, stats.aborted) == (0, 0, 1)


async def test_abort_by_id_and_drain() -> None:
    async with make_engine() as engine:
        task = asyncio.create_task(collect(engine, "one", max_tokens=4000, request_id="mine"))
        other = engine.generate("two", max_tokens=20)
        await anext(other)
        engine.abort("mine")
        assert (await task)[-1].finish_reason == "abort"
        draining = asyncio.create_task(engine.drain())
        await asyncio.sleep(0)
        with pytest.raises(EngineDraining):
            await collect(engine, "three")
        assert [output async for output in other][-1].finish_reason == "length"
        await draining


async def test_what_makes_no_sense_is_refused() -> None:
    with pytest.raises(ValueError, match="either config or a model"):
        AsyncEngine("default", config=EngineConfig())
    with pytest.raises(Exception, match="max_num_seqs"):
        AsyncEngine("default", max_num_seqs=0)
    with pytest.raises(Exception, match="no_such_setting"):
        AsyncEngine("default", no_such_setting=1)
    async with make_engine() as engine:
        with pytest.raises(ValueError, match="temprature"):
            await collect(engine, "one", temprature=1.0)
        with pytest.raises(ValueError, match="not both"):
            await collect(engine, "one", SamplingParams(max_tokens=3), temperature=1.0)
        with pytest.raises(RequestRejected, match="empty"):
            await collect(engine, [])
        with pytest.raises(RequestRejected, match="maximum context length is 8192"):
            await collect(engine, [1] * 8192)
        for wrong in (-1, 49152, 2**31, 2**80):
            with pytest.raises(RequestRejected, match=f"token id {wrong} is not"):
                await collect(engine, [1, wrong])


async def test_a_killed_worker_ends_every_iterator_with_its_cause() -> None:
    async with make_engine() as engine:
        tasks = [asyncio.create_task(collect(engine, f"say {n}", max_tokens=4000)) for n in range(4)]
        await asyncio.sleep(0.1)
        (pid,) = engine.info.worker_pids
        psutil.Process(pid).kill()
        async with asyncio.timeout(1):
            results = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(result, EngineDead) and "SIGKILL" in str(result) for result in results)
        assert "SIGKILL" in (engine.failure or "")
    assert not psutil.Process().children()


async def test_what_is_sampled_without_a_seed_follows_from_the_engines() -> None:
    answers = []
    for seed in (5, 5, 6):
        async with make_engine(seed=seed) as engine:
            answers.append([text_of(await collect(engine, "one two", max_tokens=8)) for _ in range(2)])
    assert answers[0] == answers[1] != answers[2]
    assert answers[0][0] != answers[0][1]


async def test_leaving_ends_the_workers(default_model: ResolvedModel) -> None:
    async with make_engine(tp=3) as engine:
        assert engine.model.name == default_model.name
        assert len(psutil.Process().children()) == 3
    assert not psutil.Process().children()


def test_the_public_names() -> None:
    assert set(atom_async.__all__) == {
        "AsyncEngine",
        "EngineConfig",
        "Grammar",
        "SamplingParams",
        "TextOutput",
        "__version__",
    }
    assert all(getattr(atom_async, name) is not None for name in atom_async.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = atom_async.nonsense
