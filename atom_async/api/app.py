"""The ASGI application."""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from atom_async.api import model_routes, openapi, operator_routes
from atom_async.api.chat import chat_completions
from atom_async.api.completions import completions
from atom_async.api.errors import ApiError
from atom_async.api.middleware import REQUEST_ID, ApiKeys, RequestIds
from atom_async.api.replies import CLIENT_LEFT, error_reply
from atom_async.api.state import ServerState


def create_app(state: ServerState) -> Starlette:
    """Serves as soon as it runs; until `state.begin`, requests for the model get 503."""
    middleware = [Middleware(RequestIds)]
    if state.serve_config.api_key:
        middleware.append(Middleware(ApiKeys, keys=state.serve_config.api_key))
    app = Starlette(
        routes=_routes(),
        middleware=middleware,
        exception_handlers={
            ApiError: _api_error,
            HTTPException: _http_error,
            ClientDisconnect: _client_left,
            Exception: _unexpected,
        },
    )
    app.state.server = state
    return app


def _routes() -> list[Route]:
    return [
        Route("/v1/completions", completions, methods=["POST"]),
        Route("/v1/chat/completions", chat_completions, methods=["POST"]),
        Route("/v1/models", model_routes.models),
        Route("/v1/models/{name:path}", model_routes.model),
        Route("/tokenize", model_routes.tokenize, methods=["POST"]),
        Route("/detokenize", model_routes.detokenize, methods=["POST"]),
        Route("/health", operator_routes.health),
        Route("/ready", operator_routes.ready),
        Route("/ping", operator_routes.ping),
        Route("/version", operator_routes.version),
        Route("/metrics", operator_routes.metrics),
        Route("/openapi.json", _openapi),
    ]


async def _openapi(request: Request) -> Response:
    return Response(openapi.document(), media_type="application/json")


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error_reply(error)


async def _http_error(request: Request, error: Exception) -> Response:
    """Of the router: no such route, or not with this method."""
    assert isinstance(error, HTTPException)
    what = f"{request.method} {request.url.path}"
    if error.status_code == 404:
        return error_reply(ApiError(404, f"there is no route {what}; see /openapi.json", code="route_not_found"))
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "")
        return error_reply(
            ApiError(
                405, f"{what} is not possible; allowed: {allowed}", code="method_not_allowed", headers=error.headers
            )
        )
    return error_reply(ApiError(error.status_code, error.detail, headers=error.headers))


async def _client_left(request: Request, error: Exception) -> Response:
    return Response(status_code=CLIENT_LEFT)


async def _unexpected(request: Request, error: Exception) -> Response:
    """Starlette raises the error again after this answer, so that the server logs it."""
    request_id = request.scope.get("state", {}).get(REQUEST_ID)
    headers = {REQUEST_ID: request_id} if request_id is not None else None
    return error_reply(ApiError(500, f"internal error: {type(error).__name__}", code="internal_error", headers=headers))
