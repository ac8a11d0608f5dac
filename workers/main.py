"""Entry point of one worker process: `python -m workers.main`, spawned by the engine with everything it needs.

Not for people: descriptors come by number, and without the engine at the other end the process leaves at once.
"""

from __future__ import annotations

import argparse
import socket
import sys

from atom_async.wire.doorbell import Doorbell
from atom_async.wire.framing import BlockingChannel
from atom_async.wire.messages import ControlMessage, WorkerInit
from atom_async.wire.parent import die_with, leave_signals_to_the_parent
from atom_async.wire.ring import Ring

from .loop import Endpoint, Runner, serve

FD_ARGUMENTS = ("control-fd", "plans-fd", "results-fd", "plan-bell-fd", "result-bell-fd")


def main() -> int:
    arguments = _parse()
    die_with(arguments.parent_pid)
    leave_signals_to_the_parent()
    endpoint = Endpoint(
        rank=arguments.rank,
        channel=BlockingChannel(socket.socket(fileno=arguments.control_fd), ControlMessage),
        plans=Ring.attach(arguments.plans_fd),
        results=Ring.attach(arguments.results_fd),
        plan_bell=Doorbell(arguments.plan_bell_fd),
        result_bell=Doorbell(arguments.result_bell_fd),
    )
    return serve(endpoint, lambda init: make_runner(init, arguments.store_fd))


def make_runner(init: WorkerInit, store_fd: int) -> Runner:
    """The runner for the device; torch is imported only for a real one."""
    if init.device == "simulated":
        from .simulated import SimulatedRunner

        return SimulatedRunner(init)
    from .parallel import join_group
    from .runner import ModelRunner

    return ModelRunner(init, join_group(init, store_fd))


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="workers.main", description=__doc__)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--parent-pid", type=int, required=True)
    for name in FD_ARGUMENTS:
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--store-fd", type=int, default=-1)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
