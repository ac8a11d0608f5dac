"""A1-A9 of the requirements: admission and the fill signal. Each test's name begins with its id."""

from __future__ import annotations

import random

import pytest
from world import World

from atom_async.events.schema import PrefillFired, PrefillHeld, RequestBlocked, RequestReserved
from atom_async.scheduler.invariants import check, check_realised
from atom_async.scheduler.policy import Fire, Hold
from atom_async.scheduler.request import State
from atom_async.wire.sampling import SamplingParams

HOLDING = {"coalesce_target_fill": 0.9, "coalesce_max_hold_ms": 1e7, "coalesce_quiet_ms": 1e7} | {
    "prefill_max_queue_ms": 1e7,
    "partial_max_hold_ms": 1e7,
}
"""Coalescing that only the fill target ends."""


def one_decoding(world: World, name: str = "decoding") -> None:
    """Something to hold prefill for."""
    world.add(name, [9_000 + len(world.prompts)], max_tokens=10_000)
    world.submit()
    world.complete()


@pytest.mark.parametrize("seed", range(60))
def test_a1_the_signal_is_what_is_admitted(seed: int) -> None:
    """Random queues: hit lengths, aborts, parked ones, chunk caps, full KV, chunking on and off, few slots."""
    rng = random.Random(seed)
    chunked = rng.random() < 0.7
    blocks, block_size = rng.randint(40, 160), rng.choice([1, 4, 8])
    world = World(
        blocks=blocks,
        block_size=block_size,
        budget=rng.choice([16, 40]) if chunked else 400,
        max_num_seqs=rng.randint(1, 10),
        max_model_len=min(120, blocks * block_size) if not chunked else None,
        enable_chunked_prefill=chunked,
        max_chunk_tokens=rng.choice([0, 0, 5]) if chunked else 0,
        step_policy=rng.choice(["mixed", "separate"]),
        coalesce_target_fill=rng.choice([0.0, 0.5, 1.0]),
        coalesce_max_hold_ms=3000.0,
        prefill_decode_interval=rng.choice([0, 0, 3]),
    )
    prefixes = [[1000 * n + i for i in range(80)] for n in range(3)]
    seen = 0
    for number in range(60):
        shared = rng.choice(prefixes)[: rng.randint(0, min(80, world.max_model_len // 2))]
        own = [50_000 + number * 50 + i for i in range(rng.randint(1, 15))]
        prompt = (shared + own)[: world.max_model_len - 1]
        world.add(f"r{number}", prompt, rng.randint(1, 8), priority=rng.choice([0, 0, 1]))
        if rng.random() < 0.2:
            world.abort(rng.choice(sorted(world.scheduler.requests)))
        while len(world.results) >= 2 or (world.results and rng.random() < 0.5):
            world.complete()
        scheduler = world.scheduler
        tokens, running = scheduler.counters.prompt_tokens_computed, len(scheduler.running)
        plan = scheduler.plan(world.now)
        assert plan.held or plan.pending_tokens == plan.prefill_tokens
        assert plan.held or plan.pending_requests == len(plan.chunks)
        message = scheduler.commit(plan, world.now)
        check(scheduler)
        if message is not None:
            check_realised(plan, scheduler, tokens, running)
            world.results.append(world.model.apply(message))
            fired = isinstance(plan.verdict, Fire)
            seen += fired
            if fired:
                event = world.named(PrefillFired)[-1]
                assert (event.pending_tokens, event.admitted_tokens) == (plan.prefill_tokens, plan.prefill_tokens)
    assert seen
    world.run()


def test_a2_only_uncached_tokens_are_work() -> None:
    world = World(blocks=8192, block_size=16, budget=8192, max_model_len=40_000, **HOLDING)
    for name in ("a", "b"):
        world.add(name, [ord(name) * 100_000 + i for i in range(31 * 1024)], max_tokens=1)
        world.run()
    one_decoding(world)
    for name in ("a", "b"):
        prompt = [ord(name) * 100_000 + i for i in range(31 * 1024)]
        world.add(f"{name}2", prompt + [ord(name) * 1_000_000 + i for i in range(1024)])
    plan = world.scheduler.plan(world.now)
    assert plan.pending_tokens == 2048
    assert isinstance(plan.verdict, Hold)


def test_a3_the_signal_sees_the_whole_queue() -> None:
    world = World(blocks=8192, block_size=16, budget=16_384, max_num_seqs=300, **HOLDING)
    one_decoding(world)
    for number in range(256):
        world.add(f"r{number}", [number * 1000 + i for i in range(200)])
    plan = world.scheduler.plan(world.now)
    assert plan.pending_tokens == 16_383  # one goes to the decode
    assert plan.verdict == Fire("fill")


@pytest.mark.parametrize("kind", ["aborted", "parked"])
def test_a4_what_cannot_run_counts_for_nothing(kind: str) -> None:
    world = World(blocks=8192, block_size=16, budget=16_384, max_num_seqs=300, **HOLDING)
    one_decoding(world)
    for number in range(4):
        world.add(f"head{number}", [7 if kind == "parked" else number] * 16 + [number] * 200)
        if kind == "aborted":
            world.abort(f"head{number}")
    for number in range(82):
        world.add(f"r{number}", [number * 1000 + i for i in range(200)])
    plan = world.scheduler.plan(world.now)
    assert plan.pending_tokens >= 16_383
    assert plan.verdict == Fire("fill")
    assert not any(chunk.request.request_id.startswith("head1") for chunk in plan.chunks[:-3]) or kind == "parked"


def test_a5_slots_are_part_of_the_signal() -> None:
    """64 slots, 60 decoding and 4 half-done prompts, 100 waiting: nothing can be admitted."""
    world = World(blocks=8192, block_size=16, budget=256, max_num_seqs=64, max_chunk_tokens=16)
    for number in range(60):
        world.add(f"d{number}", [number], max_tokens=1000)
    while len(world.scheduler.running) < 60:
        world.submit()
        world.complete()
    for number in range(4):
        world.add(f"begun{number}", [1000 + number] * 400)
    world.submit()
    assert not world.scheduler.free_slots
    for number in range(100):
        world.add(f"w{number}", [5000 + number] * 40)
    plan = world.scheduler.plan(world.now)
    assert plan.admitted == 0
    assert all(chunk.request.request_id.startswith("begun") for chunk in plan.chunks)
    for number in range(4):
        world.abort(f"begun{number}")
    assert world.scheduler.plan(world.now).admitted == 4


def test_a5_with_kv_full_nothing_is_held_and_decoding_goes_on() -> None:
    world = World(blocks=5, **HOLDING)
    world.add("a", list(range(10)), max_tokens=6)
    world.submit()
    world.add("b", list(range(50, 60)))
    plan = world.submit()
    assert plan is not None
    assert not plan.new
    assert len(plan.decode_slots) == 4
    assert world.scheduler.clock.held_since is None
    assert not world.named(PrefillHeld)
    world.run()


def test_a6_the_chunk_cap_is_part_of_the_signal() -> None:
    world = World(blocks=2048, block_size=16, budget=8192, max_chunk_tokens=512, **HOLDING)
    one_decoding(world)
    world.add("long", list(range(16_384)))
    assert world.scheduler.plan(world.now).pending_tokens == 512


def test_a8_a_fully_cached_prompt_is_never_held() -> None:
    for extra in ([], [77]):
        world = World(blocks=64, budget=64, **HOLDING, prefill_decode_interval=50)
        world.add("first", list(range(12)), max_tokens=1)
        world.run()
        one_decoding(world)
        world.add("held", list(range(100, 120)))
        assert world.scheduler.plan(world.now).held
        world.add("again", list(range(12)) + extra)
        plan = world.submit()
        assert plan is not None
        assert len(plan.new) == 1
        assert world.scheduler.requests["again"].state is State.RUNNING
        assert world.scheduler.requests["held"].state is State.READY


def test_a9_a_blocked_request_blocks_only_itself() -> None:
    """The head needs 313 blocks of which 200 are free; 30 small ones stand behind it."""
    world = World(blocks=1200, block_size=16, budget=16_384, max_num_seqs=64, max_bypass_ms=20_000)
    world.add("fills", [1] * (980 * 16), max_tokens=300)
    world.submit()
    world.complete()
    world.add("head", [2] * (312 * 16 + 8))
    small = [f"s{number}" for number in range(10)]
    for number, name in enumerate(small):
        world.add(name, [1000 + number] * 300, max_tokens=4)
    world.submit()
    assert world.scheduler.requests["head"].state is State.BLOCKED
    assert all(world.scheduler.requests[name].state is State.RUNNING for name in small)
    assert len(world.named(RequestBlocked)) == 1


def test_a9_the_head_is_admitted_within_its_bypass_bound() -> None:
    """A stream of small requests that would fit for ever: after the bound they stop passing it."""
    world = World(blocks=320, block_size=16, budget=4096, max_num_seqs=64, max_bypass_ms=20_000)
    for number in range(6):
        world.add(f"s{number}", [number] * 300, max_tokens=10)
    world.submit()
    head = world.add("head", [99] * (300 * 16))
    begin, service, number = world.now, 12.0, 6
    while head.state is not State.RUNNING:
        world.add(f"s{number}", [number] * 300, max_tokens=10)
        number += 1
        world.submit()
        world.complete()
        assert world.now < begin + 20 + service + 5, "passed for longer than its bound and one request's service"
    assert world.named(RequestReserved)[0].blocked_ms == pytest.approx(20_000, abs=1100)
    assert number > 20, "the small ones went on until the bound"
    world.run()


@pytest.mark.parametrize("seed", range(30))
def test_a9_nobody_is_passed_for_ever(seed: int) -> None:
    """Random sizes and a full cache: every blocked request runs within its bound and what runs before it."""
    rng = random.Random(seed)
    world = World(blocks=40, budget=64, max_num_seqs=6, max_bypass_ms=5000)
    blocked: dict[str, float] = {}
    for number in range(150):
        name = f"r{number}"
        world.add(name, [number] * rng.choice([4, 8, 100]), rng.randint(1, 12))
        world.submit()
        if world.results:
            world.complete()
        for request in world.scheduler.requests.values():
            if request.blocked_since >= 0:
                blocked[request.request_id] = world.now - request.blocked_since
    assert max(blocked.values()) < 5 + 150, "starved"
    world.run()


def test_a9_a_priority_goes_before_the_reservation() -> None:
    world = World(blocks=20, budget=64, max_bypass_ms=0)
    world.add("runs", [1] * 40, max_tokens=20)
    world.submit()
    head = world.add("head", [2] * 60)
    world.submit()
    world.expire()
    assert head.reserved
    world.add("small", [3] * 4, max_tokens=1)
    urgent = world.add("urgent", [4] * 4, max_tokens=1, priority=-1)
    world.submit()
    assert urgent.state is State.RUNNING
    assert world.scheduler.requests["small"].state is State.READY
    world.run()


def test_a7_a_discarded_plan_leaves_no_event_and_no_clock() -> None:
    world = World(blocks=64, budget=32, **HOLDING)
    one_decoding(world)
    world.add("a", list(range(20)), sampling=SamplingParams(max_tokens=3, temperature=0.0))
    events, clock = len(world.events), vars(world.scheduler.clock).copy()
    for _ in range(200):
        assert world.scheduler.plan(world.now).held
    assert len(world.events) == events
    assert vars(world.scheduler.clock) == clock
