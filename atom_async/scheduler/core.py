"""The scheduler's state and the few transitions it has.

`plan` decides and changes nothing; `commit` executes exactly that plan; `complete` takes a step's result; `expire`
does what time demands. Every method runs to completion, and whoever calls passes the time.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable

from atom_async.cache.pool import BlockPool
from atom_async.events.schema import (
    Event,
    PreemptReason,
    ReleaseOutcome,
    RequestAborted,
    RequestAdmitted,
    RequestArrived,
    RequestFailed,
    RequestFinished,
    RequestPreempted,
    RequestRejected,
    StepCompleted,
    StepSubmitted,
)
from atom_async.wire.messages import StepPlan, StepResult, unpack_ints

from .cost_model import CostModel
from .counters import Counters
from .hold_clock import HoldClock
from .intake import Intake
from .limits import Limits
from .message import PlanBuilder
from .outcome import Outcome
from .plan import Chunk, Plan
from .planner import Planner
from .policy import Policy
from .queues import Queues
from .request import Request, State
from .results import StepInFlight, TokenTaker
from .waits import BlockBoundaries, Boundaries


def _nobody(event: Event) -> None:
    """Where events go when nobody listens."""


class Scheduler:
    """Owns every request, the block pool and the worker slots.

    Args:
        interval: decode-only steps after a prefill-carrying one, for the events; the policy decides by itself.
        emit: takes every event, in order, at the moment it happens; must not call back.
    """

    def __init__(
        self,
        *,
        pool: BlockPool,
        limits: Limits,
        policy: Policy,
        costs: CostModel,
        boundaries: Boundaries | None = None,
        interval: int = 0,
        emit: Callable[[Event], None] = _nobody,
    ) -> None:
        self.pool = pool
        self.limits = limits
        self.policy = policy
        self.costs = costs
        self.boundaries = boundaries or BlockBoundaries(limits.block_size)
        self.counters = Counters()
        self.requests: dict[str, Request] = {}
        """Everything alive, by id."""
        self.running: list[Request] = []
        """In rank order."""
        self.intake = Intake(
            pool=pool,
            limits=limits,
            policy=policy,
            costs=costs,
            boundaries=self.boundaries,
            counters=self.counters,
            emit=emit,
        )
        self.clock = HoldClock(interval=interval, counters=self.counters, emit=emit)
        self.in_flight: deque[StepInFlight] = deque()
        self._planner = Planner(limits, policy, costs, self.boundaries)
        self._tokens = TokenTaker(pool, limits, self.counters, emit)
        self.free_slots = list(range(limits.max_num_seqs - 1, -1, -1))
        self.draining = False
        self._emit = emit
        self._vacated: list[int] = []
        """Slots whose sequence left since the last plan: the workers do not know yet."""
        self._last_step_id = 0
        self._last_completed_at = float("-inf")
        self._arrivals = 0

    def __contains__(self, request_id: str) -> bool:
        return request_id in self.requests

    @property
    def num_queued(self) -> int:
        return len(self.requests) - len(self.running)

    def next_rank(self) -> int:
        """Arrival rank for the next request; the order of calls is the order of arrival."""
        self._arrivals += 1
        return self._arrivals

    def add(self, request: Request, now: float) -> None:
        """Queues a request that can run some day: its limit fits the model and all of KV."""
        assert request.request_id not in self.requests, request.request_id
        self.requests[request.request_id] = request
        self._emit(
            RequestArrived(
                request_id=request.request_id,
                prompt_tokens=request.prompt_len,
                cached_tokens=self.intake.present_tokens(request),
                priority=request.priority,
            )
        )
        self.intake.arrive(request, now)
        self.intake.settle(now)

    def reject(self, reason: str, message: str, request_id: str = "") -> None:
        """Says that a request was turned away at the door."""
        self._emit(RequestRejected(request_id=request_id, reason=reason, message=message))

    # Deciding ------------------------------------------------------------------------------------

    def plan(self, now: float) -> Plan:
        """The next step, as the state allows it now. No side effects."""
        intake = self.intake
        queues = Queues(
            pool=self.pool,
            running=self.running,
            ready=intake.ready.items,
            instant=intake.instant.items,
            blocked=intake.blocked,
            reserved=intake.reserved.items,
            queued_tokens=intake.queued_tokens,
            slots=len(self.free_slots),
            producers=intake.producers,
        )
        return self._planner.plan(queues, self.clock, now, draining=self.draining)

    # Doing ---------------------------------------------------------------------------------------

    def next_step(self, now: float) -> StepPlan | None:
        """Plans and executes; None: there is nothing to run until something happens."""
        while True:
            plan = self.plan(now)
            message = self.commit(plan, now)
            if message is not None or plan.held or not plan.deferred:
                return message

    def commit(self, plan: Plan, now: float) -> StepPlan | None:
        """Executes a plan made by `plan` on the present state; returns what the workers are told, if anything."""
        for request, needed, next_hash in plan.blocked:
            self.intake.block(request, needed, next_hash, now)
        for request in plan.deferred:
            self.intake.unplace(request)
        self.clock.note(plan, now)
        message = self._submit(plan, now) if plan else None
        self.intake.settle(now)
        return message

    def _submit(self, plan: Plan, now: float) -> StepPlan:
        for victim in plan.preempted:
            by_priority = any(victim is request for request in plan.for_priority)
            self._preempt(victim, "priority" if by_priority else "memory", now)
        self._last_step_id += 1
        step_id = self._last_step_id
        builder = PlanBuilder()
        executed = plan.executed
        for chunk in executed:
            if chunk.reuse is not None:  # before anything is allocated, which might evict what is reused
                self.pool.acquire(chunk.reuse.blocks)
        for request in plan.growing:
            blocks = self.pool.allocate(1)
            request.blocks += blocks
            builder.grow(request.slot, blocks)
        builder.decode(plan.decodes)
        for request in plan.decodes:
            request.computed += 1
            request.samples_in_flight += 1
        for chunk in executed:
            self._execute(chunk, step_id, now, builder)
        self.counters.steps += 1
        self.counters.prefill_steps += bool(plan.chunks)
        self.clock.stepped(plan, step_id, now)
        self._emit(self._submitted(plan, step_id))
        self.in_flight.append(
            StepInFlight(
                step_id, plan.decodes, executed, builder.sample_slots.tobytes(), now, plan.work, plan.predicted_ms
            )
        )
        finished, self._vacated = self._vacated, []
        return builder.build(step_id, finished)

    def _submitted(self, plan: Plan, step_id: int) -> StepSubmitted:
        executed = plan.executed
        return StepSubmitted(
            step_id=step_id,
            prefill_tokens=sum(chunk.length for chunk in executed),
            prefill_requests=len(executed),
            chunks=[(chunk.request.request_id, chunk.start, chunk.length) for chunk in executed],
            decode_requests=len(plan.decodes),
            kv_blocks_used=self.pool.owned,
            kv_blocks_total=self.pool.num_blocks,
            predicted_ms=plan.predicted_ms,
        )

    def _execute(self, chunk: Chunk, step_id: int, now: float, builder: PlanBuilder) -> None:
        request, end = chunk.request, chunk.start + chunk.length
        assert end <= request.total and request.samples_in_flight == 0
        if chunk.reuse is not None:
            self._enter(chunk, now)
            builder.enter(request, chunk.start)
        blocks = self.pool.allocate(chunk.new_blocks)
        request.blocks += blocks
        builder.grow(request.slot, blocks)
        builder.chunk(chunk)
        self.counters.prompt_tokens_computed += chunk.length
        request.computed = end
        if chunk.samples:
            request.decoding = True
            request.samples_in_flight = 1
        if self.limits.prefix_caching:
            self._name_blocks(request, max(request.present, chunk.start), end, step_id)
            self.intake.advanced(request, chunk.start, end, now)

    def _enter(self, chunk: Chunk, now: float) -> None:
        """Takes a request from the queue into a slot, with the prefix it reuses."""
        request, reuse = chunk.request, chunk.reuse
        assert reuse is not None
        self.intake.enter(request)
        insort(self.running, request, key=_rank)
        request.become(State.RUNNING)
        request.slot = self.free_slots.pop()
        planned = [source.blocks[index] for source, index in reuse.planned]
        self.pool.acquire(planned)
        request.blocks = reuse.blocks + planned
        request.present = reuse.present
        request.group.started = True
        if request.admitted_at < 0:
            request.admitted_at = now
            request.cached_tokens = min(chunk.start, request.prompt_len)
            self.counters.prompt_tokens += request.prompt_len
            self.counters.prefix_queries += request.prompt_len
            self.counters.prefix_hits += request.cached_tokens
        self._emit(
            RequestAdmitted(
                request_id=request.request_id,
                cached_tokens=chunk.start,
                uncached_tokens=request.total - chunk.start,
                queue_ms=(now - request.queued_at) * 1e3,
            )
        )

    def _name_blocks(self, request: Request, start: int, end: int, step_id: int) -> None:
        """Makes the full blocks of [start, end) findable; `step_id` writes them."""
        block_size = self.limits.block_size
        for index in range(start // block_size, end // block_size):
            self.pool.register(request.blocks[index], request.chain[index], step_id=step_id)

    # Results -------------------------------------------------------------------------------------

    def complete(self, result: StepResult, now: float) -> list[Outcome]:
        """The oldest step in flight has run. Returns what its requests have to tell their clients.

        A request that ends here has left the scheduler when this returns.
        """
        step = self.in_flight.popleft()
        assert step.step_id == result.step_id, f"step {step.step_id} expected, result of {result.step_id}"
        self.pool.commit_step(step.step_id)
        self._measure(step, now, tokens_out=len(result.tokens) // 4)
        if not self.boundaries.pending_reusable:
            self._reach_boundaries(step, now)
        if result.prompt_logprobs:
            step.keep_prompt_logprobs(result.prompt_logprobs)
        rows = step.rows
        if result.failed:
            rows, outcomes = self._fail_rows(step, dict(result.failed), now)
        else:
            assert result.slots == step.sample_slots, "the rows of the result are not those of the plan"
            outcomes = []
        ended = frozenset(unpack_ints(result.ended)) if result.ended else frozenset[int]()
        described = {entry.slot: entry for entry in result.logprobs}
        for request, token_id in zip(rows, unpack_ints(result.tokens), strict=True):
            if step.is_void(request):
                continue
            outcome = self._tokens.take(request, token_id, now, grammar_ended=request.slot in ended)
            if described:
                outcome.logprobs = described.get(request.slot)
            outcomes.append(outcome)
            if outcome.finish is not None:
                self._finish(request, outcome.finish, now)
        self.intake.settle(now)
        return outcomes

    def _measure(self, step: StepInFlight, now: float, *, tokens_out: int) -> None:
        elapsed_ms = (now - max(step.submitted_at, self._last_completed_at)) * 1e3
        self._last_completed_at = now
        self.costs.observe(step.work, elapsed_ms, step.predicted_ms)
        self._emit(StepCompleted(step_id=step.step_id, elapsed_ms=elapsed_ms, tokens_out=tokens_out))

    def _reach_boundaries(self, step: StepInFlight, now: float) -> None:
        for chunk in step.chunks:
            if not step.is_void(chunk.request):
                self.intake.reach(chunk.request, chunk.start + chunk.length, now)

    def _fail_rows(self, step: StepInFlight, failed: dict[int, str], now: float) -> tuple[list[Request], list[Outcome]]:
        """Ends the requests that the workers could not go on with; returns the other rows."""
        rows, slots = step.rows, unpack_ints(step.sample_slots)
        outcomes: list[Outcome] = []
        for request, slot in zip(rows, slots, strict=True):
            if slot in failed and not step.is_void(request):
                self._fail(request, failed[slot], now)
                outcomes.append(Outcome(request, None, "error", error=failed[slot], error_kind="worker"))
        return [r for r, slot in zip(rows, slots, strict=True) if slot not in failed], outcomes

    def lose_steps(self, now: float) -> None:
        """The steps in flight will not come back and wrote nothing that can be relied on. What they would have
        written leaves the cache before anyone can find it, and their requests start over from what is known."""
        lost: dict[str, Request] = {}
        while self.in_flight:
            step = self.in_flight.popleft()
            self.pool.fail_step(step.step_id)
            for request in step.decodes + [chunk.request for chunk in step.chunks]:
                if not step.is_void(request):
                    lost[request.request_id] = request
        for request in lost.values():
            self._preempt(request, "step_failed", now)
        self.intake.settle(now)

    def withdraw(self, request_id: str, outcome: ReleaseOutcome, now: float) -> None:
        """The model will not keep the boundaries that this producer promised: its waiters go on by themselves."""
        request = self.requests.get(request_id)
        if request is not None:
            self.intake.release_waiters(request, outcome, now)
            self.intake.settle(now)

    # Leaving -------------------------------------------------------------------------------------

    def expire(self, now: float) -> list[Outcome]:
        """Does what time demands; returns the ends of requests whose deadline passed while they were queued."""
        outcomes = []
        for request in self.intake.expire(now):
            waited_ms = (now - request.arrived_at) * 1e3
            message = f"the request waited {waited_ms:.0f} ms and could not start before its deadline"
            self._fail(request, message, now)
            self.counters.expired_requests += 1
            outcomes.append(Outcome(request, None, "error", error=message, error_kind="deadline"))
        self.intake.settle(now)
        return outcomes

    def next_alarm(self, *, holds: bool = True) -> float | None:
        """When `expire`, or with `holds` a held prefill, wants a turn if nothing happens before. While the
        pipeline has no room, the end of a hold is of no use."""
        times = [self.intake.next_alarm(), self.clock.until if holds else None]
        return min((when for when in times if when is not None), default=None)

    def abort(self, request_id: str, now: float, reason: str = "") -> Request | None:
        """Ends a request in whatever state it is; its memory is free when this returns. None: not alive.

        Those who waited for it are runnable, and are placed by the next `expire` or change: a storm of aborts places
        them once, not once for each.
        """
        request = self.requests.get(request_id)
        if request is not None:
            self._emit(RequestAborted(request_id=request_id, state=request.state.value, reason=reason))
            self._end(request, State.ABORTED, "producer_aborted", now)
            self.counters.aborted_requests += 1
        return request

    def finish(self, request_id: str, now: float) -> Request | None:
        """Like `abort`, for a client that has all it wants."""
        request = self.requests.get(request_id)
        if request is not None:
            self._finish(request, "stop", now)
        return request

    def _finish(self, request: Request, reason: str, now: float) -> None:
        self._emit(
            RequestFinished(
                request_id=request.request_id,
                finish_reason=reason,
                prompt_tokens=request.prompt_len,
                cached_tokens=request.cached_tokens,
                completion_tokens=request.output_len,
                ttft_ms=None if request.first_token_at < 0 else (request.first_token_at - request.arrived_at) * 1e3,
                e2e_ms=(now - request.arrived_at) * 1e3,
            )
        )
        self._end(request, State.FINISHED, "producer_aborted", now)

    def _fail(self, request: Request, reason: str, now: float) -> None:
        self._emit(RequestFailed(request_id=request.request_id, state=request.state.value, reason=reason))
        self._end(request, State.FAILED, "producer_failed", now)

    def _end(self, request: Request, state: State, outcome: ReleaseOutcome, now: float) -> None:
        if request.state is State.RUNNING:
            self.counters.stayed(now - request.admitted_at)
            self._leave(request)
        self.intake.end(request, outcome, now)
        request.become(state)
        del self.requests[request.request_id]

    def _preempt(self, request: Request, reason: PreemptReason, now: float) -> None:
        """Back into the queue at its old rank; what it computed stays cached as long as it may."""
        freed = self._leave(request)
        self.intake.end(request, "producer_failed" if reason == "step_failed" else "producer_preempted", now)
        request.become(State.READY)
        request.void_upto = self._last_step_id
        request.preemptions += 1
        request.prompt_logprobs.clear()
        if self.limits.prefix_caching:
            request.extend_chain(self.limits.block_size, len(request.tokens))
        self.intake.arrive(request, now)
        self.counters.preemptions += 1
        self._emit(RequestPreempted(request_id=request.request_id, reason=reason, freed_blocks=freed))

    def _leave(self, request: Request) -> int:
        """Gives back slot and blocks, in this very turn. Returns how many blocks became available."""
        position = bisect_left(self.running, request.rank, key=_rank)
        assert self.running[position] is request
        del self.running[position]
        before = self.pool.available
        self.pool.release(request.blocks)
        self.free_slots.append(request.slot)
        self._vacated.append(request.slot)
        request.blocks = []
        request.slot = -1
        request.present = request.computed = request.samples_in_flight = 0
        request.decoding = False
        request.held_s = 0.0
        return self.pool.available - before


def _rank(request: Request) -> tuple[int, int]:
    return request.rank
