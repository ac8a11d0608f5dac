"""The engine's tasks in virtual time on simulated workers, with every event kept."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

from atom_async.config import EngineConfig
from atom_async.engine.client import EngineOutput, EngineRequest
from atom_async.engine.local import LocalEngine
from atom_async.events.schema import Event
from atom_async.sim.loop import VirtualLoop
from atom_async.sim.workers import SimulatedWorkers
from atom_async.wire.messages import pack_ints
from atom_async.wire.sampling import SamplingParams
from atom_async.wire.simulation import SimulationOptions

OPTIONS = SimulationOptions(
    vocab_size=1000,
    decode_fixed_ms=10.0,
    decode_ms_per_sequence=0.1,
    prefill_fixed_ms=20.0,
    prefill_ms_per_ktoken=50.0,
)


async def inline(function: Callable[..., bytes], *args: object) -> bytes:
    return function(*args)


class Virtual:
    """An engine, its workers, its clock and what it said."""

    def __init__(self, *, blocks: int = 64, options: SimulationOptions = OPTIONS, **settings: Any) -> None:
        self.loop = asyncio.get_running_loop()
        assert isinstance(self.loop, VirtualLoop)
        config = EngineConfig(
            **{"max_num_seqs": 8, "max_num_batched_tokens": 32, "block_size": 4, "device": "simulated"} | settings
        )
        self.workers = SimulatedWorkers(
            options, block_size=config.block_size, max_num_seqs=config.max_num_seqs, num_kv_blocks=blocks
        )
        self.events: list[Event] = []
        self.engine = LocalEngine(
            config,
            self.workers,
            max_model_len=4096,
            vocab_size=50_000,
            dtype="float32",
            clock=self.loop.time,
            offload=inline,
            checked=True,
            emit=self.events.append,
        )

    @property
    def now(self) -> float:
        return self.loop.time()

    def named(self, kind: type[Event]) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]

    async def collect(self, asked: EngineRequest) -> list[EngineOutput]:
        async with contextlib.aclosing(self.engine.generate(asked)) as stream:
            return [output async for output in stream]

    def start(self, asked: EngineRequest) -> asyncio.Task[list[EngineOutput]]:
        return asyncio.create_task(self.collect(asked))


def request(name: str, prompt: list[int], max_tokens: int = 4, **fields: Any) -> EngineRequest:
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    return EngineRequest(request_id=name, prompt_token_ids=pack_ints(prompt), sampling=sampling, **fields)


def run(scenario: Callable[[Virtual], Awaitable[Any]], **settings: Any) -> Any:
    async def main() -> Any:
        world = Virtual(**settings)
        await world.engine.start()
        try:
            return await scenario(world)
        finally:
            await world.engine.stop()

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main())
