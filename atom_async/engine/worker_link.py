"""Everything the engine holds of one worker process."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from atom_async.wire.doorbell import Doorbell
from atom_async.wire.framing import AsyncChannel, open_channel
from atom_async.wire.messages import (
    PROTOCOL_VERSION,
    AllocateKv,
    ControlMessage,
    Shutdown,
    StepResult,
    WorkerFault,
    WorkerHello,
    WorkerInit,
    WorkerLoaded,
    WorkerProgress,
    WorkerReady,
)
from atom_async.wire.ring import Ring, RingCorrupt

from .children import Child
from .workers import WorkerStartError

SPIN_COUNT = "10000"
"""Turns of libgomp's wait loop before a thread sleeps: about half a millisecond."""

M = TypeVar("M")
OnProgress = Callable[[WorkerProgress], None]


class WorkerLink:
    """Spawns a worker, shakes hands, and then hands over its results.

    `on_exit(link, cause, step_id)` is called once when the process has ended unasked: `cause` is a predicate
    such as "was killed by SIGKILL", `step_id` -1 unless the worker itself named the step.
    """

    def __init__(
        self,
        init: WorkerInit,
        *,
        plan_ring_bytes: int,
        result_ring_bytes: int,
        on_exit: Callable[[WorkerLink, str, int], None],
        on_message: Callable[[WorkerLink, object], None],
    ) -> None:
        self.rank = init.rank
        self.plans = Ring.create(plan_ring_bytes)
        self.results = Ring.create(result_ring_bytes)
        self.plan_bell = Doorbell.create()
        self.result_bell = Doorbell.create()
        self._init = init
        self._on_exit = on_exit
        self._on_message = on_message
        self._decode = msgspec.msgpack.Decoder(StepResult).decode
        self._child: Child | None = None
        self._channel: AsyncChannel[Any, Any] | None = None
        self._listener: asyncio.Task[None] | None = None
        self._serving = False
        self._leaving = False

    @property
    def pid(self) -> int:
        return self._child.pid if self._child is not None else 0

    async def spawn(self, *, store_fd: int) -> None:
        """Starts the process. `store_fd` is the listening socket of the ranks' store, or -1."""
        ours, theirs = socket.socketpair()
        with theirs:
            fds = {
                "control-fd": theirs.fileno(),
                "plans-fd": self.plans.fd,
                "results-fd": self.results.fd,
                "plan-bell-fd": self.plan_bell.fd,
                "result-bell-fd": self.result_bell.fd,
            } | ({"store-fd": store_fd} if store_fd >= 0 else {})
            arguments = [f"--{name}={fd}" for name, fd in fds.items()]
            self._child = Child.spawn(
                [
                    sys.executable,
                    "-m",
                    "workers.main",
                    f"--rank={self.rank}",
                    f"--parent-pid={os.getpid()}",
                    *arguments,
                ],
                pass_fds=list(fds.values()),
                env=self._environment(),
            )
        self._channel = await open_channel(ours, ControlMessage)
        self._child.on_exit = self._exited

    def _environment(self) -> dict[str, str]:
        """What must stand before torch is imported.

        Threads that wait for each other spin only briefly (docs/performance.md): not at all, and a step
        takes 1.8 times as long; as long as libgomp would, and with any other work on the cores a spinning
        thread keeps off the one it waits for, and a step takes 8 times as long.
        """
        threads = str(self._init.threads)
        defaults = {"GOMP_SPINCOUNT": SPIN_COUNT}
        return defaults | os.environ | {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}

    async def load(self, on_progress: OnProgress) -> WorkerLoaded:
        """Raises WorkerStartError in the worker's own words."""
        self._send(self._init)
        hello = await self._expect(WorkerHello, on_progress)
        if hello.protocol_version != PROTOCOL_VERSION:
            raise WorkerStartError(
                f"worker {self.rank} speaks protocol {hello.protocol_version}, this engine {PROTOCOL_VERSION}"
            )
        return await self._expect(WorkerLoaded, on_progress)

    async def allocate(self, message: AllocateKv, on_progress: OnProgress) -> WorkerReady:
        """Raises WorkerStartError in the worker's own words."""
        self._send(message)
        return await self._expect(WorkerReady, on_progress)

    def serve(self, on_result: Callable[[WorkerLink, StepResult], None]) -> None:
        """From now on results and faults are read as they come."""
        self._on_result = on_result
        self._serving = True
        loop = asyncio.get_running_loop()
        loop.add_reader(self.result_bell.fd, self._read_results)
        self._listener = loop.create_task(self._listen(), name=f"worker-{self.rank}-control")

    async def end(self, grace_s: float) -> None:
        """Asks it to leave, kills it after `grace_s` seconds, and frees everything held."""
        self._leaving = True
        if self._channel is not None:
            self._send(Shutdown())
        if self._child is not None:
            await self._child.end(grace_s)
        if self._listener is not None:
            self._listener.cancel()
            await asyncio.gather(self._listener, return_exceptions=True)
        self._stop_reading()
        if self._channel is not None:
            await self._channel.close()
        for part in (self.plans, self.results, self.plan_bell, self.result_bell):
            part.close()

    def kill(self) -> None:
        """SIGKILL, without waiting and without a report."""
        self._leaving = True
        if self._child is not None:
            self._child.kill()

    def _send(self, message: object) -> None:
        assert self._channel is not None
        self._channel.send(message)

    async def _expect(self, kind: type[M], on_progress: OnProgress) -> M:
        assert self._channel is not None
        while True:
            message = await self._channel.receive()
            if isinstance(message, kind):
                return message
            if isinstance(message, WorkerProgress):
                on_progress(message)
            elif isinstance(message, WorkerFault):
                raise WorkerStartError(f"worker {self.rank} could not start: {message.message}")
            elif message is None:
                assert self._child is not None
                await self._child.wait()
                raise WorkerStartError(f"worker {self.rank} {self._child.ending} before it was ready")
            else:
                self._on_message(self, message)

    async def _listen(self) -> None:
        """After the handshake: the only thing a worker says here is why it must leave."""
        assert self._channel is not None
        assert self._child is not None
        cause, step_id = "", -1
        while (message := await self._channel.receive()) is not None:
            if isinstance(message, WorkerFault):
                cause, step_id = f"failed: {message.message}", message.step_id
            else:
                self._on_message(self, message)
        await self._child.wait()
        if not self._leaving:
            self._on_exit(self, cause or self._child.ending, step_id)

    def _exited(self) -> None:
        """The pidfd's news. The listener reports it, after the last words on the socket; all that is to do
        here is to read results that were published before the end."""
        if self._serving and not self._leaving:
            self._read_results()

    def _read_results(self) -> None:
        self.result_bell.hear()
        while self._serving:
            try:
                result = self.results.take(self._decode)
            except (RingCorrupt, msgspec.MsgspecError) as error:
                self._stop_reading()
                self._on_exit(self, f"sent a result that cannot be read ({error})", -1)
                return
            if result is None:
                return
            self._on_result(self, result)

    def _stop_reading(self) -> None:
        if self._serving:
            self._serving = False
            asyncio.get_running_loop().remove_reader(self.result_bell.fd)
