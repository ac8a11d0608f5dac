"""What surrounds every route: API keys and request ids. Plain ASGI, nothing is buffered."""

from __future__ import annotations

import hmac
import re
import secrets
from collections.abc import Sequence

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from atom_async.api.errors import ApiError
from atom_async.api.replies import error_reply

OPEN_ROUTES = frozenset({"/health", "/ready"})
"""For probes, which bring no key."""
REQUEST_ID = "x-request-id"
_SANE_ID = re.compile(r"[\x21-\x7e]{1,256}")


class ApiKeys:
    """Refuses requests without one of the keys (401)."""

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app = app
        self._keys = [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or _route(scope) in OPEN_ROUTES or self._knows(Headers(scope=scope)):
            await self._app(scope, receive, send)
            return
        error = ApiError(
            401,
            "this server needs an API key: send `Authorization: Bearer KEY`",
            code="invalid_api_key",
            headers={"www-authenticate": "Bearer"},
        )
        await error_reply(error)(scope, receive, send)

    def _knows(self, headers: Headers) -> bool:
        scheme, _, given = headers.get("authorization", "").partition(" ")
        token = given.strip().encode("latin-1", "replace")
        # Every key is compared, and each in constant time, so that the time taken says nothing.
        matches = [hmac.compare_digest(token, key) for key in self._keys]
        return scheme.lower() == "bearer" and any(matches)


class RequestIds:
    """Answers carry the client's X-Request-Id, or a new one."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get(REQUEST_ID, "")
        request_id = given if _SANE_ID.fullmatch(given) else secrets.token_hex(16)

        scope.setdefault("state", {})[REQUEST_ID] = request_id  # for the answer of last resort, made outside of this

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ())]}
                MutableHeaders(scope=message)[REQUEST_ID] = request_id
            await send(message)

        await self._app(scope, receive, send_with_id)


def _route(scope: Scope) -> str:
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))
