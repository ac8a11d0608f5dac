"""Rules of the scheduler, one by one."""

from array import array
from copy import copy

import pytest
from world import World

from atom_async.scheduler.request import State
from atom_async.wire.messages import unpack_ints
from atom_async.wire.sampling import SamplingParams


def tokens_of(plan) -> dict[int, int]:
    return dict(zip(unpack_ints(plan.chunk_slots), unpack_ints(plan.chunk_lengths), strict=True))


def test_one_request_from_arrival_to_last_token() -> None:
    world = World(blocks=8)
    request = world.add("a", list(range(10)), max_tokens=3)
    world.run(depth=1)
    outcomes = world.outcomes["a"]
    assert [o.finish for o in outcomes] == [None, None, "length"]
    assert request.state is State.FINISHED
    assert world.scheduler.pool.owned == 0
    assert "a" not in world.scheduler


def test_a_step_carries_decodes_first_and_then_prompt_chunks_up_to_the_budget() -> None:
    world = World(blocks=64, budget=8)
    world.add("decoding", [1, 2, 3], max_tokens=20)
    world.submit()
    world.complete()
    world.add("long", list(range(100, 120)))
    plan = world.submit()
    assert len(unpack_ints(plan.decode_slots)) == 1
    assert list(tokens_of(plan).values()) == [7]


def test_two_steps_in_flight_feed_the_second_from_the_first() -> None:
    world = World(blocks=8)
    world.add("a", [5, 6, 7], max_tokens=4)
    first, second = world.submit(), world.submit()
    assert unpack_ints(second.decode_slots) == unpack_ints(first.chunk_slots)
    assert world.submit() is not None  # a third is allowed by the core; depth is the engine's
    world.run()
    assert len(world.output("a")) == 4


def test_never_samples_beyond_the_limit_with_steps_in_flight() -> None:
    world = World(blocks=8)
    world.add("a", [5, 6, 7], max_tokens=1)
    world.submit()
    assert world.submit() is None


def test_an_end_token_ends_and_the_step_in_flight_is_void() -> None:
    world = World(blocks=16, end_token_probability=0.5)
    sampling = SamplingParams(max_tokens=40, min_tokens=2, temperature=0.0, end_token_ids=(7, 8))
    world.add("a", [1, 2, 3], sampling=sampling)
    world.run(depth=2)
    last = world.outcomes["a"][-1]
    assert (last.finish, last.stop_token_id) == ("stop", 7)
    assert world.output("a")[-1] == 7
    assert 3 <= len(world.output("a")) < 40


def test_max_tokens_zero_computes_the_prompt_and_nothing_else() -> None:
    world = World(blocks=8)
    world.add("a", [1, 2, 3], sampling=SamplingParams(max_tokens=0, temperature=0.0))
    world.run()
    (outcome,) = world.outcomes["a"]
    assert (outcome.token_id, outcome.finish) == (None, "length")


def test_a_cached_prefix_is_not_computed_again() -> None:
    world = World(blocks=16)
    world.add("a", list(range(11)))
    world.run()
    before = world.computed
    request = world.add("b", [*range(8), 50, 51])
    world.run()
    assert request.cached_tokens == 8
    assert world.computed - before == 2


def test_a8_a_fully_cached_prompt_computes_one_token() -> None:
    world = World(blocks=16)
    world.add("a", list(range(12)))
    world.run()
    before = world.computed
    request = world.add("b", list(range(12)))
    plan = world.submit()
    assert plan.new[0].present_tokens == 12
    assert world.computed - before == 1
    assert request.cached_tokens == 11
    world.run()
    assert world.output("b") == world.output("a")


def test_w1_a_prefix_in_production_is_shared_inside_the_step() -> None:
    """8 prompts with 4,096 shared and 8 own tokens at once, against the ideal plus a block each."""
    world = World(blocks=1024, block_size=16, budget=16_384)
    shared = list(range(4096))
    for number in range(8):
        world.add(f"r{number}", shared + [5000 + 10 * number + i for i in range(8)])
    world.submit()
    assert world.computed <= 4160 + 8 * 16
    world.run()


def test_w11_salts_share_nothing() -> None:
    world = World(blocks=32)
    world.add("a", list(range(12)), salt="x")
    world.add("b", list(range(12)), salt="y")
    world.run()
    assert world.computed == 24


def test_prompt_logprobs_compute_the_whole_prompt() -> None:
    world = World(blocks=32)
    world.add("a", list(range(12)))
    world.run()
    before = world.computed
    sampling = SamplingParams(max_tokens=2, temperature=0.0, prompt_logprobs=1)
    world.add("b", list(range(12)), sampling=sampling)
    world.run()
    assert world.computed - before == 12


def test_without_prefix_caching_nothing_is_reused() -> None:
    world = World(blocks=32, prefix_caching=False)
    for name in ("a", "b"):
        world.add(name, list(range(12)))
        world.run()
    assert world.computed == 24
    assert world.scheduler.pool.cached == 0


def test_priority_then_arrival_decide_who_enters_first() -> None:
    world = World(blocks=64, max_num_seqs=1, budget=16)
    world.add("late", [1] * 5, max_tokens=1, priority=1)
    world.add("first", [2] * 5, max_tokens=1)
    world.add("second", [3] * 5, max_tokens=1)
    order: list[str] = []
    while world.scheduler.requests:
        world.submit()
        order += [o.request.request_id for o in world.complete()]
    assert order == ["first", "second", "late"]


def test_preemption_takes_the_lowest_rank_and_keeps_its_place() -> None:
    world = World(blocks=6, max_num_seqs=4)
    world.add("old", [1] * 7, max_tokens=12)
    world.add("new", [2] * 7, max_tokens=12)
    world.run()
    assert world.scheduler.counters.preemptions > 0
    assert [o.request.preemptions for o in world.outcomes["old"][-1:]] == [0]
    assert len(world.output("new")) == len(world.output("old")) == 12


def test_preemption_takes_lower_priority_before_later_arrival() -> None:
    world = World(blocks=6, max_num_seqs=4)
    world.add("batch", [1] * 7, max_tokens=12, priority=5)
    world.add("urgent", [2] * 7, max_tokens=12, priority=0)
    world.run()
    assert world.outcomes["urgent"][-1].request.preemptions == 0
    assert world.outcomes["batch"][-1].request.preemptions > 0


def test_l1_an_abort_frees_memory_in_the_same_turn_in_every_state() -> None:
    world = World(blocks=16, max_num_seqs=1)
    world.add("running", list(range(10)), max_tokens=9)
    world.add("waiting", list(range(20, 30)), max_tokens=9)
    world.submit()
    world.submit()
    world.abort("waiting")
    world.abort("running")
    assert world.scheduler.pool.owned == 0
    assert not world.scheduler.requests
    world.run()
    assert world.outcomes == {"running": [], "waiting": []}
    assert world.scheduler.abort("running", world.now) is None


def test_l2_an_abort_in_mid_prefill_computes_at_most_the_steps_in_flight() -> None:
    world = World(blocks=64, budget=16)
    world.add("long", list(range(200)))
    world.submit()
    world.abort("long")
    assert world.submit() is None
    assert world.computed == 16


def test_l3_an_abort_after_a_preemption_ends_aborted() -> None:
    world = World(blocks=6, max_num_seqs=4)
    world.add("old", [1] * 7, max_tokens=12)
    victim = world.add("new", [2] * 7, max_tokens=12)
    while not victim.preemptions:
        world.submit()
        world.complete()
    world.abort("new")
    assert victim.state is State.ABORTED
    world.run()


def test_a7_planning_has_no_side_effects() -> None:
    world = World(blocks=12, max_num_seqs=4)
    world.add("a", list(range(9)), max_tokens=12)
    world.add("b", [*range(8), 77], max_tokens=12)
    world.submit()
    world.add("c", [*range(8), 99])

    def facts() -> tuple:
        pool = world.scheduler.pool
        return (
            list(pool.references),
            list(pool.hashes),
            list(pool.writer),
            pool.available,
            vars_of(world.scheduler.counters),
            [(r.request_id, r.computed, list(r.blocks), r.state) for r in world.scheduler.requests.values()],
        )

    before = facts()
    plans = [world.scheduler.plan(world.now) for _ in range(200)]
    assert facts() == before
    assert len({(p.prefill_tokens, p.admitted, len(p.decodes)) for p in plans}) == 1


def vars_of(counters) -> dict[str, object]:
    return {name: copy(getattr(counters, name)) for name in counters.__slots__}


def test_a5_a_full_cache_admits_nobody_and_decoding_goes_on() -> None:
    world = World(blocks=5, max_num_seqs=4)
    world.add("a", list(range(10)), max_tokens=6)
    world.submit()
    world.add("b", list(range(50, 60)))
    plan = world.submit()
    assert not plan.new
    assert len(unpack_ints(plan.decode_slots)) == 1
    world.run()


def test_a_failed_row_ends_its_request_alone() -> None:
    world = World(blocks=16)
    a = world.add("a", [1, 2, 3], max_tokens=5)
    world.add("b", [4, 5, 6], max_tokens=5)
    world.submit()
    result = world.results[0]
    slots, tokens = unpack_ints(result.slots), unpack_ints(result.tokens)
    keep = [i for i, slot in enumerate(slots) if slot != a.slot]
    world.results[0] = type(result)(
        step_id=result.step_id,
        slots=array("i", [slots[i] for i in keep]).tobytes(),
        tokens=array("i", [tokens[i] for i in keep]).tobytes(),
        ended=b"",
        timings=result.timings,
        failed=[(a.slot, "the grammar has no way on")],
    )
    world.complete()
    assert a.state is State.FAILED
    assert world.outcomes["a"][0].error == "the grammar has no way on"
    world.run()
    assert len(world.output("b")) == 5


def test_a_plan_stays_below_the_message_limit() -> None:
    world = World(blocks=512, budget=512, max_plan_bytes=2400)
    for number in range(6):
        world.add(f"r{number}", [number] * 100)
    world.submit()
    assert len(world.plans[0].new) == 2
    world.run()


def test_large_sampling_parameters_are_spread_over_steps() -> None:
    """Ten requests, each with logit_bias and history of some kilobytes, in messages of ten."""
    world = World(blocks=512, budget=64, max_plan_bytes=10_000, max_num_seqs=16)
    bias = tuple((token, 1.0) for token in range(150))
    sampling = SamplingParams(max_tokens=3, temperature=0.0, logit_bias=bias, repetition_penalty=1.1)
    for number in range(10):
        world.add(f"r{number}", [*list(range(200)), 500 + number], sampling=sampling)
    world.run()
    assert max(len(plan.new) for plan in world.plans) <= 3
    assert all(len(world.output(f"r{number}")) == 3 for number in range(10))


def test_a_budget_below_the_sequences_is_refused() -> None:
    with pytest.raises(ValueError, match="at least --max-num-seqs"):
        World(blocks=4, budget=4, max_num_seqs=8)
