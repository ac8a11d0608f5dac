"""Progress of long stages, for people: a bar on a terminal, a few plain lines anywhere else."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, TaskID, TextColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress

Progress = Callable[[str, int, int], None]
"""Called with (stage in words, done, total), both in bytes; done never falls within one stage."""

PLAIN_STEP_PERCENT = 10


def no_progress(stage: str, done: int, total: int) -> None:
    """For callers that show nothing."""


@contextmanager
def console_progress(stream: TextIO | None = None) -> Iterator[Progress]:
    """Yields a Progress that writes to `stream` (default: standard error)."""
    stream = stream or sys.stderr
    if not stream.isatty():
        yield _PlainLines(stream)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with RichProgress(*columns, console=Console(file=stream)) as bars:
        yield _Bars(bars)


class _Bars:
    def __init__(self, bars: RichProgress) -> None:
        self._bars = bars
        self._tasks: dict[str, TaskID] = {}

    def __call__(self, stage: str, done: int, total: int) -> None:
        if stage not in self._tasks:
            self._tasks[stage] = self._bars.add_task(stage, total=total)
        self._bars.update(self._tasks[stage], completed=done, total=total)


class _PlainLines:
    """One line each time another tenth is done, so that a log stays readable."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._shown: dict[str, int] = {}

    def __call__(self, stage: str, done: int, total: int) -> None:
        percent = 100 * done // total if total else 100
        tenth = percent // PLAIN_STEP_PERCENT
        if tenth <= self._shown.get(stage, -1):
            return
        self._shown[stage] = tenth
        print(f"{stage}: {percent} % of {total / 1e6:.1f} MB", file=self._stream, flush=True)
