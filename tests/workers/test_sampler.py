"""The sampler's life with its slots: batches, preemption, failures, log-probabilities."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

VOCAB = 700
NOTHING_LEFT = "no token is left: the model, the grammar, min_tokens and logit_bias together exclude every one"
Make = Callable[..., Any]

SETTINGS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"seed": 1},
    {"seed": 2, "top_p": 0.9},
    {"seed": 3, "top_k": 20, "top_p": 0.8, "logprobs": 2},
    {"seed": 4, "min_p": 0.1, "temperature": 1.3},
    {"seed": 5, "presence_penalty": 1.0, "frequency_penalty": 0.3},
    {"seed": 6, "repetition_penalty": 1.4, "logit_bias": ((3, 5.0), (4, -100.0))},
    {"seed": 7, "min_tokens": 3, "end_token_ids": (0, 1, 2), "frequency_penalty": -0.5},
    {"temperature": 0.0, "repetition_penalty": 1.2, "logprobs": 0},
]
"""What the slots of these tests ask for."""


def logits_for(slot: int, position: int, tokens: list[int]) -> torch.Tensor:
    """A toy model: a row that depends on the sequence alone."""
    rng = np.random.default_rng([slot, position, *tokens[-3:]])
    return torch.from_numpy(rng.normal(scale=3, size=VOCAB).astype(np.float32))


def step(sampler: Any, tokens: dict[int, list[int]], prompt_len: int) -> Any:
    """Samples one token for each sequence in the order given, and appends it."""
    slots = list(tokens)
    positions = [len(tokens[slot]) - prompt_len for slot in slots]
    rows = [logits_for(slot, position, tokens[slot]) for slot, position in zip(slots, positions, strict=True)]
    result = sampler.sample(torch.stack(rows), slots, positions)
    for slot, token in zip(slots, result.token_ids, strict=True):
        tokens[slot].append(token)
    return result


def enter(sampler: Any, new_sequence: Make, slot: int, tokens: list[int], prompt_len: int, cut: int) -> None:
    """Admits a sequence with `cut` of its tokens as history and the rest in one chunk."""
    sequence = new_sequence(slot, prompt_len=prompt_len, total_len=len(tokens), history=tokens[:cut], **SETTINGS[slot])
    if not sequence.sampling.needs_history:
        sequence = new_sequence(slot, prompt_len=prompt_len, total_len=len(tokens), **SETTINGS[slot])
    sampler.add(sequence)
    if sequence.sampling.needs_history:
        sampler.observe(slot, np.array(tokens[cut:], dtype=np.int32), cut)


def run_alone(new_sampler: Make, new_sequence: Make, slot: int, prompt: list[int], steps: int) -> list[int]:
    sampler = new_sampler(VOCAB)
    tokens = {slot: list(prompt)}
    enter(sampler, new_sequence, slot, prompt, len(prompt), 0)
    for _ in range(steps):
        step(sampler, tokens, len(prompt))
    return tokens[slot]


@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_same_tokens_in_any_batch(data: st.DataObject, new_sampler: Make, new_sequence: Make) -> None:
    """Sequences come, pause and are preempted at random; each gives the tokens that it gives alone."""
    prompt, steps = [9, 8, 9], 8
    slots = list(range(len(SETTINGS)))
    sampler = new_sampler(VOCAB)
    tokens = {slot: list(prompt) for slot in slots}
    for slot in slots:
        enter(sampler, new_sequence, slot, prompt, len(prompt), 0)
    while unfinished := [slot for slot in slots if len(tokens[slot]) < len(prompt) + steps]:
        chosen = data.draw(st.lists(st.sampled_from(unfinished), min_size=1, unique=True))
        step(sampler, {slot: tokens[slot] for slot in chosen}, len(prompt))
        for slot in data.draw(st.lists(st.sampled_from(slots), max_size=2, unique=True)):
            sampler.remove(slot)
            cut = data.draw(st.integers(0, len(tokens[slot]) - 1))
            enter(sampler, new_sequence, slot, tokens[slot], len(prompt), cut)
    for slot in slots:
        assert tokens[slot] == run_alone(new_sampler, new_sequence, slot, prompt, steps), SETTINGS[slot]


def test_a_slot_forgets_its_former_sequence(new_sampler: Make, new_sequence: Make) -> None:
    sampler = new_sampler(VOCAB)
    sampler.add(
        new_sequence(0, history=[5] * 50, prompt_len=1, frequency_penalty=2.0, repetition_penalty=2.0, logprobs=3,
                     logit_bias=((5, -100.0),), min_tokens=9, end_token_ids=(5,), temperature=0.0)
    )  # fmt: skip
    sampler.remove(0)
    sampler.add(new_sequence(0, temperature=0.0))
    logits = torch.zeros(1, VOCAB)
    logits[0, 5] = 1
    result = sampler.sample(logits, [0], [0])
    assert (result.token_ids, result.logprobs) == ([5], [])


def test_many_penalised_slots_keep_apart(new_sampler: Make, new_sequence: Make) -> None:
    """More slots than the first allocation of counts has rows."""
    sampler = new_sampler(VOCAB)
    for slot in range(16):
        sampler.add(new_sequence(slot, prompt_len=1, history=[1, slot + 10], temperature=0.0, frequency_penalty=2.0))
    logits = torch.zeros(16, VOCAB)
    logits[:, 10:26] = 1
    result = sampler.sample(logits, range(16), [1] * 16)
    assert result.token_ids == [11 if slot == 0 else 10 for slot in range(16)]


@pytest.mark.parametrize("vocab", [40, VOCAB])
@pytest.mark.parametrize("k", [1, 2, 20])
def test_equal_logits_take_the_lowest_id(k: int, vocab: int, new_sampler: Make, new_sequence: Make) -> None:
    """Also in the list of the most likely, when more share the first place than it names."""
    sampler = new_sampler(vocab)
    sampler.add(new_sequence(0, temperature=0.0, logprobs=k))
    for seed in range(10):
        equal = np.random.default_rng(seed).permutation(vocab)[:30]
        logits = torch.zeros(1, vocab)
        logits[0, torch.from_numpy(equal)] = 2
        result = sampler.sample(logits, [0], [0])
        assert result.token_ids == [equal.min()]
        (logprobs,) = result.logprobs
        assert logprobs.top_ids[0][0] == equal.min()
        assert len(set(logprobs.top_ids[0])) == k
        assert set(logprobs.top_ids[0]) <= set(equal.tolist())
        assert logprobs.ranks == [1]


class TestMinTokens:
    def test_masks_until_the_position_is_reached(self, new_sampler: Make, new_sequence: Make) -> None:
        sampler = new_sampler(VOCAB)
        sampler.add(new_sequence(0, temperature=0.0, min_tokens=2, end_token_ids=(7, VOCAB + 5)))
        logits = torch.zeros(1, VOCAB)
        logits[0, 7], logits[0, 8] = 2, 1
        drawn = [sampler.sample(logits.clone(), [0], [position]).token_ids[0] for position in range(4)]
        assert drawn == [8, 8, 7, 7]

    def test_says_so_when_nothing_remains(self, new_sampler: Make, new_sequence: Make) -> None:
        sampler = new_sampler(4)
        sampler.add(new_sequence(0, min_tokens=2, end_token_ids=(0, 1, 2, 3)))
        result = sampler.sample(torch.zeros(1, 4), [0], [0])
        assert result.failed == [(0, NOTHING_LEFT)]


@pytest.mark.parametrize(
    ("where", "value", "message"),
    [
        (5, torch.nan, "the model produced NaN logits"),
        (slice(None), torch.nan, "the model produced NaN logits"),
        (5, torch.inf, "the model produced infinite logits"),
        (slice(None), -torch.inf, NOTHING_LEFT),
    ],
    ids=["a NaN", "all NaN", "an infinity", "nothing"],
)
def test_a_bad_row_fails_alone(where: Any, value: float, message: str, new_sampler: Make, new_sequence: Make) -> None:
    sound = new_sampler(VOCAB)
    broken = new_sampler(VOCAB)
    rows = {slot: SETTINGS[slot] for slot in range(len(SETTINGS))}
    logits = torch.randn(len(rows), VOCAB, generator=torch.Generator().manual_seed(1))
    for sampler in (sound, broken):
        for slot in rows:
            enter(sampler, new_sequence, slot, [9], 1, 0)
    expected = sound.sample(logits.clone(), list(rows), [0] * len(rows))
    for failing in rows:
        spoilt = logits.clone()
        spoilt[failing, where] = value
        for slot in rows:
            enter(broken, new_sequence, slot, [9], 1, 0)
        result = broken.sample(spoilt, list(rows), [0] * len(rows))
        assert result.failed == [(failing, message)]
        assert result.token_ids[failing] == 0
        assert result.tokens.tolist() == result.token_ids
        others = [slot for slot in rows if slot != failing]
        assert [result.token_ids[i] for i in others] == [expected.token_ids[i] for i in others]
        assert [one.slot for one in result.logprobs] == [s for s in others if SETTINGS[s].get("logprobs", -1) >= 0]


def test_an_impossible_bias_fails_alone(new_sampler: Make, new_sequence: Make) -> None:
    sampler = new_sampler(VOCAB)
    sampler.add(new_sequence(0, logit_bias=((VOCAB, 1.0),)))
    sampler.add(new_sequence(1, temperature=0.0))
    logits = torch.zeros(2, VOCAB)
    logits[:, 3] = 1
    result = sampler.sample(logits, [0, 1], [0, 0])
    assert result.token_ids[1] == 3
    assert result.failed == [(0, f"logit_bias names token {VOCAB}; the vocabulary has ids 0 to {VOCAB - 1}")]


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32), k=st.integers(0, 8), ties=st.booleans())
def test_logprobs_are_of_the_raw_distribution(
    seed: int, k: int, ties: bool, new_sampler: Make, new_sequence: Make
) -> None:
    rng = np.random.default_rng(seed)
    row = rng.normal(scale=4, size=VOCAB).astype(np.float32)
    if ties:
        row = np.round(row)
    sampler = new_sampler(VOCAB)
    sampler.add(
        new_sequence(
            0, seed=seed, logprobs=k, prompt_logprobs=k, temperature=1.7, top_k=9, logit_bias=((3, 50.0),),
            repetition_penalty=1.5, history=[3], prompt_len=1,
        )
    )  # fmt: skip
    sampler.add(new_sequence(1, temperature=0.0, logprobs=1))
    result = sampler.sample(torch.from_numpy(np.stack((row, row))), [0, 1], [4, 0])
    exact = row.astype(np.float64)
    exact -= np.log(np.exp(exact - exact.max()).sum()) + exact.max()
    order = np.lexsort((np.arange(VOCAB), -row))
    logprobs, greedy = result.logprobs
    again = sampler.prompt_logprobs(0, 6, torch.from_numpy(np.stack((row, row))), np.array([3, 5], dtype=np.int32))
    assert (logprobs.slot, logprobs.start, logprobs.ids) == (0, 4, [result.token_ids[0]])
    assert (again.slot, again.start, again.ids) == (0, 6, [3, 5])
    for one in (logprobs, again):
        for i, token in enumerate(one.ids):
            assert one.logprobs[i] == pytest.approx(exact[token], abs=1e-4)
            assert one.ranks[i] == 1 + (row > row[token]).sum()
            assert row[one.top_ids[i]].tolist() == row[order[:k]].tolist()
            assert one.top_logprobs[i] == pytest.approx(exact[order[:k]].tolist(), abs=1e-4)
    assert greedy.top_ids == [[int(order[0])]]


def test_a_long_prompt_is_described_in_pieces(new_sampler: Make, new_sequence: Make) -> None:
    sampler = new_sampler(64)
    sampler.add(new_sequence(0, prompt_logprobs=2))
    logits = torch.randn(600, 64, generator=torch.Generator().manual_seed(2))
    ids = np.arange(600, dtype=np.int32) % 64
    whole = sampler.prompt_logprobs(0, 1, logits, ids)
    assert whole.logprobs == pytest.approx(
        logits.log_softmax(-1).gather(1, torch.from_numpy(ids).long()[:, None]).squeeze(1).tolist(), abs=1e-5
    )
    assert [len(whole.ranks), len(whole.top_ids), len(whole.top_logprobs)] == [600] * 3


def test_the_batch_may_be_empty(new_sampler: Make) -> None:
    result = new_sampler(VOCAB).sample(torch.zeros(0, VOCAB), [], [])
    assert (result.token_ids, result.failed, result.ended, result.logprobs) == ([], [], [], [])
    assert result.tokens.shape == (0,)
