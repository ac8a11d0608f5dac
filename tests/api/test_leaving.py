"""A client that goes away takes its requests with it, whatever they were doing."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from asgi import begin
from scripted import ScriptedEngine, outputs_for
from starlette.applications import Starlette

from atom_async.api.state import ServerState

MESSAGES: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello"}]}


@pytest.fixture
def gated(engine: ScriptedEngine) -> ScriptedEngine:
    engine.gate = asyncio.Semaphore(0)
    engine.script = lambda request: outputs_for(request, [5, 6, 7, 8])
    return engine


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("tokens_before", [0, 2])
async def test_disconnect_aborts_at_once(
    app: Starlette, gated: ScriptedEngine, state: ServerState, stream: bool, n: int, tokens_before: int
) -> None:
    assert gated.gate is not None
    exchange, task = begin(app, "POST", "/v1/chat/completions", MESSAGES | {"stream": stream, "n": n})
    await gated.gate_reached(n)
    for _ in range(tokens_before * n):
        gated.gate.release()
    await gated.gate_reached(n * (tokens_before + 1))
    exchange.leave.set()
    await task
    assert not gated.running
    assert sorted(gated.left_early) == sorted(request.request_id for request in gated.requests)
    assert state.metrics.ended["abort"] == n
    assert bool(exchange.writes) == (stream and tokens_before > 0)


async def test_the_server_may_cancel_a_request(app: Starlette, gated: ScriptedEngine) -> None:
    """As uvicorn does when its patience at shutdown ends."""
    _, task = begin(app, "POST", "/v1/completions", {"prompt": "x", "stream": True})
    await gated.gate_reached(1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not gated.running
    assert len(gated.left_early) == 1


async def test_one_failing_choice_ends_the_others(app: Starlette, engine: ScriptedEngine) -> None:
    from atom_async.engine.client import EngineError

    engine.gate = asyncio.Semaphore(0)
    engine.script = lambda request: (
        [EngineError("broken")] if request.request_id.endswith("-1") else outputs_for(request, [5, 6])
    )
    exchange, task = begin(app, "POST", "/v1/completions", {"prompt": "x", "n": 2})
    await engine.gate_reached(2)
    engine.gate.release()
    engine.gate.release()
    await task
    assert exchange.status == 500
    assert not engine.running
    assert engine.left_early == [engine.requests[0].request_id]
