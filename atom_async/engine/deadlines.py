"""Deadlines of the steps in flight: one timer at most, none while nothing is in flight."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable


class StepDeadlines:
    """A step is due `deadline_s` after the later of its submission and the completion before it.

    The timer is moved lazily: it is set for the oldest step and, when it fires early because that step has
    completed meanwhile, set again. So a step costs no timer of its own.
    """

    def __init__(self, on_expired: Callable[[int, float], None]) -> None:
        self._on_expired = on_expired
        self._steps: deque[tuple[int, float, float]] = deque()
        """(step id, submitted at, deadline_s)"""
        self._progress_at = 0.0
        self._timer: asyncio.TimerHandle | None = None

    @property
    def waiting(self) -> bool:
        return bool(self._steps)

    def submitted(self, step_id: int, deadline_s: float) -> None:
        loop = asyncio.get_running_loop()
        self._steps.append((step_id, loop.time(), deadline_s))
        if self._timer is None:
            self._timer = loop.call_at(self._due(), self._check)

    def completed(self, step_id: int) -> None:
        """Steps complete in order. Raises AssertionError otherwise."""
        oldest, _, _ = self._steps.popleft()
        assert oldest == step_id, f"step {step_id} completed before step {oldest}"
        self._progress_at = asyncio.get_running_loop().time()
        if not self._steps:
            self.stop()

    def stop(self) -> None:
        """Forgets all steps."""
        self._steps.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _due(self) -> float:
        _, submitted_at, deadline_s = self._steps[0]
        return max(submitted_at, self._progress_at) + deadline_s

    def _check(self) -> None:
        self._timer = None
        loop = asyncio.get_running_loop()
        if (due := self._due()) > loop.time():
            self._timer = loop.call_at(due, self._check)
            return
        step_id, _, deadline_s = self._steps[0]
        self._on_expired(step_id, deadline_s)
