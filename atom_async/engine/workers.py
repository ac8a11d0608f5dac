"""What the engine needs of its workers; real processes and simulated ones both satisfy it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import msgspec

from atom_async.wire.messages import StepPlan, StepResult, WorkerProgress


class WorkersInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Facts of a started group."""

    num_kv_blocks: int
    max_plan_bytes: int
    """Largest encoded StepPlan that `submit` takes: the planner stays below it."""
    device_name: str
    attention_backend: str
    pids: tuple[int, ...] = ()


class WorkerFailure(msgspec.Struct, frozen=True, kw_only=True):
    """A worker is gone or cannot go on. `message` names the rank, the step and the cause."""

    rank: int
    pid: int
    step_id: int
    """-1 outside a step."""
    message: str


class Workers(Protocol):
    """Drives one tensor-parallel group. All callbacks run on the event loop's thread."""

    on_result: Callable[[StepResult], None]
    """Set before `start`. Called once per step, in step order, with rank 0's result, when every rank
    that this implementation waits for has finished it."""
    on_failure: Callable[[WorkerFailure], None]
    """Set before `start`. Called at most once; afterwards no result comes any more."""

    async def start(self, on_progress: Callable[[WorkerProgress], None]) -> WorkersInfo:
        """Spawns, loads, allocates KV. Raises WorkerStartError with the worker's own words."""
        ...

    def submit(self, plan: StepPlan, *, deadline_s: float) -> None:
        """Queues a step on every rank without blocking. If its result is not back `deadline_s` seconds
        after the result of the step before it (or after this call, if nothing is in flight),
        `on_failure` names the rank and the step."""
        ...

    async def stop(self) -> None:
        """Ends every worker and waits until they are gone. Idempotent; also after a failure."""
        ...


class WorkerStartError(Exception):
    """A worker could not be started; the message is fit for the operator."""
