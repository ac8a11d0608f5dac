"""An asyncio event loop in virtual time.

Time stands still while anything is ready and jumps to the next timer when nothing is. There is no I/O
and there are no threads, so a run is a function of its inputs; a program that waits for nothing that can
ever happen is an error (`Deadlock`), not a hang.

Built on the stdlib's selector loop with the selector replaced: ready callbacks keep asyncio's order.
Use with `asyncio.Runner(loop_factory=VirtualLoop)`.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Mapping
from typing import Any, NoReturn

START = 1_000.0
"""Not 0, so that mixing this clock with another one shows."""


class Deadlock(RuntimeError):
    """Every task waits and no timer is set."""


class _NoSelector(selectors.BaseSelector):
    """Accepts no file; its wait is a jump of the clock."""

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise Deadlock("every task waits, and no timer is set that could wake one")
        self._loop.jump(timeout)
        return []

    def register(self, fileobj: Any, events: int, data: Any = None) -> NoReturn:
        raise RuntimeError("there is no I/O in virtual time")

    def unregister(self, fileobj: Any) -> NoReturn:
        raise RuntimeError("there is no I/O in virtual time")

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return {}


class VirtualLoop(asyncio.SelectorEventLoop):
    """See the module's docstring."""

    def __init__(self) -> None:
        self._now = START
        super().__init__(_NoSelector(self))
        self._clock_resolution = 1e-9

    def time(self) -> float:
        """Seconds, from `START`."""
        return self._now

    def jump(self, seconds: float) -> None:
        """Called by the selector when nothing is ready: on to the next timer."""
        if seconds > 0:
            scheduled: list[asyncio.TimerHandle] = self._scheduled  # type: ignore[attr-defined]
            self._now = max(self._now, scheduled[0].when())

    def run_in_executor(self, *args: Any) -> NoReturn:  # type: ignore[override]
        raise RuntimeError("there are no threads in virtual time")

    def call_soon_threadsafe(self, *args: Any, **kwargs: Any) -> NoReturn:  # type: ignore[override]
        raise RuntimeError("there are no threads in virtual time")

    def _make_self_pipe(self) -> None:
        """Nothing outside wakes this loop."""

    def _close_self_pipe(self) -> None:
        """None was made."""
