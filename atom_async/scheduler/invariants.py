"""What always holds between two calls of the scheduler. For tests, debug mode and idle moments."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

from atom_async.wire.messages import StepPlan

from .core import Scheduler
from .intake import Intake
from .plan import Plan
from .request import Request, State


def check(scheduler: Scheduler) -> None:
    """Raises AssertionError naming what is broken. O(requests + blocks)."""
    scheduler.pool.check()
    _check_queues(scheduler)
    _check_promises(scheduler)
    _check_slots(scheduler)
    for request in scheduler.running:
        _check_running(scheduler, request)
    owners = Counter(block for request in scheduler.running for block in request.blocks)
    for block, references in enumerate(scheduler.pool.references):
        assert references == owners[block], f"block {block}: {references} references, {owners[block]} owners"
    in_flight = {step.step_id for step in scheduler.in_flight}
    assert scheduler.pool.pending_steps <= in_flight, "a block waits for a step that is not in flight"


def check_idle(scheduler: Scheduler) -> None:
    """With no request alive and no step in flight, everything must have come back. O(1): for production."""
    pool, intake = scheduler.pool, scheduler.intake
    assert pool.owned == 0, f"{pool.owned} blocks are owned by nobody"
    slots = len(scheduler.free_slots)
    assert slots == scheduler.limits.max_num_seqs, f"{scheduler.limits.max_num_seqs - slots} slots are lost"
    waiting = [len(intake.ready), len(intake.instant), len(intake.blocked), len(intake.reserved), intake.parked]
    assert not any(waiting), f"somebody waits who is not alive: {waiting}"
    assert not intake.producers, "a prefix is promised by nobody"
    assert not intake.queued_tokens, f"{intake.queued_tokens} tokens wait in nobody's name"


def check_realised(plan: Plan, scheduler: Scheduler, tokens_before: int, running_before: int) -> None:
    """The plan announced is the plan executed: tokens and requests, right after `commit`."""
    step = scheduler.in_flight[-1]
    assert step.decodes is plan.decodes
    assert step.chunks == plan.executed
    computed = scheduler.counters.prompt_tokens_computed - tokens_before
    planned = sum(chunk.length for chunk in plan.executed)
    assert computed == planned, f"{planned} tokens planned, {computed} executed"
    assert plan.held or plan.pending_tokens == plan.prefill_tokens or not plan.chunks, "the signal is not the plan"
    entered = len(scheduler.running) - running_before + len(plan.preempted)
    assert entered == plan.admitted, f"{plan.admitted} admissions planned, {entered} executed"


def checked_step(scheduler: Scheduler, now: float) -> StepPlan | None:
    """`Scheduler.next_step`, with every invariant checked around it."""
    while True:
        tokens, running = scheduler.counters.prompt_tokens_computed, len(scheduler.running)
        plan = scheduler.plan(now)
        message = scheduler.commit(plan, now)
        if message is not None:
            check_realised(plan, scheduler, tokens, running)
        check(scheduler)
        if message is not None or plan.held or not plan.deferred:
            return message


def _check_queues(scheduler: Scheduler) -> None:
    running, intake = scheduler.running, scheduler.intake
    assert all(a.rank < b.rank for a, b in pairwise(running)), "running out of rank order"
    assert all(r.state is State.RUNNING for r in running)
    places = [(intake.ready, State.READY), (intake.instant, State.READY), (intake.reserved, State.BLOCKED)]
    alive = list(running)
    for queue, state in places:
        assert all(r.state is state for r in queue), f"another state among {state.value}"
        assert all(r.home is queue for r in queue)
        assert all(a.order < b.order for a, b in pairwise(queue)), "queue out of order"
        alive += queue
    assert all(r.state is State.BLOCKED and r.home is None for r in intake.blocked)
    parked = [r for r in scheduler.requests.values() if r.state is State.PARKED]
    alive += [*intake.blocked, *parked]
    assert len(parked) == intake.parked
    assert Counter(map(id, alive)) == Counter(map(id, scheduler.requests.values())), (
        "a live request is nowhere, or twice"
    )
    queued = [r for r in scheduler.requests.values() if r.queued]
    assert not any(r.blocks or r.slot >= 0 for r in queued), "a queued request holds something"
    assert intake.queued_tokens == sum(r.uncached for r in queued)


def _check_promises(scheduler: Scheduler) -> None:
    intake: Intake = scheduler.intake
    for block_hash, producer in intake.producers.items():
        assert producer.leads == block_hash
        assert producer.state in (State.READY, State.RUNNING) and not producer.decoding, "promised by one who will not"
    for request in scheduler.requests.values():
        assert request.leads is None or intake.producers[request.leads] is request
        assert (request.state is State.PARKED) == (request.wait is not None)
        if request.wait is not None:
            producer = request.wait.producer
            assert producer.request_id in scheduler.requests, "waits for one who left"
            assert producer.state in (State.READY, State.RUNNING, State.BLOCKED), "waits for one who waits"
            assert producer.priority <= request.priority, "waits for a lower priority"
            assert producer.waiters is not None and request in producer.waiters.group(request.wait.boundary)
            if scheduler.boundaries.pending_reusable:
                assert producer.computed < request.wait.boundary, "waits for what is there"


def _check_slots(scheduler: Scheduler) -> None:
    used = [r.slot for r in scheduler.running]
    slots = used + scheduler.free_slots
    assert sorted(slots) == list(range(scheduler.limits.max_num_seqs)), "slots lost or used twice"


def _check_running(scheduler: Scheduler, request: Request) -> None:
    block_size = scheduler.limits.block_size
    assert request.computed <= request.total
    assert len(request.blocks) * block_size >= request.computed, "computed tokens without a block"
    assert 0 <= request.samples_in_flight <= len(scheduler.in_flight)
    assert not request.decoding or request.computed >= request.total - 1
    for index, block in enumerate(request.blocks[: len(request.chain)]):
        block_hash = scheduler.pool.hashes[block]
        assert block_hash in (None, request.chain[index]), "a block's name is not its owner's prefix"
