"""The scheduler with real workers and the real default model: shared prefixes, cadence, abort in every state."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
import uvloop

from atom_async import AsyncEngine
from atom_async.engine.local import LocalEngine
from atom_async.events.schema import Event, RequestAborted, RequestParked, StepSubmitted

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]

DATA = json.loads((Path(__file__).parent.parent / "data" / "gsm8k_sample.json").read_text())
SHOTS = "".join(f"Question: {s['question']}\nAnswer: {s['answer']}\n\n" for s in DATA["shots"][:2])
STAMPEDE = [f"{SHOTS}Question: {question}\nAnswer:" for question in DATA["questions"][:16]]


class Watched(AsyncEngine):
    """Keeps the scheduler's events."""

    def __init__(self, **settings: Any) -> None:
        super().__init__("default", device="cpu", **settings)
        self.events: list[Event] = []
        self.happened = asyncio.Event()

    def _make_engine(self) -> LocalEngine:
        engine = super()._make_engine()
        engine._emit = self._note
        return engine

    def _note(self, event: Event) -> None:
        self.events.append(event)
        self.happened.set()

    def named(self, kind: type[Event]) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]

    async def until(self, happened: Callable[[], bool]) -> None:
        async with asyncio.timeout(120):
            while not happened():
                self.happened.clear()
                await self.happened.wait()

    async def ids(self, prompt: Any, max_tokens: int, **settings: Any) -> list[int]:
        answer: list[int] = []
        stream = self.generate(prompt, max_tokens=max_tokens, temperature=0.0, ignore_eos=True, **settings)
        async for output in stream:
            answer += output.token_ids
        return answer


def run(main: Coroutine[Any, Any, Any]) -> Any:
    return uvloop.run(main)


@pytest.mark.parametrize(
    "settings", [{}, {"max_num_batched_tokens": 256, "max_chunk_tokens": 64}], ids=["default", "many steps"]
)
def test_a_stampede_computes_the_prefix_once_and_gives_the_same_text(settings: dict[str, int]) -> None:
    async def main() -> None:
        async with Watched(**settings) as engine:
            lengths = [len(engine.tokenizer.encode(prompt)) for prompt in STAMPEDE]
            shared = len(engine.tokenizer.encode(SHOTS)) // engine.info.block_size * engine.info.block_size
            assert shared > 150
            together = await asyncio.gather(*(engine.ids(prompt, 8) for prompt in STAMPEDE))
            computed = sum(e.prefill_tokens for e in engine.named(StepSubmitted))
            ideal = shared + sum(length - shared for length in lengths)
            assert computed <= ideal + 16 * engine.info.block_size
            assert len(engine.named(RequestParked)) >= 15
        async with Watched() as engine:
            alone = [await engine.ids(prompt, 8) for prompt in STAMPEDE]
        assert together == alone

    run(main())


def test_decodes_go_on_under_a_stream_of_small_prefills() -> None:
    """While prompts keep arriving, no step is without the one that decodes, and none exceeds what the bound allows."""

    async def main() -> None:
        async with Watched(itl_target_ms="auto") as engine:
            await engine.ids(STAMPEDE[0], 4)  # the model of costs has seen both kinds of step
            decoding = asyncio.create_task(engine.ids("Once upon a time", 60, request_id="decoding"))
            await engine.until(lambda: engine.events[-1:] and len(engine.named(StepSubmitted)) > 12)
            begin = len(engine.events)
            small = [
                asyncio.create_task(engine.ids(f"{number}: tell me about {question[:60]}", 2))
                for number, question in enumerate(DATA["questions"])
            ]
            await asyncio.gather(*small)
            steps = [e for e in engine.events[begin:] if isinstance(e, StepSubmitted)]
            await decoding
            running = [e for e in steps if not decoding.done() or e.decode_requests]
            assert all(e.decode_requests for e in running)
            assert max(e.prefill_tokens for e in running) < sum(e.prefill_tokens for e in running)

    run(main())


def test_abort_in_every_state_with_real_workers() -> None:
    async def main() -> None:
        async with Watched(max_num_batched_tokens=64, max_num_seqs=4) as engine:
            requests = {
                "running": STAMPEDE[0],
                "parked": STAMPEDE[1],
                "decoding": "Hello",
                "ready": "An entirely different beginning " * 20,
            }
            tasks = {}
            for name in ("decoding", "running", "parked", "ready"):
                tasks[name] = asyncio.create_task(engine.ids(requests[name], 200, request_id=name))
            await engine.until(lambda: len(engine.named(StepSubmitted)) > 3)
            for name in ("ready", "parked", "running", "decoding"):
                engine.abort(name)
            await asyncio.gather(*tasks.values())
            stats = await engine.stats()
            assert (stats.running, stats.waiting, stats.kv_blocks_used) == (0, 0, 0)
            states = {e.request_id: e.state for e in engine.named(RequestAborted)}
            assert states.keys() == requests.keys()
            assert {states["parked"], states["decoding"]} == {"parked", "running"}
            assert len(await engine.ids("Still alive", 5)) == 5

    run(main())
