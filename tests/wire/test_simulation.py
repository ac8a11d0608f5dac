"""The simulated model must notice what a real one would get wrong."""

import pytest

from atom_async.wire.messages import NewSequence, StepPlan, pack_ints, unpack_ints
from atom_async.wire.sampling import SamplingParams
from atom_async.wire.simulation import PlanError, SimulatedModel, SimulationOptions, expected_tokens, parse_options

GREEDY = SamplingParams(max_tokens=9, temperature=0.0)
OPTIONS = SimulationOptions(vocab_size=500)


def make_model(**options) -> SimulatedModel:
    return SimulatedModel(
        SimulationOptions(**{"vocab_size": 500} | options), block_size=4, max_num_seqs=2, num_blocks=8
    )


def plan(step_id=1, *, finished=(), new=(), grown=(), decodes=(), chunks=(), tokens=None) -> StepPlan:
    """`chunks` are (slot, start, token ids); `grown` are (slot, block)."""
    sent = [t for _, _, ids in chunks for t in ids] if tokens is None else tokens
    return StepPlan(
        step_id=step_id,
        finished=pack_ints(finished),
        new=list(new),
        grown_slots=pack_ints(s for s, _ in grown),
        grown_blocks=pack_ints(b for _, b in grown),
        decode_slots=pack_ints(decodes),
        chunk_slots=pack_ints(s for s, _, _ in chunks),
        chunk_starts=pack_ints(s for _, s, _ in chunks),
        chunk_lengths=pack_ints(len(ids) for _, _, ids in chunks),
        chunk_tokens=pack_ints(sent),
    )


def sequence(slot=0, total=5, *, present=0, blocks=(0, 1), prompt_len=None) -> NewSequence:
    return NewSequence(slot, prompt_len or total, total, present, pack_ints(blocks), b"", GREEDY)


def test_chunks_and_decodes_give_the_closed_form() -> None:
    model, prompt = make_model(), [1, 2, 3, 4, 5]
    first = model.apply(plan(new=[sequence()], chunks=[(0, 0, [1, 2, 3])]))
    assert not first.slots
    output = [unpack_ints(model.apply(plan(2, chunks=[(0, 3, [4, 5])])).tokens)[0]]
    output += [unpack_ints(model.apply(plan(3 + n, decodes=[0])).tokens)[0] for n in range(3)]
    assert output == expected_tokens(prompt, GREEDY, 4, OPTIONS)


def test_a_block_of_the_wrong_contents_changes_the_tokens() -> None:
    model = make_model()
    model.apply(plan(new=[sequence(total=4, blocks=(0,))], chunks=[(0, 0, [9, 9, 9, 9])]))
    result = model.apply(plan(2, new=[sequence(1, total=5, present=4, blocks=(0, 1))], chunks=[(1, 4, [5])]))
    assert list(unpack_ints(result.tokens)) != expected_tokens([1, 2, 3, 4, 5], GREEDY, 1, OPTIONS)
    assert list(unpack_ints(result.tokens)) == expected_tokens([9, 9, 9, 9, 5], GREEDY, 1, OPTIONS)


def test_a_consumer_may_ride_in_the_step_of_its_producer() -> None:
    model = make_model()
    news = [sequence(0, 6, blocks=(0, 1)), sequence(1, 5, present=4, blocks=(0, 2))]
    result = model.apply(plan(new=news, chunks=[(0, 0, [1, 2, 3, 4, 5, 6]), (1, 4, [7])]))
    assert list(unpack_ints(result.tokens)) == [
        *expected_tokens([1, 2, 3, 4, 5, 6], GREEDY, 1, OPTIONS),
        *expected_tokens([1, 2, 3, 4, 7], GREEDY, 1, OPTIONS),
    ]


def test_a_prompt_that_is_all_there_computes_one_token_and_writes_none() -> None:
    model = make_model()
    model.apply(plan(new=[sequence(total=4, blocks=(0,))], chunks=[(0, 0, [1, 2, 3, 4])]))
    result = model.apply(plan(2, new=[sequence(1, 4, present=4, blocks=(0,))], chunks=[(1, 3, [4])]))
    assert list(unpack_ints(result.tokens)) == expected_tokens([1, 2, 3, 4], GREEDY, 1, OPTIONS)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (plan(2), "step 2 after step 0"),
        (plan(decodes=[0]), "slot 0 holds no sequence"),
        (plan(finished=[1]), "slot 1 finished, but"),
        (plan(new=[sequence(), sequence()]), "before it was finished"),
        (plan(new=[sequence(5)]), r"outside \[0, 2\)"),
        (plan(new=[sequence(present=9)]), "present without blocks"),
        (plan(grown=[(0, 99)]), "outside"),
        (plan(new=[sequence()], decodes=[0]), "decodes before"),
        (plan(new=[sequence()], chunks=[(0, 1, [2])]), "first chunk at 1"),
        (plan(new=[sequence()], chunks=[(0, 0, [1, 2, 3, 4, 5, 6])]), "beyond 5 known"),
        (plan(new=[sequence(blocks=(0,))], chunks=[(0, 0, [1, 2, 3, 4, 5])]), "beyond its 1 blocks"),
        (plan(new=[sequence(present=4)], chunks=[(0, 4, [5])]), "is read from|read from block"),
        (plan(new=[sequence()], chunks=[(0, 0, [1])], tokens=[1, 2]), "2 chunk tokens sent, 1 described"),
        (plan(new=[sequence()], chunks=[(0, 0, [1, 2])], tokens=[1]), "came with 1"),
    ],
)
def test_a_wrong_plan_is_refused(bad: StepPlan, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        make_model().apply(bad)


def test_a_chunk_that_does_not_continue_is_refused() -> None:
    model = make_model()
    model.apply(plan(new=[sequence()], chunks=[(0, 0, [1, 2])]))
    with pytest.raises(PlanError, match="stands at 2"):
        model.apply(plan(2, chunks=[(0, 3, [4])]))


def test_durations_follow_the_published_form() -> None:
    model = make_model(
        decode_fixed_ms=5,
        prefill_fixed_ms=50,
        prefill_ms_per_ktoken=100,
        prefill_ms_per_gpair=1e9,
        decode_ms_per_sequence=2,
        decode_ms_per_mtoken=1e6,
        experts_ms=8,
        experts_total=4,
        experts_active=2,
    )
    prefill = plan(new=[sequence(total=5)], chunks=[(0, 0, [1, 2, 3, 4, 5])])
    assert model.duration_s(prefill) == pytest.approx((50 + 0.5 + 5 * 2.5) / 1e3)
    model.apply(prefill)
    assert model.duration_s(plan(2, decodes=[0])) == pytest.approx((5 + 2 + 5 + 8 * 0.5) / 1e3)


def test_temperature_follows_the_seed_and_greedy_does_not() -> None:
    prompts = [1, 2, 3]
    warm = [SamplingParams(max_tokens=9, temperature=1.0, seed=seed) for seed in (1, 1, 2)]
    a, b, c = (expected_tokens(prompts, s, 8, OPTIONS) for s in warm)
    assert a == b != c
    greedy = [SamplingParams(max_tokens=9, temperature=0.0, seed=seed) for seed in (1, 2)]
    assert expected_tokens(prompts, greedy[0], 8, OPTIONS) == expected_tokens(prompts, greedy[1], 8, OPTIONS)


def test_end_tokens_come_only_when_asked_for_and_after_min_tokens() -> None:
    sampling = SamplingParams(max_tokens=9, temperature=0.0, min_tokens=3, end_token_ids=tuple(range(250)))
    assert not set(expected_tokens([1], sampling, 50, OPTIONS)) & set(range(250))
    always = SimulationOptions(vocab_size=500, end_token_probability=1.0)
    output = expected_tokens([1], sampling, 5, always)
    assert output[3:] == [0, 0]
    assert not set(output[:3]) & set(range(250))


def test_unknown_options_are_named() -> None:
    with pytest.raises(ValueError, match=r"--simulation: .*`nonsense`"):
        parse_options('{"nonsense": 1}')
