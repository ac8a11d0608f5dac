"""A child process's tie to its parent."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def die_with(parent_pid: int) -> None:
    """Asks the kernel for SIGKILL when the parent dies; leaves with code 1 if that has happened already.

    Raises OSError where the kernel has no such signal.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent_pid:
        sys.exit(1)


def leave_signals_to_the_parent() -> None:
    """A terminal's Ctrl-C and a supervisor's SIGTERM reach the whole group; the frontend decides what ends when."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
