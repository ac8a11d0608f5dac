"""The engine's side of the socket to its frontend, in this process."""

from __future__ import annotations

import asyncio
import gc
import socket

import pytest

from atom_async.config import EngineConfig
from atom_async.engine import ipc
from atom_async.engine.client import EngineOutput, EngineRequest
from atom_async.engine.local import LocalEngine
from atom_async.engine.process import EngineServer
from atom_async.engine.prompts import prepared
from atom_async.sim.workers import SimulatedWorkers
from atom_async.wire import framing
from atom_async.wire.messages import pack_ints
from atom_async.wire.sampling import SamplingParams
from atom_async.wire.simulation import SimulationOptions


def make_engine() -> LocalEngine:
    config = EngineConfig(device="simulated", max_num_seqs=8, max_num_batched_tokens=4096)
    workers = SimulatedWorkers(SimulationOptions(), block_size=16, max_num_seqs=8, num_kv_blocks=512)
    return LocalEngine(config, workers, max_model_len=4096, vocab_size=32_000, dtype="float32")


async def test_an_output_too_large_for_a_message_ends_its_request_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(framing, "MAX_FRAME", 50_000)
    ours, theirs = socket.socketpair()
    channel = await framing.open_channel(ours, ipc.EngineMessage)
    server = EngineServer(await framing.open_channel(theirs, ipc.FrontendMessage), make_engine())
    serving = asyncio.create_task(server.run())
    try:
        ready = await channel.receive()
        assert isinstance(ready, ipc.Ready)
        large = SamplingParams(max_tokens=5, temperature=0.0, prompt_logprobs=20)
        small = SamplingParams(max_tokens=5, temperature=0.0)
        for name, sampling in (("large", large), ("small", small)):
            one = EngineRequest(request_id=name, prompt_token_ids=pack_ints([1] * 1500), sampling=sampling)
            channel.send(ipc.Submit.of(await prepared([one], ready.info, caching=True)))
        ends: dict[str, EngineOutput] = {}
        while len(ends) < 2:
            message = await channel.receive()
            assert isinstance(message, ipc.Outputs)
            for output in message.outputs:
                if output.finish_reason is not None:
                    ends.setdefault(output.request_id, output)
        assert ends["small"].finish_reason == "length"
        assert ends["large"].finish_reason == "error"
        assert "too large" in ends["large"].error
        channel.send(ipc.Stop())
        assert await serving == 0
    finally:
        await channel.close()
        gc.unfreeze()
