"""What always holds between two calls of the scheduler. For tests, debug mode and idle moments."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

from .core import Scheduler
from .plan import Plan
from .request import Request, State


def check(scheduler: Scheduler) -> None:
    """Raises AssertionError naming what is broken. O(requests + blocks)."""
    scheduler.pool.check()
    _check_queues(scheduler)
    _check_slots(scheduler)
    for request in scheduler.running:
        _check_running(scheduler, request)
    owners = Counter(block for request in scheduler.running for block in request.blocks)
    for block, references in enumerate(scheduler.pool.references):
        assert references == owners[block], f"block {block}: {references} references, {owners[block]} owners"


def check_realised(plan: Plan, scheduler: Scheduler, tokens_before: int, running_before: int) -> None:
    """The plan announced is the plan executed: tokens and requests, right after `commit`."""
    step = scheduler.in_flight[-1]
    assert step.decodes is plan.decodes and step.chunks is plan.chunks
    computed = scheduler.counters.prompt_tokens_computed - tokens_before
    assert computed == plan.prefill_tokens, f"{plan.prefill_tokens} tokens planned, {computed} executed"
    entered = len(scheduler.running) - running_before + len(plan.preempted)
    assert entered == plan.admitted, f"{plan.admitted} admissions planned, {entered} executed"


def _check_queues(scheduler: Scheduler) -> None:
    running, waiting = scheduler.running, scheduler.waiting
    for queue, state in ((running, State.RUNNING), (waiting, State.WAITING)):
        assert all(r.state is state for r in queue)
        assert all(a.rank < b.rank for a, b in pairwise(queue)), "out of rank order"
    alive = {id(r) for r in running} | {id(r) for r in waiting}
    assert alive == {id(r) for r in scheduler.requests.values()}, "a live request is in no queue"


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
