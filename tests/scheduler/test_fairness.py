"""Who waits for whom, and for how long, in the corners: cached streams, storms, slow producers, long gaps."""

from __future__ import annotations

import pytest
from world import World

from atom_async.events.schema import PrefillHeld, RequestAdmitted, RequestFinished, RequestReleased, StepSubmitted
from atom_async.scheduler.policy import DefaultPolicy, Hold, Pending, StepBound
from atom_async.scheduler.request import State
from atom_async.wire.sampling import SamplingParams


def test_a8_a_stream_of_cached_prompts_does_not_take_every_slot() -> None:
    world = World(blocks=200, max_num_seqs=2, budget=16)
    cached = [1, 2, 3, 4, 5]
    world.add("warm", cached, 2)
    world.run()
    for number in range(2):
        world.add(f"i{number}", cached, 4)
    world.submit()
    big = world.add("big", list(range(100, 112)), 4)
    number = 2
    for _ in range(60):
        while len(world.scheduler.intake.instant) < 2:
            world.add(f"i{number}", cached, 4)
            number += 1
        world.submit()
        if world.results:
            world.complete()
    assert big.admitted_at >= 0
    assert big.admitted_at - big.arrived_at < 15
    assert number > 20


def test_a8_a_cached_prompt_that_was_blocked_is_not_held_afterwards() -> None:
    world = World(
        blocks=12,
        max_num_seqs=6,
        budget=64,
        step_s=0.01,
        coalesce_target_fill=1.0,
        coalesce_quiet_ms=500.0,
        coalesce_max_hold_ms=800.0,
        kv_high_watermark=1.0,
        max_bypass_ms=5000.0,
    )
    world.add("keep", [1, 2, 3, 4, 5], 35)
    world.submit()
    world.complete()
    world.submit()
    world.add("big", list(range(100, 132)), 1)
    world.scheduler.draining = True  # so that it is not held
    world.submit()
    world.scheduler.draining = False
    x = world.add("x", [1, 2, 3, 4, 5], 4)
    world.submit()
    assert x.state is State.BLOCKED
    world.run_until(lambda: x.admitted_at >= 0)
    assert x.admitted_at - x.arrived_at <= 0.05
    assert not [e for e in world.named(PrefillHeld) if e.pending_tokens == 1]
    world.run()


def test_l5_a_storm_of_aborts_places_the_waiters_once() -> None:
    """The leaders of a stampede leave one after the other, in rank order, within one turn."""
    world = World(blocks=256, block_size=16, budget=64, max_num_seqs=8)
    for number in range(60):
        world.add(f"r{number}", [*range(3200), 9000 + number])
    world.submit()
    before = len(world.events)
    for number in range(40):
        world.scheduler.abort(f"r{number}", world.now)
    world.expire()
    said = [type(e).__name__ for e in world.events[before:]]
    assert said.count("RequestAborted") == 40
    assert said.count("RequestReleased") == 59
    assert said.count("RequestParked") == 19
    assert len(said) == 40 + 59 + 19


def test_w4_a_slow_producer_is_waited_for_as_long_as_it_gets_on() -> None:
    world = World(blocks=2000, max_num_seqs=9, budget=64, max_chunk_tokens=8)
    for number in range(9):
        world.add(f"d{number}", [900 + number, 2, 3], 45)
    world.submit()
    before = world.computed
    for number in range(8):
        world.add(f"r{number}", [*range(1, 201), 300 + number], 2)
    world.run()
    assert world.computed - before <= 200 + 8 * 4
    assert {e.outcome for e in world.named(RequestReleased)} == {"prefix_ready"}


def test_w4_a_producer_that_stands_still_is_not() -> None:
    """It has a slot and never gets a chunk."""
    world = World(blocks=200, budget=8)
    world.add("producer", list(range(100)))
    world.submit()
    waiter = world.add("waiter", [*range(80), 7])
    world.submit()
    while waiter.state is State.PARKED:
        world.wait()
        world.expire()
    assert 60 <= world.now <= 61, "one look that sees progress, one that does not"
    assert [e.outcome for e in world.named(RequestReleased)] == ["deadline"]
    world.run()


def test_w8_nobody_waits_for_one_that_computes_everything_again() -> None:
    world = World(blocks=400, max_num_seqs=4, budget=8)
    prefix = list(range(1, 161))
    prompt = prefix + list(range(500, 520))
    world.add("warm", prefix, 1)
    world.run()
    echo = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
    world.add("echo", prompt, sampling=echo)
    x = world.add("x", [*prompt, 7], 1)
    assert x.state is State.READY
    begin = world.now
    world.run()
    assert x.first_token_at - begin <= 6


def test_h4_the_gap_counts_every_prefill_since_the_last_decode() -> None:
    """Also those that are still in flight when the next one is judged."""
    world = World(
        blocks=4000, block_size=16, budget=4096, max_num_seqs=16, step_policy="separate", max_decode_gap_ms=100
    )
    world.scheduler.costs.observe = lambda *_: None  # what the prior predicts is what this machine takes
    world.add("decoding", [1, 2], 300)
    world.submit()
    world.complete()
    for number in range(120):
        world.add(f"p{number}", [number * 1000 + i for i in range((50, 200, 900)[number % 3])], 1)
        while len(world.results) < 2 and world.submit():
            pass
        world.complete()
    gap, gaps = 0.0, []
    for step in world.named(StepSubmitted):
        gap += step.predicted_ms
        if step.decode_requests:
            gaps.append(gap)
            gap = 0.0
    assert max(gaps) <= 100
    assert max(gaps) > 60
    world.run()


def test_whole_prompts_share_a_step_only_as_its_time_allows() -> None:
    world = World(
        blocks=400, budget=600, max_model_len=590, max_num_seqs=8, enable_chunked_prefill=False, itl_target_ms="auto"
    )
    world.add("decoding", [1, 2, 3], 100)
    world.submit()
    world.complete()
    world.scheduler.costs.prefill.coefficients = (10.0, 1000.0, 0.0)
    world.scheduler.costs.decode.coefficients = (8.0, 0.0, 0.0)
    for number in range(3):
        world.add(f"p{number}", [number * 1000 + i for i in range(190)], 1)
    plan = world.scheduler.plan(world.now)
    assert [chunk.length for chunk in plan.chunks] == [190], "the first fits always, another would exceed the bound"
    world.run()


class HoldsInThePast(DefaultPolicy):
    def gate(self, pending: Pending) -> Hold:
        return Hold(pending.now - 1, "quiet")


class NoRoom(DefaultPolicy):
    def bound(self, work: object, backlog_tokens: int) -> StepBound:
        return StepBound(0, 0, 0)


@pytest.mark.parametrize("policy", [HoldsInThePast, NoRoom])
def test_h7_a_policy_that_answers_nonsense_stops_nothing(policy: type) -> None:
    world = World(blocks=64, policy=f"{__name__}:{policy.__name__}")
    world.add("a", list(range(30)), 3)
    world.run()
    assert world.outcomes["a"][-1].finish == "length"


def test_alarms_of_ended_requests_are_not_kept() -> None:
    """One request with an early deadline waits; thousands with later ones come and go."""
    world = World(blocks=64, max_num_seqs=1)
    world.add("runs", [1, 2], 2)
    world.submit()
    world.add("low", [3, 4], deadline_s=1.0, priority=9)
    for number in range(3000):
        world.scheduler.requests.get("runs")
        world.add(f"r{number}", [5], deadline_s=1e6)
        world.abort(f"r{number}")
    assert len(world.scheduler.intake._alarms) < 200
    world.run()
    assert world.outcomes["low"][-1].finish


def test_events_measure_from_when_a_request_was_queued() -> None:
    world = World(blocks=12, max_num_seqs=4, budget=64)
    world.add("a", [1] * 16, 28)
    world.add("b", [2] * 16, 28)
    world.run()
    waits = [e.queue_ms for e in world.named(RequestAdmitted) if e.request_id == "b"]
    preempted = world.outcomes["b"][-1].request.preemptions
    assert len(waits) == 1 + preempted > 1
    assert sum(waits) < 1000 * world.now / 2


def test_a_request_that_ends_without_a_token_has_no_time_to_first_token() -> None:
    world = World(blocks=12, max_num_seqs=1)
    world.add("a", [1] * 6)
    world.now += 4
    world.scheduler.finish("a", world.now)
    (finished,) = world.named(RequestFinished)
    assert (finished.ttft_ms, finished.completion_tokens) == (None, 0)
