"""JSON and SSE answers on plain ASGI, and the end of work whose client has left."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, TypeVar

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from atom_async.api.errors import ApiError
from atom_async.api.outputs import Batch, Outputs

T = TypeVar("T")
encode_json = msgspec.json.Encoder().encode
CLIENT_LEFT = 499
"""nginx's status for it; nobody receives it."""


class ClientLeft(Exception):
    """Nobody waits for the answer any more."""


class JsonReply(Response):
    media_type = "application/json"

    def __init__(self, content: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(encode_json(content), status, headers)


def error_reply(error: ApiError) -> JsonReply:
    return JsonReply(error.body, error.status, error.headers)


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The work's result. When the client disconnects first, the work is cancelled: raises ClientLeft.

    The request's body must have been read.
    """
    task = asyncio.create_task(work)
    watcher = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait((task, watcher), return_when=asyncio.FIRST_COMPLETED)
    finally:
        left = not task.done()
        task.cancel()
        watcher.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)
    if left:
        raise ClientLeft
    return task.result()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def sse(event: msgspec.Struct) -> bytes:
    return b"data: " + encode_json(event) + b"\n\n"


class SseReply:
    """Server-sent events of one request; all that is ready goes out in one write.

    Headers are sent with the first events, so that a request which fails before has an HTTP status of its own.
    `render` gives the events of a batch, `last` those after the end, without the closing `[DONE]`.
    """

    def __init__(self, outputs: Outputs, render: Callable[[Batch], bytes], last: Callable[[], bytes]) -> None:
        self._outputs = outputs
        self._render = render
        self._last = last
        self._started = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await until_disconnect(receive, self._run(scope, receive, send))
        except ClientLeft:
            return

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            while batch := await self._outputs.next():
                await self._write(send, self._render(batch))
            await self._write(send, self._last() + b"data: [DONE]\n\n", more=False)
        except ApiError as error:
            if self._started:
                await self._write(send, sse(error.body), more=False)
            else:
                await error_reply(error)(scope, receive, send)
        finally:
            await self._outputs.aclose()

    async def _write(self, send: Send, events: bytes, *, more: bool = True) -> None:
        if not events and more:
            return
        if not self._started:
            self._started = True
            await send({"type": "http.response.start", "status": 200, "headers": _SSE_HEADERS})
        await send({"type": "http.response.body", "body": events, "more_body": more})


_SSE_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
