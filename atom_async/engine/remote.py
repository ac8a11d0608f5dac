"""The engine as a client sees it from another process: `EngineClient` over a socket, and the process behind it."""

from __future__ import annotations

import asyncio
import itertools
import os
import socket
import sys
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

from atom_async.config import EngineConfig
from atom_async.wire.framing import AsyncChannel, FramingError, open_channel
from atom_async.wire.messages import WorkerProgress

from . import ipc
from .children import Child
from .client import (
    EngineDead,
    EngineDraining,
    EngineError,
    EngineInfo,
    EngineOutput,
    EngineRequest,
    EngineStats,
    EngineStopped,
    QueueFull,
    RequestRejected,
)
from .prompts import prepared
from .streams import StreamTable, one_by_one
from .workers import WorkerStartError

STOP_GRACE_S = 10.0
ANSWER_TIMEOUT_S = 5.0
"""An engine that leaves a question open for so long is stuck."""


class RemoteEngine:
    """Spawns an engine process and talks to it. Satisfies `EngineClient`.

    Its end, whether asked for or not, is an event: every open stream raises `EngineDead` with the cause.
    """

    info: EngineInfo

    def __init__(self, config: EngineConfig, model: ipc.ModelFacts, *, log_level: str = "info") -> None:
        self._config = config
        self._model = model
        self._log_level = log_level
        self._streams = StreamTable(on_abandoned=self._abandoned)
        self._answers: dict[int, asyncio.Future[ipc.Answer]] = {}
        self._numbers = itertools.count(1)
        self._drained = asyncio.Event()
        self._failure: str | None = None
        self._failed = asyncio.Event()
        self._stopping = False
        self._child: Child | None = None
        self._channel: AsyncChannel[ipc.EngineMessage, ipc.FrontendMessage] | None = None
        self._reading: asyncio.Task[None] | None = None

    # Life ----------------------------------------------------------------------------------------

    async def start(self, on_progress: Callable[[WorkerProgress], None] = lambda progress: None) -> EngineInfo:
        """Returns when the engine is ready. Raises WorkerStartError with what stands in its way; then, and
        when cancelled, nothing is left of it."""
        try:
            await self._spawn()
            self._send(ipc.Start(self._config, self._model))
            self.info = await self._until_ready(on_progress)
        except BaseException:
            await self.stop(grace_s=0)
            raise
        self._reading = asyncio.create_task(self._read(), name="read-engine")
        return self.info

    async def _spawn(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            fd = theirs.fileno()
            command = [sys.executable, "-m", "atom_async.engine.process", f"--fd={fd}", f"--parent-pid={os.getpid()}"]
            self._child = Child.spawn(
                [*command, f"--log-level={self._log_level}"],
                pass_fds=[fd],
                env=os.environ | {"PYTHONUNBUFFERED": "1"},
            )
        self._channel = await open_channel(ours, ipc.EngineMessage)

    async def _until_ready(self, on_progress: Callable[[WorkerProgress], None]) -> EngineInfo:
        assert self._channel is not None
        assert self._child is not None
        while (message := await self._channel.receive()) is not None:
            match message:
                case ipc.Progress():
                    on_progress(message.progress)
                case ipc.Ready():
                    return message.info
                case ipc.Refused():
                    raise WorkerStartError(message.message)
                case _:
                    raise WorkerStartError(f"the engine sent {type(message).__name__} before it was ready")
        await self._child.end(STOP_GRACE_S)
        raise WorkerStartError(f"the engine process {self._child.ending} before it was ready")

    async def stop(self, *, grace_s: float = STOP_GRACE_S) -> None:
        """Ends the engine and its workers; open streams raise EngineStopped. Idempotent."""
        self._stopping = True
        self._end_all(EngineStopped())
        if self._channel is not None:
            self._channel.send(ipc.Stop())
        if self._child is not None:
            await self._child.end(grace_s)
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)
        if self._channel is not None:
            await self._channel.close()

    @property
    def failure(self) -> str | None:
        return self._failure

    async def wait_failed(self) -> str:
        await self._failed.wait()
        assert self._failure is not None
        return self._failure

    async def drain(self) -> None:
        """See `EngineClient.drain`. Returns at once when the engine is dead."""
        if self._failure is None:
            self._send(ipc.Drain())
            await self._drained.wait()

    # Requests ------------------------------------------------------------------------------------

    def generate(self, request: EngineRequest) -> AsyncGenerator[EngineOutput, None]:
        """See `EngineClient.generate`."""
        return one_by_one(self.generate_all([request]))

    async def generate_all(self, body: Sequence[EngineRequest]) -> AsyncGenerator[list[EngineOutput], None]:
        """See `EngineClient.generate_all`."""
        body = await prepared(body, self.info, caching=self._config.enable_prefix_caching)
        self._check_alive()
        ids = [request.request_id for request in body]
        for index, request_id in enumerate(ids):
            if request_id in self._streams or request_id in ids[:index]:
                raise RequestRejected(f"a request with id {request_id} is running already")
        stream = self._streams.open(ids)
        try:
            self._submit(body)
            async for outputs in stream:
                yield outputs
        finally:
            await stream.aclose()

    def _submit(self, body: Sequence[EngineRequest]) -> None:
        try:
            self._send(ipc.Submit.of(body))
        except FramingError as error:
            raise RequestRejected(f"the prompts of one request are too large together: {error}") from error

    def _check_alive(self) -> None:
        if self._failure is not None:
            raise EngineDead(self._failure)
        if self._stopping:
            raise EngineStopped

    def _abandoned(self, request_id: str) -> None:
        self.abort(request_id, reason="the client left")

    def abort(self, request_id: str, *, reason: str = "aborted by the client") -> None:
        """See `EngineClient.abort`."""
        self._send(ipc.Abort(request_id, reason))

    def finish(self, request_id: str) -> None:
        """See `EngineClient.finish`."""
        self._send(ipc.Finish(request_id))

    async def stats(self) -> EngineStats:
        """Raises EngineDead, or EngineError when it does not answer."""
        answer = await self._ask("stats")
        assert answer.stats is not None
        return answer.stats

    async def state(self) -> dict[str, Any]:
        """Raises EngineDead, or EngineError when it does not answer."""
        return (await self._ask("state")).state or {}

    async def _ask(self, what: str) -> ipc.Answer:
        self._check_alive()
        number = next(self._numbers)
        future: asyncio.Future[ipc.Answer] = asyncio.get_running_loop().create_future()
        self._answers[number] = future
        try:
            self._send(ipc.Ask(number, what))
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                return await future
        except TimeoutError:
            raise EngineError(f"the engine has not answered for {ANSWER_TIMEOUT_S:g} s") from None
        finally:
            self._answers.pop(number, None)

    # Events --------------------------------------------------------------------------------------

    def _send(self, message: ipc.FrontendMessage) -> None:
        if self._failure is None:
            assert self._channel is not None
            self._channel.send(message)

    async def _read(self) -> None:
        assert self._channel is not None
        assert self._child is not None
        cause = ""
        try:
            while (message := await self._channel.receive()) is not None:
                if isinstance(message, ipc.Failed):
                    cause = message.cause
                    break
                self._handle(message)
        except FramingError as error:
            cause = f"the engine sent what cannot be understood: {error}"
            self._child.kill()
        if not cause:
            await self._child.end(STOP_GRACE_S)
            cause = f"the engine process (pid {self._child.pid}) {self._child.ending}"
        if not self._stopping:
            self._fail(cause)

    def _handle(self, message: ipc.EngineMessage) -> None:
        match message:
            case ipc.Outputs():
                self._streams.deliver_all(message.outputs)
            case ipc.Rejected():
                self._streams.fail(message.request_id, _refusal(message))
            case ipc.Answer():
                future = self._answers.get(message.number)
                if future is not None and not future.done():
                    future.set_result(message)
            case ipc.Drained():
                self._drained.set()
            case _:
                raise FramingError(f"{type(message).__name__} out of turn")

    def _fail(self, cause: str) -> None:
        if self._failure is None:
            self._failure = cause
            self._end_all(EngineDead(cause))
            self._failed.set()

    def _end_all(self, error: EngineDead) -> None:
        self._streams.fail_all(error)
        for future in self._answers.values():
            if not future.done():
                future.set_exception(error)
        self._drained.set()


def _refusal(message: ipc.Rejected) -> EngineError:
    match message.kind:
        case "full":
            return QueueFull(message.message, retry_after_s=message.retry_after_s)
        case "draining":
            return EngineDraining(message.message)
        case "stopped":
            return EngineStopped(message.message)
        case "dead":
            return EngineDead(message.message)
        case "rejected":
            return RequestRejected(message.message)
