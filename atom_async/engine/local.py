"""The engine in this process: the thin asyncio shell around the scheduler.

Arrivals, aborts and step results are handed to the core as they come. Decisions are taken in a *turn*: one
callback that runs after everything that is ready has been handed in, however much that was, and submits
steps while the pipeline has room. Nothing runs between events.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

from atom_async.config import EngineConfig
from atom_async.events.schema import Event
from atom_async.scheduler.core import Scheduler
from atom_async.scheduler.invariants import check, check_idle, checked_step
from atom_async.scheduler.limits import BYTES_PER_INT, BYTES_PER_SEQUENCE
from atom_async.scheduler.request import Request
from atom_async.scheduler.setup import check_settings, make_decider, make_scheduler
from atom_async.wire.messages import StepPlan, StepResult, WorkerProgress

from .client import EngineDead, EngineDraining, EngineInfo, EngineOutput, EngineRequest, EngineStats, EngineStopped
from .door import Door
from .outputs import describe, end_output, output_of
from .prompts import Offload, prepared
from .streams import StreamTable, one_by_one
from .workers import WorkerFailure, Workers

log = logging.getLogger(__name__)


LONGEST_TIMER_S = 86_400.0
"""Loops do not take any delay; a deadline beyond it is looked at again then."""
EARLY_S = 0.002
"""Loops round timers, and may ring so much too early."""


class LocalEngine:
    """An `EngineClient` that owns scheduler and workers.

    Args:
        max_model_len: the model's own limit, tokens; config.max_model_len lowers it.
        clock: seconds, monotonic; the loop's own time under simulation.
        offload: runs a function off the event loop (`asyncio.to_thread`'s shape).
        checked: asserts every invariant after every change. For tests; costs O(blocks) each time.
        emit: takes every event of the scheduler when it happens; must not call back.
    """

    info: EngineInfo

    def __init__(
        self,
        config: EngineConfig,
        workers: Workers,
        *,
        max_model_len: int,
        vocab_size: int,
        dtype: str,
        clock: Callable[[], float] = time.monotonic,
        offload: Offload = asyncio.to_thread,
        checked: bool = False,
        emit: Callable[[Event], None] = lambda event: None,
    ) -> None:
        self._config = config
        self._workers = workers
        self._model_limit = max_model_len
        self._vocab_size = vocab_size
        self._dtype = dtype
        self._clock = clock
        self._offload = offload
        self._checked = checked
        self._emit = emit
        self._streams = StreamTable(on_abandoned=self.abort)
        self.on_outputs: Callable[[list[EngineOutput]], None] = self._streams.deliver_all
        """Where the outputs of a turn go: to the streams of `generate`, unless somebody else takes them and
        uses `submit`."""
        self._turn_due = False
        self._draining = False
        self._over: EngineDead | None = None
        """Why nothing runs any more."""
        self._failure: str | None = None
        self._failed = asyncio.Event()
        self._empty = asyncio.Event()
        self._empty.set()
        self._last_result_at = clock()
        self._scheduler: Scheduler
        self._door: Door
        self._started = False
        self._alarm: asyncio.TimerHandle | None = None
        self._alarm_at: float | None = None
        self._latest = float("-inf")

    # Life ----------------------------------------------------------------------------------------

    async def start(self, on_progress: Callable[[WorkerProgress], None] = lambda progress: None) -> EngineInfo:
        """Starts the workers. Raises WorkerStartError, or ValueError for settings that cannot work."""
        self._workers.on_result = self._on_result
        self._workers.on_failure = self._on_worker_failure
        check_settings(self._config)
        self._decider = make_decider(self._config)
        facts = await self._workers.start(on_progress)
        try:
            max_model_len = self._resolve_length(facts.num_kv_blocks)
            self._scheduler = self._make_scheduler(facts.num_kv_blocks, facts.max_plan_bytes, max_model_len)
        except ValueError:
            await self._workers.stop()
            raise
        self._started = True
        config = self._config
        self.info = EngineInfo(
            boot_id=uuid.uuid4().hex,
            max_model_len=max_model_len,
            block_size=config.block_size,
            num_kv_blocks=facts.num_kv_blocks,
            vocab_size=self._vocab_size,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            device_name=facts.device_name,
            attention_backend=facts.attention_backend,
            dtype=self._dtype,
            tp_size=config.tp,
            worker_pids=facts.pids,
            engine_pid=os.getpid(),
        )
        return self.info

    def _resolve_length(self, num_blocks: int) -> int:
        capacity = num_blocks * self._config.block_size
        asked = self._config.max_model_len
        if asked is None:
            return min(self._model_limit, capacity)
        if asked > self._model_limit:
            raise ValueError(f"max_model_len {asked} is above the model's own limit of {self._model_limit} tokens")
        if asked > capacity:
            raise ValueError(
                f"max_model_len {asked} does not fit: all of the KV cache holds {capacity} tokens; "
                "lower --max-model-len or raise --kv-cache-memory"
            )
        return asked

    def _make_scheduler(self, num_blocks: int, max_plan_bytes: int, max_model_len: int) -> Scheduler:
        config = self._config
        largest = BYTES_PER_SEQUENCE + BYTES_PER_INT * (
            2 * max_model_len + 3 * (config.max_num_batched_tokens + config.max_num_seqs)
        )
        if largest > max_plan_bytes:
            raise ValueError(
                f"one step of max_model_len {max_model_len} and max_num_batched_tokens "
                f"{config.max_num_batched_tokens} may need {largest} bytes; "
                f"the ring to the workers takes {max_plan_bytes}"
            )
        scheduler = make_scheduler(
            config,
            num_blocks=num_blocks,
            max_plan_bytes=max_plan_bytes,
            max_model_len=max_model_len,
            decider=self._decider,
            emit=self._emit,
        )
        room = max_plan_bytes - largest
        self._door = Door(config, scheduler, max_model_len=max_model_len, sampling_room=room)
        return scheduler

    def close_intake(self) -> None:
        """From now on new requests are refused, and no prefill is held back."""
        self._draining = True
        if self._started:
            self._scheduler.draining = True
            self._changed()

    async def drain(self) -> None:
        """Refuses new requests and returns when the running ones have ended."""
        self.close_intake()
        await self._empty.wait()

    async def stop(self) -> None:
        """Ends what still runs with an error, then the workers. Idempotent."""
        self.close_intake()
        self._end(EngineStopped())
        await self._workers.stop()

    @property
    def failure(self) -> str | None:
        return self._failure

    async def wait_failed(self) -> str:
        await self._failed.wait()
        assert self._failure is not None
        return self._failure

    # Requests ------------------------------------------------------------------------------------

    def generate(self, request: EngineRequest) -> AsyncGenerator[EngineOutput, None]:
        """See `EngineClient.generate`."""
        return one_by_one(self.generate_all([request]))

    async def generate_all(self, body: Sequence[EngineRequest]) -> AsyncGenerator[list[EngineOutput], None]:
        """See `EngineClient.generate_all`."""
        caching, offload = self._config.enable_prefix_caching, self._offload
        body = await prepared(body, self.info, caching=caching, offload=offload)
        requests = self._admitted(body)
        stream = self._streams.open([request.request_id for request in requests])
        self._add(requests)
        try:
            async for outputs in stream:
                yield outputs
        finally:
            await stream.aclose()

    def submit(self, body: Sequence[EngineRequest]) -> None:
        """Queues the requests of one body, prepared already; outputs go to `on_outputs`. Raises as `generate_all`."""
        self._add(self._admitted(body))

    def _admitted(self, body: Sequence[EngineRequest]) -> list[Request]:
        if self._over is not None:
            raise type(self._over)(str(self._over))
        if self._draining:
            raise EngineDraining("the engine is draining and takes no new requests")
        return self._door.admit(body, self._now())

    def _add(self, requests: list[Request]) -> None:
        for request in requests:
            self._scheduler.add(request, request.arrived_at)
        self._empty.clear()
        self._changed()

    def abort(self, request_id: str, *, reason: str = "aborted by the client") -> None:
        """See `EngineClient.abort`."""
        if self._over is None and (request := self._scheduler.abort(request_id, self._now(), reason)) is not None:
            self._deliver_end(request, "abort", reason)

    def finish(self, request_id: str) -> None:
        """See `EngineClient.finish`."""
        if self._over is None and (request := self._scheduler.finish(request_id, self._now())) is not None:
            self._deliver_end(request, "stop", "")

    def _deliver_end(self, request: Request, reason: Any, error: str) -> None:
        self.on_outputs([end_output(request, reason, error)])
        self._changed()

    # Events --------------------------------------------------------------------------------------

    def _changed(self) -> None:
        """Something happened that may change what the next step is."""
        if not self._scheduler.requests:
            self._empty.set()
        if not self._turn_due:
            self._turn_due = True
            asyncio.get_running_loop().call_soon(self._turn)

    def _turn(self) -> None:
        self._turn_due = False
        if self._over is not None:
            return
        try:
            self._submit_steps()
        except Exception as error:
            log.exception("the scheduler failed")
            self._fail(f"the scheduler failed: {error!r}")

    def _submit_steps(self) -> None:
        """Whatever brought it about, a turn does what time demands first, then fills the pipeline."""
        scheduler, now = self._scheduler, self._now()
        if ended := scheduler.expire(now):
            self.on_outputs([output_of(outcome) for outcome in ended])
        if self._checked:
            check(scheduler)
        while len(scheduler.in_flight) < self._config.max_steps_in_flight:
            message = self._next_step(now)
            if message is None:
                break
            self._workers.submit(message, deadline_s=self._config.step_timeout)
        self._set_alarm(scheduler.next_alarm(holds=len(scheduler.in_flight) < self._config.max_steps_in_flight))
        if not scheduler.requests:
            self._empty.set()
            if not scheduler.in_flight:
                self._check_ledger()

    def _check_ledger(self) -> None:
        """Idle is the moment to see a leak; what can be served still is."""
        try:
            check_idle(self._scheduler)
        except AssertionError as error:
            if self._checked:
                raise
            log.error("the ledger does not balance while idle: %s", error)

    def _next_step(self, now: float) -> StepPlan | None:
        return checked_step(self._scheduler, now) if self._checked else self._scheduler.next_step(now)

    def _set_alarm(self, when: float | None) -> None:
        """One timer, for the earliest deadline."""
        if when == self._alarm_at:
            return
        if self._alarm is not None:
            self._alarm.cancel()
        self._alarm_at = when
        loop = asyncio.get_running_loop()
        delay = 0.0 if when is None else min(max(when - self._now(), 0.0), LONGEST_TIMER_S)
        self._alarm = None if when is None else loop.call_later(delay, self._on_alarm)

    def _on_alarm(self) -> None:
        assert self._alarm_at is not None
        if self._alarm_at - self._clock() < EARLY_S:
            self._latest = max(self._latest, self._alarm_at)
        self._alarm = self._alarm_at = None
        self._changed()

    def _now(self) -> float:
        """The clock, never behind an alarm that has rung."""
        self._latest = max(self._latest, self._clock())
        return self._latest

    def _on_result(self, result: StepResult) -> None:
        if self._over is not None:
            return
        now = self._last_result_at = self._now()
        try:
            outcomes = self._scheduler.complete(result, now)
        except Exception as error:
            log.exception("a step result does not fit")
            self._fail(f"the result of step {result.step_id} does not fit: {error!r}")
            return
        if outcomes:
            self.on_outputs([output_of(outcome) for outcome in outcomes])
        self._changed()

    def _on_worker_failure(self, failure: WorkerFailure) -> None:
        self._fail(failure.message)

    def _fail(self, cause: str) -> None:
        if self._over is None:
            self._failure = cause
            self._end(EngineDead(cause))
            self._failed.set()

    def _end(self, why: EngineDead) -> None:
        if self._over is None:
            self._over = why
            self._set_alarm(None)
            self._streams.fail_all(why)
            self._empty.set()

    # Looking in ----------------------------------------------------------------------------------

    async def stats(self) -> EngineStats:
        scheduler, counters = self._scheduler, self._scheduler.counters
        return EngineStats(
            waiting=scheduler.num_queued,
            parked=scheduler.intake.parked,
            blocked=len(scheduler.intake.blocked) + len(scheduler.intake.reserved),
            queued_tokens=scheduler.intake.queued_tokens,
            running=len(scheduler.running),
            kv_blocks_used=scheduler.pool.owned,
            kv_blocks_cached=scheduler.pool.cached,
            kv_blocks_total=scheduler.pool.num_blocks,
            steps=counters.steps,
            prompt_tokens=counters.prompt_tokens,
            prompt_tokens_computed=counters.prompt_tokens_computed,
            generation_tokens=counters.generation_tokens,
            prefix_cache_queries=counters.prefix_queries,
            prefix_cache_hits=counters.prefix_hits,
            preemptions=counters.preemptions,
            aborted=counters.aborted_requests,
            expired=counters.expired_requests,
            prefix_waits=counters.parked,
            prefix_wait_outcomes=dict(counters.releases),
            prefix_waits_declined=dict(counters.declined_waits),
            prefill_holds=counters.holds,
            prefill_fires=dict(counters.fires),
            prediction_error=scheduler.costs.error,
            steps_in_flight=len(scheduler.in_flight),
            step_age_s=self._step_age_s(),
            draining=self._draining,
        )

    def _step_age_s(self) -> float:
        in_flight = self._scheduler.in_flight
        if not in_flight:
            return 0.0
        return self._clock() - max(in_flight[0].submitted_at, self._last_result_at)

    async def state(self) -> dict[str, Any]:
        """Queue, running requests and steps in flight, for people. Never prompt text or token ids."""
        now = self._clock()
        scheduler = self._scheduler
        return {
            "boot_id": self.info.boot_id,
            "waiting": [describe(request, now) for request in scheduler.requests.values() if request.queued],
            "running": [describe(request, now) for request in scheduler.running],
            "steps_in_flight": [
                {"step_id": s.step_id, "decode_requests": len(s.decodes), "age_s": now - s.submitted_at}
                | {"prefill_tokens": sum(c.length for c in s.chunks)}
                for s in scheduler.in_flight
            ],
        }
