"""uvicorn inside our own loop and process: it neither polls nor touches signals."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator

import uvicorn
from starlette.types import ASGIApp


class HttpServer(uvicorn.Server):
    """Serves an application on a bound socket until `close`.

    uvicorn's own main loop wakes ten times a second to look at a flag and to renew the Date header; here it is
    an event, and there is no Date header (RFC 9110 6.6.1 leaves it to the origin).
    """

    def __init__(self, app: ASGIApp, *, access_log: bool, root_path: str = "") -> None:
        super().__init__(
            uvicorn.Config(
                app,
                loop="none",
                http="httptools",
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=access_log,
                root_path=root_path,
                date_header=False,
                server_header=False,
                timeout_graceful_shutdown=2,
            )
        )
        self._closing = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._listening = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are the command's."""
        yield

    async def main_loop(self) -> None:
        self._listening.set()
        await self._closing.wait()

    async def open(self, sock: socket.socket) -> None:
        """Returns when connections are accepted. Raises what keeps uvicorn from it."""
        self._task = asyncio.create_task(self.serve(sockets=[sock]), name="http")
        listening = asyncio.create_task(self._listening.wait())
        await asyncio.wait((self._task, listening), return_when=asyncio.FIRST_COMPLETED)
        listening.cancel()
        if self._task.done():
            self._task.result()
            raise RuntimeError("the HTTP server ended before it listened")

    async def close(self) -> None:
        """Takes no more connections, and returns when the open ones have ended, or 2 s later without them."""
        self._closing.set()
        if self._task is not None:
            await self._task


def bind(host: str, port: int) -> socket.socket:
    """A bound socket that does not listen yet. Raises OSError with the address in its message."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
    except OSError as error:
        sock.close()
        raise OSError(error.errno, f"cannot listen on {host} port {port}: {error.strerror}") from error
    return sock
