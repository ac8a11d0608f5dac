"""For operators, probes and dashboards: health, readiness, version, metrics."""

from __future__ import annotations

from prometheus_client.exposition import choose_encoder
from starlette.requests import Request
from starlette.responses import Response

from atom_async import __version__
from atom_async.api.errors import ApiError
from atom_async.api.replies import JsonReply
from atom_async.api.responses import Health, Version
from atom_async.api.state import RETRY_AFTER_S, Served, ServerState
from atom_async.engine.client import EngineError
from atom_async.telemetry.metrics import registry_of


async def health(request: Request) -> Response:
    """200 while the engine is alive and makes progress; 503 with the cause otherwise, and while loading."""
    state: ServerState = request.app.state.server
    if state.served is None:
        return JsonReply(Health("loading"), 503, {"retry-after": str(RETRY_AFTER_S)})
    cause = await _trouble(state.served, state.engine_config.step_timeout)
    return JsonReply(Health("ok")) if cause is None else JsonReply(Health("failed", cause), 503)


async def _trouble(served: Served, step_timeout: float) -> str | None:
    engine = served.engine
    if engine.failure is not None:
        return engine.failure
    try:
        stats = await engine.stats()
    except EngineError as error:
        return str(error)
    if stats.step_age_s > step_timeout:
        return f"a step has been running for {stats.step_age_s:.1f} s"
    return None


async def ready(request: Request) -> Response:
    """200 while new requests are accepted."""
    state: ServerState = request.app.state.server
    try:
        state.accepting()
    except ApiError as error:
        return JsonReply(Health(error.code or "unavailable", error.message), error.status, error.headers)
    return JsonReply(Health("ready"))


async def ping(request: Request) -> Response:
    return Response()


async def version(request: Request) -> Response:
    return JsonReply(Version(__version__))


async def metrics(request: Request) -> Response:
    """Prometheus' text, or OpenMetrics for those who ask for it."""
    state: ServerState = request.app.state.server
    await _refresh(state)
    encode, content_type = choose_encoder(request.headers.get("accept", ""))
    return Response(encode(registry_of(state.metrics)), headers={"content-type": content_type})


async def _refresh(state: ServerState) -> None:
    """A dead engine leaves its last numbers standing."""
    if state.served is None:
        return
    state.metrics.engine_up = state.served.engine.failure is None
    try:
        state.metrics.stats = await state.served.engine.stats()
    except EngineError:
        state.metrics.engine_up = False
