"""A client inside the process: runs an ASGI application without a socket, sees each write, can leave early."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from typing import Any

from starlette.types import ASGIApp, Message


@dataclass
class Exchange:
    """One request and what has come back of it so far."""

    body: bytes
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    writes: list[bytes] = field(default_factory=list)
    leave: asyncio.Event = field(default_factory=asyncio.Event)
    wrote: asyncio.Event = field(default_factory=asyncio.Event)
    _sent: bool = False

    async def receive(self) -> Message:
        if not self._sent:
            self._sent = True
            return {"type": "http.request", "body": self.body, "more_body": False}
        await self.leave.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.headers = {key.decode().lower(): value.decode() for key, value in message["headers"]}
        elif message.get("body"):
            self.writes.append(message["body"])
        self.wrote.set()

    @property
    def data(self) -> bytes:
        return b"".join(self.writes)

    @property
    def json(self) -> Any:
        return json.loads(self.data)

    @property
    def error(self) -> dict[str, Any]:
        error: dict[str, Any] = self.json["error"]
        return error

    @property
    def events(self) -> list[Any]:
        """Of a stream: its decoded events; the last must be [DONE]."""
        frames = self.data.decode().split("\n\n")
        assert frames.pop() == ""
        assert all(frame.startswith("data: ") for frame in frames)
        *events, done = [frame.removeprefix("data: ") for frame in frames]
        assert done == "[DONE]"
        return [json.loads(event) for event in events]


def begin(
    app: ASGIApp, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
) -> tuple[Exchange, asyncio.Task[None]]:
    """Starts a request; `body` is JSON unless it is bytes."""
    exchange = Exchange(body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode())
    given = {"content-type": "application/json"} | (headers or {})
    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [(key.encode(), value.encode()) for key, value in given.items()],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 80),
    }
    task: asyncio.Task[None] = asyncio.ensure_future(app(scope, exchange.receive, exchange.send))  # type: ignore[arg-type]
    return exchange, task


async def call(
    app: ASGIApp, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
) -> Exchange:
    """The whole exchange."""
    exchange, task = begin(app, method, path, body, headers)
    await task
    return exchange


async def post(app: ASGIApp, path: str, body: Any, headers: dict[str, str] | None = None) -> Exchange:
    return await call(app, "POST", path, body, headers)
