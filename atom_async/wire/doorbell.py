"""Wake-ups between processes: an eventfd is a counter in the kernel, so no ring of it can be lost."""

from __future__ import annotations

import os
import select


class Doorbell:
    """Rung after something was published, heard before looking. `fd` may be inherited."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    @classmethod
    def create(cls) -> Doorbell:
        return cls(os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC))

    def ring(self) -> None:
        """Wakes whoever waits, now or at their next wait."""
        os.eventfd_write(self.fd, 1)

    def hear(self) -> None:
        """Takes all rings so far, if any. Look for messages afterwards, never before."""
        try:
            os.eventfd_read(self.fd)
        except BlockingIOError:
            return

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class BlockingWait:
    """Sleeps until one of several descriptors is readable: the worker's only wait."""

    def __init__(self, *fds: int) -> None:
        self._poll = select.poll()
        for fd in fds:
            self._poll.register(fd, select.POLLIN)

    def __call__(self) -> set[int]:
        """The descriptors that are readable or closed by their peer. No timeout, no spinning."""
        return {fd for fd, _ in self._poll.poll()}
