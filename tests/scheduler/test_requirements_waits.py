"""W1-W12 of the requirements: waiting on a prefix that is being computed. W1, W4, W7, W9 also run elsewhere at size."""

from __future__ import annotations

import pytest
from world import World

from atom_async.events.schema import (
    PrefixReady,
    ProtectionStarted,
    RequestArrived,
    RequestParked,
    RequestReleased,
    StepSubmitted,
)
from atom_async.scheduler.request import State

SHARED = list(range(4096))


def begin(world: World, tokens: int = 400, *, name: str = "producer", priority: int = 0) -> list[int]:
    """A producer that has computed its first chunk of `tokens` and will go on."""
    prompt = list(range(tokens))
    world.add(name, prompt, max_tokens=2, priority=priority)
    world.submit()
    return prompt


def test_w1_a_prefix_in_production_is_computed_once_over_many_steps() -> None:
    world = World(blocks=2048, block_size=16, budget=1000)
    for number in range(8):
        world.add(f"r{number}", SHARED + [5000 + 10 * number + i for i in range(8)])
    world.run()
    assert world.computed <= 4096 + 8 * 8 + 8 * 16
    assert len(world.named(RequestParked)) == 7
    assert [e.outcome for e in world.named(RequestReleased)] == ["prefix_ready"] * 7
    (ready,) = world.named(PrefixReady)
    assert (ready.boundary_tokens, ready.released) == (4096, 7)


@pytest.mark.parametrize("arrival", ["at once", "one a step"])
def test_w2_a_stampede_costs_the_ideal(arrival: str) -> None:
    world = World(blocks=16_384, block_size=16, budget=8192, max_num_seqs=128)
    shared = list(range(30_000))
    for number in range(128):
        world.add(f"r{number}", shared + [100_000 + 1000 * number + i for i in range(200)], max_tokens=1)
        if arrival == "one a step" and number < 3:
            world.submit()
            world.complete()
    steps = world.run() + (3 if arrival == "one a step" else 0)
    ideal = 30_000 + 128 * 200
    assert world.computed <= ideal + 128 * 16
    assert steps <= -(-(ideal + 128 * 16) // 8192) + 1
    first = world.named(StepSubmitted)[3 if arrival == "at once" else 0]
    assert first.prefill_requests > 1 or arrival != "at once", "the suffixes ride in the step that ends the prefix"


@pytest.mark.parametrize("ending", ["aborted", "preempted", "failed", "finished by its client"])
def test_w3_no_wait_without_a_promise(ending: str) -> None:
    world = World(blocks=256, budget=16)
    prompt = begin(world)
    waiters = [world.add(f"w{number}", [*prompt[:200], 900 + number]) for number in range(3)]
    assert all(w.state is State.PARKED for w in waiters)
    deadlines = [w.wait_deadline for w in waiters]
    if ending == "aborted":
        world.abort("producer")
        outcome = "producer_aborted"
    elif ending == "preempted":
        world.complete()
        world.scheduler._preempt(world.scheduler.requests["producer"], "memory", world.now)
        world.scheduler.intake.settle(world.now)
        outcome = "producer_preempted"
    elif ending == "failed":
        world.scheduler.lose_steps(world.now)
        world.results.clear()
        outcome = "producer_failed"
    else:
        world.scheduler.finish("producer", world.now)
        outcome = "producer_aborted"
    released = world.named(RequestReleased)
    assert [(e.request_id, e.outcome) for e in released] == [(f"w{n}", outcome) for n in range(3)]
    runnable = [r for r in world.scheduler.requests.values() if r.state is State.READY]
    assert runnable, "somebody computes the prefix now"
    parked = [w for w in waiters if w.state is State.PARKED]
    assert all(w.wait.producer in runnable for w in parked), "the others wait for that one, on a new promise"
    assert [w.wait_deadline for w in waiters] == deadlines
    if ending != "failed":
        world.run()


def test_w4_a_deadline_belongs_to_its_request() -> None:
    world = World(blocks=512, budget=16, prefix_wait_ms=2000.0)
    prompt = begin(world, 1600)
    a = world.add("a", [*prompt[:1500], 7])
    world.now += 0.5
    world.add("b", [*prompt[:1500], 8], priority=0)
    world.abort("b")
    assert a.wait_deadline == 2.0
    assert world.scheduler.next_alarm() == 2.0
    world.now = 2.0
    world.expire()
    assert a.state is State.READY
    (released,) = [e for e in world.named(RequestReleased) if e.request_id == "a"]
    assert (released.outcome, released.waited_ms) == ("deadline", 2000.0)
    world.run()
    assert world.outcomes["a"][-1].finish
    assert world.scheduler.counters.declined_waits["deadline"] >= 1


def test_w5_a_long_waiter_holds_up_nobody() -> None:
    world = World(blocks=16_384, block_size=16, budget=16_384, max_num_seqs=64, max_chunk_tokens=512)
    begin(world, 128_000)
    world.add("a", [*range(127_984), 5])
    for number in range(30):
        world.add(f"r{number}", [200_000 + number * 1000 + i for i in range(300)])
    assert world.scheduler.requests["a"].state is State.PARKED
    world.submit()
    assert all(world.scheduler.requests[f"r{number}"].state is State.RUNNING for number in range(30))


def test_w6_a_released_request_keeps_its_rank() -> None:
    world = World(blocks=1024, budget=32, max_num_seqs=3, overtake_factor=1.0)
    prompt = begin(world, 64)
    a = world.add("a", prompt[:60] + [900 + i for i in range(20)], max_tokens=1)
    world.now += 0.25
    others = [world.add(f"o{n}", [2000 + 100 * n + i for i in range(20)], max_tokens=1) for n in range(6)]
    assert a.state is State.PARKED
    world.run()
    assert a.admitted_at <= min(o.admitted_at for o in others)


def test_w7_waiters_do_no_work() -> None:
    """127 wait through 100 steps: nothing is hashed, nothing looked up, no event concerns them."""
    world = World(blocks=4096, block_size=16, budget=128, max_num_seqs=8, step_s=0.01)
    prompt = begin(world, 30_000)
    for number in range(127):
        world.add(f"w{number}", [*prompt[:29984], 100000 + number])
    waiters = [world.scheduler.requests[f"w{number}"] for number in range(127)]
    looked_up = [(w.found_as_of, len(w.found), len(w.chain)) for w in waiters]
    before = len(world.events)
    for _ in range(100):
        if len(world.results) == 2:
            world.complete()
        plan = world.scheduler.plan(world.now)
        assert len(plan.chunks) == 1
        assert not plan.deferred
        world.submit()
    assert [(w.found_as_of, len(w.found), len(w.chain)) for w in waiters] == looked_up
    assert all(w.state is State.PARKED for w in waiters)
    assert not [e for e in world.events[before:] if getattr(e, "request_id", "").startswith("w")]


def test_w8_a_short_continuation_waits_too() -> None:
    world = World(blocks=1024, block_size=16, budget=512)
    prompt = begin(world, 512 + 4000)
    world.add("short", [*prompt[:4496], *range(9000, 9064)])
    (parked,) = world.named(RequestParked)
    assert (parked.producer_id, parked.boundary_tokens) == ("producer", 4496)
    world.run()
    assert world.computed == 4512 + 64


def test_w8_every_declined_wait_has_a_reason() -> None:
    world = World(blocks=1024, budget=16)
    prompt = begin(world, 400, priority=3)
    world.add("urgent", [*prompt[:300], 7], priority=0)
    assert world.scheduler.requests["urgent"].state is State.READY
    assert dict(world.scheduler.counters.declined_waits) == {"priority": 1}
    assert not world.named(RequestParked)
    world.run()


def test_w9_parking_is_not_prefilling() -> None:
    world = World(blocks=4096, block_size=16, budget=64, max_num_seqs=16, step_s=0.01, prefill_decode_interval=4)
    for number in range(4):
        world.add(f"d{number}", [number], max_tokens=500)
    world.submit()
    world.complete()
    begin(world, 3000)
    while world.results:
        world.complete()
    armed = len(world.named(ProtectionStarted))
    for number in range(128):
        world.add(f"w{number}", [*range(2992), 9000 + number])
    assert world.scheduler.intake.parked == 128
    assert len(world.named(ProtectionStarted)) == armed
    since = []
    for _ in range(40):
        plan = world.submit()
        assert plan is not None
        assert len(plan.decode_slots) == 16, "the four decode in every step"
        since.append(world.scheduler.clock.held_since)
        world.complete()
    held = [s for s in since if s is not None]
    assert held == sorted(held)
    assert any(s is not None for s in since)


def test_w10_a_step_that_never_ran_leaves_no_hash() -> None:
    world = World(blocks=256, budget=32)
    prompt = begin(world, 60)
    world.submit()
    pool = world.scheduler.pool
    pending = [world.scheduler.requests["producer"].chain[index] for index in range(15)]
    assert all(pool.find(h) is not None for h in pending)
    world.scheduler.lose_steps(world.now)
    assert all(pool.find(h) is None for h in pending)
    late = world.add("late", [*prompt, 99])
    assert next(e for e in world.named(RequestArrived) if e.request_id == "late").cached_tokens == 0
    assert late.state is State.PARKED  # behind the producer, which starts over
    assert late.wait.producer.computed == 0


def test_w10_an_aborted_producer_leaves_only_what_is_written() -> None:
    world = World(blocks=256, budget=32)
    prompt = begin(world, 60)
    world.abort("producer")
    request = world.add("late", [*prompt, 99])
    assert request.state is State.READY
    world.run()  # every token is checked against the oracle: a block that was not written would change it
    assert request.cached_tokens == 32, "its step was submitted, so it will be written"


def test_w11_another_salt_neither_reuses_nor_waits() -> None:
    world = World(blocks=256, budget=16)
    prompt = begin(world, 100)
    other = world.add("other", prompt, salt="b")
    assert other.state is State.READY
    world.run()
    assert world.computed == 200


def test_w12_the_older_copy_is_found_when_the_newer_is_evicted() -> None:
    world = World(blocks=64, block_size=4, budget=64)
    pool = world.scheduler.pool
    old, new = pool.allocate(1), pool.allocate(1)
    pool.register(old[0], b"h" * 16)
    pool.register(new[0], b"h" * 16)
    pool.release(new)
    for _ in range(pool.available):
        pool.allocate(1)
    assert pool.find(b"h" * 16) == old[0]
    pool.check()


def test_a_higher_priority_takes_the_lead_and_the_queued_producer_waits() -> None:
    world = World(blocks=256, budget=16, max_num_seqs=1)
    world.add("busy", [1], max_tokens=50)
    world.submit()
    low = world.add("low", [*range(100, 160), 1], priority=5)
    waits = world.add("waits", [*range(100, 160), 2], priority=5)
    assert waits.wait.producer is low
    high = world.add("high", [*range(100, 160), 3], priority=1)
    assert low.wait.producer is high
    assert waits.wait.producer is high
    assert [e.outcome for e in world.named(RequestReleased)] == ["priority"]
    world.run()
    assert world.computed <= 1 + 61 + 2


def test_waiting_is_never_worse_than_computing() -> None:
    """A long producer in the queue moves up to where its short waiter stands."""
    world = World(blocks=1024, budget=64, max_num_seqs=2, overtake_factor=100.0)
    world.add("busy", [1], max_tokens=200)
    world.submit()
    world.add("long", list(range(100, 1000)))
    small = [world.add(f"s{n}", [5000 + 100 * n + i for i in range(40)], max_tokens=1) for n in range(8)]
    short = world.add("short", [*range(100, 120), 7], max_tokens=1)
    assert short.state is State.PARKED
    assert short.admitted_at <= min(s.admitted_at for s in small)
    world.run()
    assert short.admitted_at <= min(s.admitted_at for s in small)


def test_waiters_of_a_blocked_producer_that_need_less_go_on() -> None:
    world = World(blocks=40, budget=64, max_num_seqs=8, max_bypass_ms=60_000)
    world.add("fills", [1] * 80, max_tokens=60)
    world.submit()
    world.complete()
    head = world.add("head", list(range(100, 220)))
    follower = world.add("follower", [*range(100, 112), 5], max_tokens=2)
    big = world.add("big", [*range(100, 218), 5], max_tokens=2)
    assert follower.state is big.state is State.PARKED
    world.submit()
    assert head.state is State.BLOCKED
    assert [e.outcome for e in world.named(RequestReleased) if e.request_id == "follower"] == ["producer_waits"]
    world.submit()
    assert follower.state is State.RUNNING
    world.run()
