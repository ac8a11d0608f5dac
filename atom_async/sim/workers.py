"""A worker group inside the process, in the loop's own time, for virtual-time runs and tests."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from atom_async.engine.workers import WorkerFailure, WorkersInfo
from atom_async.wire.messages import StepPlan, StepResult, WorkerProgress
from atom_async.wire.simulation import SimulatedModel, SimulationOptions

MAX_PLAN_BYTES = 8 << 20


class SimulatedWorkers:
    """Satisfies `engine.workers.Workers`. Steps run one after another, each for its modelled duration.

    A plan that the model finds wrong (`PlanError`) is raised to the caller of `submit`: it is the
    scheduler's fault, not a worker's.
    """

    on_result: Callable[[StepResult], None]
    on_failure: Callable[[WorkerFailure], None]

    def __init__(self, options: SimulationOptions, *, block_size: int, max_num_seqs: int, num_kv_blocks: int) -> None:
        self._num_kv_blocks = num_kv_blocks
        self._model = SimulatedModel(
            options, block_size=block_size, max_num_seqs=max_num_seqs, num_blocks=num_kv_blocks
        )
        self._free_at = 0.0
        self._timers: deque[asyncio.TimerHandle] = deque()
        self._failed = False

    async def start(self, on_progress: Callable[[WorkerProgress], None]) -> WorkersInfo:
        return WorkersInfo(
            num_kv_blocks=self._num_kv_blocks,
            max_plan_bytes=MAX_PLAN_BYTES,
            device_name="simulated",
            attention_backend="none",
        )

    def submit(self, plan: StepPlan, *, deadline_s: float) -> None:
        if self._failed:
            return
        loop = asyncio.get_running_loop()
        duration = self._model.duration_s(plan)
        result = self._model.apply(plan)
        start = max(loop.time(), self._free_at)
        self._free_at = start + duration
        if duration > deadline_s:
            message = f"worker 0 did not finish step {plan.step_id} within {deadline_s:g} s"
            failure = WorkerFailure(rank=0, pid=0, step_id=plan.step_id, message=message)
            self._timers.append(loop.call_at(start + deadline_s, self.fail, failure))
        else:
            self._timers.append(loop.call_at(self._free_at, self._deliver, result))

    def fail(self, failure: WorkerFailure) -> None:
        """The group dies now: results in flight are lost."""
        if not self._failed:
            self._drop()
            self._failed = True
            self.on_failure(failure)

    async def stop(self) -> None:
        self._drop()
        self._failed = True

    def _deliver(self, result: StepResult) -> None:
        self._timers.popleft()
        self.on_result(result)

    def _drop(self) -> None:
        while self._timers:
            self._timers.popleft().cancel()
