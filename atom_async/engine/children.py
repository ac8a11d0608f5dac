"""Child processes whose end is an event of the loop."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence


class Child:
    """A spawned process. `on_exit` is called on the loop within milliseconds of its end, through a pidfd."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self._pidfd = os.pidfd_open(process.pid)
        self._loop = asyncio.get_running_loop()
        self._ended = asyncio.Event()
        self.pid = process.pid
        self.on_exit: Callable[[], None] = lambda: None
        self._loop.add_reader(self._pidfd, self._reap)

    @classmethod
    def spawn(cls, arguments: Sequence[str], *, pass_fds: Sequence[int], env: Mapping[str, str]) -> Child:
        """In a session of its own, so that a terminal's signals reach only the process that handles them.

        Its standard streams: input empty, output and errors ours.
        """
        process = subprocess.Popen(
            arguments, pass_fds=tuple(pass_fds), env=dict(env), stdin=subprocess.DEVNULL, start_new_session=True
        )
        return cls(process)

    def _reap(self) -> None:
        self._process.wait()
        self._close()
        self._ended.set()
        self.on_exit()

    def _close(self) -> None:
        if self._pidfd >= 0:
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = -1

    @property
    def alive(self) -> bool:
        return not self._ended.is_set()

    @property
    def ending(self) -> str:
        """How it ended, in words."""
        code = self._process.returncode
        if code is None:
            return "is running"
        if code < 0:
            return f"was killed by {signal.Signals(-code).name}"
        return f"exited with code {code}"

    def kill(self) -> None:
        """SIGKILL. Nothing when it has ended."""
        if self.alive:
            self._process.kill()

    async def wait(self) -> None:
        await self._ended.wait()

    async def end(self, grace_s: float) -> None:
        """Waits `grace_s` seconds for it to leave by itself, then kills it. Returns when it is gone."""
        try:
            async with asyncio.timeout(grace_s):
                await self.wait()
        except TimeoutError:
            self.kill()
            await self.wait()
