"""The engine process: `python -m atom_async.engine.process`, spawned by the frontend.

Runs a `LocalEngine` on worker processes and speaks `ipc` with the frontend. When the frontend is gone it stops.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import socket
import sys
from collections.abc import Coroutine
from typing import Any

import uvloop

from atom_async.wire.framing import AsyncChannel, FramingError, open_channel
from atom_async.wire.messages import WorkerProgress
from atom_async.wire.parent import die_with, leave_signals_to_the_parent

from . import ipc
from .client import EngineDead, EngineDraining, EngineError, EngineOutput, EngineStopped, QueueFull
from .local import LocalEngine
from .outputs import too_large
from .process_workers import ProcessWorkers
from .workers import WorkerStartError

log = logging.getLogger(__name__)

Channel = AsyncChannel[ipc.FrontendMessage, ipc.EngineMessage]


class EngineServer:
    """Serves one engine to one frontend."""

    def __init__(self, channel: Channel, engine: LocalEngine) -> None:
        self._channel = channel
        self._engine = engine
        self._ready = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._stuck = asyncio.Event()
        self._reading = asyncio.create_task(self._read(), name="read-frontend")
        engine.on_outputs = self._send_outputs

    async def run(self) -> int:
        """From loading to the end. Returns the exit code: 0 in order, 1 after a failure, 2 for no start."""
        code = await self._load()
        if code == 0 and self._ready:
            gc.collect()
            gc.freeze()
            cause = await self._serve()
            if cause is not None:
                log.error("%s", cause)
                self._channel.send(ipc.Failed(cause))
                code = 1
            await self._engine.stop()
        await _cancel(self._reading, *self._tasks)
        await self._channel.close()
        return code

    async def _load(self) -> int:
        loading = asyncio.create_task(self._engine.start(self._progress), name="load")
        await asyncio.wait((loading, self._reading), return_when=asyncio.FIRST_COMPLETED)
        if not loading.done():  # the frontend is gone, or has changed its mind
            await _cancel(loading)
            return 0
        try:
            info = loading.result()
        except (WorkerStartError, ValueError) as error:
            self._channel.send(ipc.Refused(str(error)))
            return 2
        self._ready = True
        self._channel.send(ipc.Ready(info))
        return 0

    def _progress(self, progress: WorkerProgress) -> None:
        self._channel.send(ipc.Progress(progress))

    async def _serve(self) -> str | None:
        """Until the frontend leaves or says stop (None), or something fails (the cause)."""
        failing = asyncio.create_task(self._engine.wait_failed(), name="await-failure")
        stuck = asyncio.create_task(self._stuck.wait(), name="await-stuck-frontend")
        await asyncio.wait((self._reading, failing, stuck), return_when=asyncio.FIRST_COMPLETED)
        cause: str | None = None
        if failing.done():
            cause = failing.result()
        elif stuck.done():
            cause = f"the frontend left {ipc.MAX_UNREAD_BYTES} bytes of output unread"
        elif (error := self._reading.exception()) is not None:
            cause = f"the frontend sent what cannot be understood: {error}"
        await _cancel(failing, stuck)
        return cause

    async def _read(self) -> None:
        while (message := await self._channel.receive()) is not None:
            if isinstance(message, ipc.Stop):
                return
            if not self._ready:
                raise FramingError(f"{type(message).__name__} before the engine was ready")
            self._handle(message)

    def _handle(self, message: ipc.FrontendMessage) -> None:
        match message:
            case ipc.Submit():
                self._submit(message)
            case ipc.Abort():
                self._engine.abort(message.request_id, reason=message.reason)
            case ipc.Finish():
                self._engine.finish(message.request_id)
            case ipc.Ask():
                self._start(self._answer(message))
            case ipc.Drain():
                self._engine.close_intake()
                self._start(self._drain())
            case _:
                raise FramingError(f"{type(message).__name__} out of turn")

    def _submit(self, message: ipc.Submit) -> None:
        try:
            self._engine.submit(message.body())
        except EngineError as error:
            self._channel.send(_rejection(message.requests[0].request_id, error))

    def _send_outputs(self, outputs: list[EngineOutput]) -> None:
        try:
            self._channel.send(ipc.Outputs(outputs))
        except FramingError:
            self._send_one_by_one(outputs)
        if self._channel.unsent_bytes > ipc.MAX_UNREAD_BYTES:
            self._stuck.set()

    def _send_one_by_one(self, outputs: list[EngineOutput]) -> None:
        """What is too large even alone ends its request: nothing else of the turn is lost with it."""
        for output in outputs:
            try:
                self._channel.send(ipc.Outputs([output]))
            except FramingError as error:
                self._channel.send(ipc.Outputs([too_large(output, error)]))
                self._engine.abort(output.request_id, reason="its output is too large")

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, question: ipc.Ask) -> None:
        if question.what == "stats":
            self._channel.send(ipc.Answer(question.number, stats=await self._engine.stats()))
        else:
            self._channel.send(ipc.Answer(question.number, state=await self._engine.state()))

    async def _drain(self) -> None:
        await self._engine.drain()
        if self._engine.failure is None:  # otherwise `Failed` is the answer
            self._channel.send(ipc.Drained())


def _rejection(request_id: str, error: EngineError) -> ipc.Rejected:
    match error:
        case QueueFull():
            return ipc.Rejected(request_id, "full", str(error), error.retry_after_s)
        case EngineDraining():
            return ipc.Rejected(request_id, "draining", str(error))
        case EngineStopped():
            return ipc.Rejected(request_id, "stopped", str(error))
        case EngineDead():
            return ipc.Rejected(request_id, "dead", str(error))
        case _:
            return ipc.Rejected(request_id, "rejected", str(error))


def make_engine(start: ipc.Start) -> LocalEngine:
    config, model = start.config, start.model
    workers = ProcessWorkers(
        config,
        model.spec,
        model.weights,
        device=model.device,
        dtype=model.dtype,
        max_model_len=model.max_model_len,
        tokenizer_json=model.tokenizer_json,
        end_token_ids=model.end_token_ids,
    )
    return LocalEngine(
        config,
        workers,
        max_model_len=model.max_model_len,
        vocab_size=model.spec.vocab_size,
        dtype=model.dtype,
    )


async def run(sock: socket.socket) -> int:
    """The whole life of the process. Returns its exit code."""
    channel: Channel = await open_channel(sock, ipc.FrontendMessage)
    start = await channel.receive()
    if not isinstance(start, ipc.Start):
        return 0
    return await EngineServer(channel, make_engine(start)).run()


async def _cancel(*tasks: asyncio.Task[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def main() -> int:
    parser = argparse.ArgumentParser(prog="atom_async.engine.process", description=__doc__)
    parser.add_argument("--fd", type=int, required=True, help="socket to the frontend")
    parser.add_argument("--parent-pid", type=int, required=True)
    parser.add_argument("--log-level", default="info")
    arguments = parser.parse_args()
    die_with(arguments.parent_pid)
    leave_signals_to_the_parent()
    logging.basicConfig(
        level=arguments.log_level.upper(), format="%(asctime)s %(levelname)s engine %(name)s: %(message)s"
    )
    return uvloop.run(run(socket.socket(fileno=arguments.fd)))


if __name__ == "__main__":
    sys.exit(main())
