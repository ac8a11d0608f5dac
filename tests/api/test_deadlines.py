"""Deadlines and a full queue, as a client meets them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from asgi import begin, call
from scripted import ScriptedEngine
from starlette.applications import Starlette

from atom_async.api.state import ServerState
from atom_async.engine.client import EngineOutput, QueueFull

BODY: dict[str, Any] = {"prompt": "Hello"}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello"}]}


@pytest.mark.parametrize(("path", "body"), [("/v1/completions", BODY), ("/v1/chat/completions", CHAT)])
@pytest.mark.parametrize("where", ["header", "body"])
async def test_the_engine_gets_what_is_left_of_the_deadline(
    app: Starlette, engine: ScriptedEngine, path: str, body: dict[str, Any], where: str
) -> None:
    headers = {"x-request-deadline-ms": "5000"} if where == "header" else {}
    fields = {"deadline_ms": 5000} if where == "body" else {}
    exchange = await call(app, "POST", path, body | fields, headers)
    assert exchange.status == 200
    assert 0 < engine.requests[-1].deadline_ms <= 5000


async def test_without_a_deadline_there_is_none(app: Starlette, engine: ScriptedEngine) -> None:
    await call(app, "POST", "/v1/completions", BODY)
    assert engine.requests[-1].deadline_ms is None


@pytest.mark.parametrize("text", ["0", "-1", "soon", "", "nan", "inf", "1e400"])
async def test_a_header_that_is_no_time_is_refused_by_name(app: Starlette, engine: ScriptedEngine, text: str) -> None:
    exchange = await call(app, "POST", "/v1/completions", BODY, {"x-request-deadline-ms": text})
    assert exchange.status == 400
    assert exchange.error["param"] == "x-request-deadline-ms"
    assert not engine.requests


@pytest.mark.parametrize("value", [0, -5, "soon"])
async def test_a_field_that_is_no_time_is_refused_by_name(app: Starlette, engine: ScriptedEngine, value: Any) -> None:
    exchange = await call(app, "POST", "/v1/completions", BODY | {"deadline_ms": value})
    assert exchange.status == 400
    assert exchange.error["param"] == "deadline_ms"


async def test_two_different_deadlines_are_refused(app: Starlette) -> None:
    exchange = await call(app, "POST", "/v1/completions", BODY | {"deadline_ms": 7}, {"x-request-deadline-ms": "8"})
    assert exchange.status == 400
    exchange = await call(app, "POST", "/v1/completions", BODY | {"deadline_ms": 8e6}, {"x-request-deadline-ms": "8e6"})
    assert exchange.status == 200


async def test_a_deadline_used_up_before_the_engine_is_a_504(
    app: Starlette, engine: ScriptedEngine, state: ServerState
) -> None:
    times = iter([100.0, 100.5, 101.0, 101.5, 102.0, 102.5])
    state.metrics.clock = lambda: next(times)
    exchange = await call(app, "POST", "/v1/completions", BODY | {"deadline_ms": 400})
    assert exchange.status == 504
    assert exchange.error["code"] == "deadline_exceeded"
    assert not engine.requests


@pytest.mark.parametrize("stream", [False, True])
async def test_a_deadline_that_passes_in_the_queue_is_a_504(
    app: Starlette, engine: ScriptedEngine, stream: bool
) -> None:
    engine.script = lambda request: [
        EngineOutput(request_id=request.request_id, finish_reason="error", error="waited 9 ms", error_kind="deadline")
    ]
    exchange = await call(app, "POST", "/v1/completions", BODY | {"stream": stream})
    assert exchange.status == 504
    assert exchange.error == {
        "message": "waited 9 ms",
        "type": "server_error",
        "param": None,
        "code": "deadline_exceeded",
    }


@pytest.mark.parametrize("stream", [False, True])
async def test_a_full_queue_is_a_429_that_says_when_to_come_back(
    app: Starlette, engine: ScriptedEngine, stream: bool
) -> None:
    engine.script = lambda request: [QueueFull("the queue is full: 7 wait", retry_after_s=2.2)]
    exchange = await call(app, "POST", "/v1/chat/completions", CHAT | {"stream": stream})
    assert (exchange.status, exchange.headers["retry-after"]) == (429, "3")
    assert exchange.error["code"] == "queue_full"


async def test_one_refused_choice_ends_the_others(app: Starlette, engine: ScriptedEngine) -> None:
    engine.gate = asyncio.Semaphore(0)

    def script(request: Any) -> list[Any]:
        if request.request_id.endswith("-2"):
            return [QueueFull("full", retry_after_s=1)]
        return [EngineOutput(request_id=request.request_id, token_ids=[5])] * 3

    engine.script = script
    exchange, task = begin(app, "POST", "/v1/completions", BODY | {"n": 3})
    await engine.gate_reached(3)
    for _ in range(3):
        engine.gate.release()
    await task
    assert exchange.status == 429
    assert not engine.running
