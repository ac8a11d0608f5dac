"""L1-L6 of the requirements: abort, priorities, deadlines, the ledger. L4 is in tests/engine, L5 in tools/."""

from __future__ import annotations

import itertools

import pytest
from world import World

from atom_async.events.schema import (
    RequestAborted,
    RequestFailed,
    RequestFinished,
    RequestPreempted,
    RequestReleased,
    StepSubmitted,
)
from atom_async.scheduler.request import TRANSITIONS, State

LONG = list(range(100, 180))


def crowd() -> World:
    """Requests in every state: decoding, begun, ready, parked, blocked, reserved, preempted."""
    world = World(blocks=44, budget=24, max_num_seqs=6, max_bypass_ms=1500, max_chunk_tokens=8)
    world.add("decoding", [1] * 6, max_tokens=30)
    world.add("begun", LONG, max_tokens=4)
    world.submit()
    world.add("parked", [*LONG[:60], 7], max_tokens=3)
    world.add("parked2", [*LONG[:60], 8], max_tokens=3)
    world.add("blocked", [2] * 100, max_tokens=3)
    world.add("blocked2", [3] * 90, max_tokens=3)
    world.submit()
    world.complete()
    world.now += 2
    world.submit()
    world.add("ready", [4] * 9, max_tokens=3)
    world.add("urgent", [5] * 9, max_tokens=3, priority=-1)
    return world


def states(world: World) -> dict[str, State]:
    return {name: request.state for name, request in world.scheduler.requests.items()}


def test_the_crowd_is_in_every_state() -> None:
    found = set(states(crowd()).values())
    assert found == {State.RUNNING, State.READY, State.PARKED, State.BLOCKED}


@pytest.mark.parametrize("name", sorted(states(crowd())))
@pytest.mark.parametrize("later", [0, 1, 2, 5])
def test_l1_an_abort_anywhere_frees_at_once(name: str, later: int) -> None:
    world = crowd()
    for _ in range(later):
        world.submit()
        if world.results:
            world.complete()
    if name not in world.scheduler.requests:
        return
    request = world.scheduler.requests[name]
    state, blocks = request.state, len(request.blocks)
    owned = world.scheduler.pool.owned
    world.abort(name)  # checks the ledger
    assert request.state is State.ABORTED
    assert not request.blocks
    assert world.scheduler.pool.owned >= owned - blocks
    assert (world.scheduler.pool.owned < owned) == bool(blocks)
    assert world.named(RequestAborted)[-1].state == state.value
    world.run()
    assert world.scheduler.pool.owned == 0


def test_l1_every_pair_of_aborts_in_any_order() -> None:
    for first, second in itertools.permutations(sorted(states(crowd())), 2):
        world = crowd()
        world.abort(first)
        world.abort(second)
        world.run()
        assert world.scheduler.pool.owned == 0
        ended = {name for name, outcomes in world.outcomes.items() if outcomes and outcomes[-1].finish}
        assert ended == set(world.prompts) - {first, second}


def test_l2_an_abort_in_mid_prefill_stops_it() -> None:
    world = World(blocks=8192, block_size=16, budget=8192)
    world.add("long", list(range(128_000)))
    world.submit()
    world.abort("long")
    assert world.submit() is None
    assert world.computed == 8192


def test_l3_an_abort_after_a_preemption_in_the_same_step_ends_aborted() -> None:
    world = World(blocks=16, budget=32)
    world.add("victim", [1] * 40, max_tokens=20, priority=1)
    world.submit()
    world.submit()
    victim = world.scheduler.requests["victim"]
    world.add("urgent", [2] * 50, max_tokens=2, priority=0)
    world.submit()
    assert victim.preemptions == 1
    world.abort("victim")
    assert victim.state is State.ABORTED
    world.run()
    assert [o.finish for o in world.outcomes["victim"]] == []


def test_l6_an_ended_request_reaches_no_other_state() -> None:
    for state in (State.FINISHED, State.ABORTED, State.FAILED):
        assert not TRANSITIONS[state]
    for state, following in TRANSITIONS.items():
        assert state not in following


def test_a_priority_takes_a_slot() -> None:
    world = World(blocks=64, max_num_seqs=2, budget=16)
    world.add("a", [1] * 5, max_tokens=20, priority=2)
    world.add("b", [2] * 5, max_tokens=20, priority=1)
    world.submit()
    world.complete()
    urgent = world.add("urgent", [3] * 5, max_tokens=2)
    same = world.add("same", [4] * 5, max_tokens=2, priority=1)
    world.submit()
    assert urgent.state is State.RUNNING
    assert same.state is State.READY, "equal priority takes nothing"
    (preempted,) = world.named(RequestPreempted)
    assert (preempted.request_id, preempted.reason) == ("a", "priority")
    world.run()
    assert len(world.output("a")) == len(world.output("b")) == 20


def test_a_priority_takes_memory_and_no_more_than_it_needs() -> None:
    world = World(blocks=30, max_num_seqs=8, budget=64)
    for number in range(4):
        world.add(f"low{number}", [number] * 20, max_tokens=20, priority=1 + number)
    world.submit()
    world.complete()
    world.add("urgent", [9] * 30, max_tokens=2)
    world.submit()
    assert [e.request_id for e in world.named(RequestPreempted)] == ["low3"]
    world.run()


def test_a_priority_that_would_not_fit_anyway_preempts_nobody() -> None:
    world = World(blocks=20, max_num_seqs=8, budget=64)
    world.add("equal", [1] * 50, max_tokens=10, priority=0)
    world.add("low", [2] * 8, max_tokens=10, priority=1)
    world.submit()
    world.complete()
    urgent = world.add("urgent", [3] * 60, max_tokens=2)
    world.submit()
    assert urgent.state is State.BLOCKED
    assert not world.named(RequestPreempted)
    world.run()


def test_a_deadline_that_passes_in_the_queue_is_a_clear_failure() -> None:
    world = World(blocks=64, max_num_seqs=1)
    world.add("runs", [1] * 5, max_tokens=30)
    world.submit()
    late = world.add("late", [2] * 5, deadline_s=3.0)
    assert world.scheduler.next_alarm() == 3.0
    world.run()
    (outcome,) = world.outcomes["late"]
    assert (outcome.finish, outcome.error_kind) == ("error", "deadline")
    assert "3000 ms" in outcome.error
    assert late.state is State.FAILED
    (failed,) = world.named(RequestFailed)
    assert (failed.request_id, failed.state) == ("late", "ready")
    assert world.scheduler.counters.expired_requests == 1


def test_a_deadline_does_not_end_what_has_started() -> None:
    world = World(blocks=64)
    world.add("a", [1] * 5, max_tokens=30, deadline_s=3.0)
    world.run()
    assert world.outcomes["a"][-1].finish == "length"
    assert world.scheduler.next_alarm() is None


def test_a_deadline_of_a_parked_and_of_a_blocked_request() -> None:
    world = World(blocks=44, budget=16, max_num_seqs=4, max_chunk_tokens=8)
    world.add("begun", LONG, max_tokens=4)
    world.submit()
    assert world.scheduler.requests["begun"].computed == 8
    parked = world.add("parked", [*LONG[:60], 7], deadline_s=2.0)
    blocked = world.add("blocked", [2] * 140, deadline_s=4.0)
    world.submit()
    assert (parked.state, blocked.state) == (State.PARKED, State.BLOCKED)
    world.run()
    assert [world.outcomes[n][-1].error_kind for n in ("parked", "blocked")] == ["deadline", "deadline"]
    assert not world.named(RequestReleased), "a failed waiter is not released"


def test_lost_steps_start_over_and_lose_no_request() -> None:
    for depth in (1, 2):
        world = World(blocks=64, budget=16)
        for number in range(5):
            world.add(f"r{number}", [*range(20), number], max_tokens=6)
        for _ in range(7):
            while len(world.results) < depth and world.submit():
                pass
            world.complete()
        while len(world.results) < depth and world.submit():
            pass
        world.lose_steps()
        world.run()
        assert all(len(world.output(f"r{number}")) == 6 for number in range(5))


def test_the_events_tell_the_whole_life() -> None:
    world = World(blocks=64)
    world.add("a", [1] * 20, max_tokens=3)
    world.run()
    names = [type(e).__struct_config__.tag for e in world.events]
    assert names[:4] == ["request.arrived", "request.admitted", "prefill.fired", "step.submitted"]
    (finished,) = world.named(RequestFinished)
    assert (finished.prompt_tokens, finished.completion_tokens, finished.finish_reason) == (20, 3, "length")
    assert finished.ttft_ms > 0
    assert sum(e.prefill_tokens for e in world.named(StepSubmitted)) == world.computed
