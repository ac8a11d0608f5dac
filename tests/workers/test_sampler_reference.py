"""Every parameter and any combination of them, against the float64 reference."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from sampling_reference import adjusted, kept, possible_tokens, uniform

from atom_async.wire.messages import NewSequence, pack_ints
from atom_async.wire.sampling import SamplingParams
from workers.sampler import Sampler
from workers.sampling.draws import uniforms
from workers.sampling.truncation import least_weights

SMALL, LARGE = 37, 1300
"""Less than one run of the inverse CDF; more than two, and more than truncation's first look."""


@st.composite
def params(draw: st.DrawFn, vocab: int) -> dict[str, Any]:
    tokens = st.integers(0, vocab - 1)

    def maybe(values: st.SearchStrategy[Any], default: Any) -> Any:
        return draw(st.one_of(st.just(default), values))

    return {
        "temperature": draw(st.sampled_from([0.0, 0.3, 0.7, 1.0, 1.5])),
        "top_k": maybe(st.integers(1, vocab + 3), 0),
        "top_p": maybe(st.floats(0.01, 0.999), 1.0),
        "min_p": maybe(st.floats(0.001, 1.0), 0.0),
        "presence_penalty": maybe(st.floats(-2, 2), 0.0),
        "frequency_penalty": maybe(st.floats(-2, 2), 0.0),
        "repetition_penalty": maybe(st.floats(0.5, 2), 1.0),
        "logit_bias": tuple(draw(st.dictionaries(tokens, st.floats(-100, 100), max_size=4)).items()),
        "min_tokens": draw(st.integers(0, 6)),
        "end_token_ids": tuple(draw(st.lists(tokens, max_size=3, unique=True))),
        "seed": draw(st.integers(-(2**63), 2**64 - 1)),
    }


@st.composite
def cases(draw: st.DrawFn) -> tuple[np.ndarray, list[SamplingParams], list[list[int]], list[list[int]]]:
    """Logits [n, V], and for each row its settings, prompt and output."""
    vocab = draw(st.sampled_from([SMALL, LARGE]))
    count = draw(st.integers(1, 5))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    logits = rng.normal(scale=draw(st.sampled_from([0.5, 3.0])), size=(count, vocab)).astype(np.float32)
    if draw(st.booleans()):
        logits = np.round(logits * 2) / 2  # many ties
    rows = [SamplingParams(max_tokens=100, **draw(params(vocab))) for _ in range(count)]
    texts = [[rng.integers(vocab, size=rng.integers(1, 12)).tolist() for _ in range(count)] for _ in range(2)]
    return logits, rows, texts[0], texts[1]


def sampler_with(rows: list[SamplingParams], prompts: list[list[int]], outputs: list[list[int]], vocab: int) -> Sampler:
    """Each sequence resumes after `outputs`, half of what is known told at once and half in a chunk."""
    sampler = Sampler(vocab_size=vocab, max_num_seqs=len(rows), device=torch.device("cpu"), grammar=None)
    for slot, (sampling, prompt, output) in enumerate(zip(rows, prompts, outputs, strict=True)):
        tokens = prompt + output
        cut = len(tokens) // 2 if sampling.needs_history else 0
        sampler.add(NewSequence(slot, len(prompt), len(tokens), cut, b"", pack_ints(tokens[:cut]), sampling))
        if sampling.needs_history:
            sampler.observe(slot, np.array(tokens[cut:], dtype=np.int32), cut)
    return sampler


@settings(max_examples=250, deadline=None)
@given(cases())
def test_every_parameter_against_the_reference(
    case: tuple[np.ndarray, list[SamplingParams], list[list[int]], list[list[int]]],
) -> None:
    logits, rows, prompts, outputs = case
    sampler = sampler_with(rows, prompts, outputs, logits.shape[1])
    positions = [len(output) for output in outputs]
    changed = torch.from_numpy(logits.copy())
    result = sampler.sample(changed, range(len(rows)), positions)
    assert result.failed == []
    assert result.tokens.tolist() == result.token_ids
    decided = 0
    for i, sampling in enumerate(rows):
        row = adjusted(logits[i], sampling, prompts[i], outputs[i])
        np.testing.assert_allclose(changed[i].numpy(), row, rtol=1e-5, atol=1e-5)
        expected = possible_tokens(row, sampling, positions[i])
        if expected is not None:
            decided += 1
            assert result.token_ids[i] in expected, (i, sampling)
    assume(decided)


@settings(max_examples=300, deadline=None)
@given(cases())
def test_truncation_keeps_what_the_reference_keeps(
    case: tuple[np.ndarray, list[SamplingParams], list[list[int]], list[list[int]]],
) -> None:
    logits, rows, _, _ = case
    drawn = [i for i, sampling in enumerate(rows) if sampling.temperature > 0]
    assume(drawn)
    temperatures = torch.tensor([[rows[i].temperature] for i in drawn])
    chosen = torch.from_numpy(logits[drawn])
    weights = ((chosen - chosen.amax(1, keepdim=True)) / temperatures).exp()
    least = least_weights(
        weights,
        weights.double().sum(1),
        torch.tensor([rows[i].top_k for i in drawn]),
        torch.tensor([rows[i].top_p for i in drawn], dtype=torch.float64),
        torch.tensor([rows[i].min_p for i in drawn], dtype=torch.float64),
    )
    got = (weights >= least[:, None]).numpy()
    for row, i in zip(got, drawn, strict=True):
        exact = logits[i].astype(np.float64)
        surely, perhaps = kept(exact, rows[i], -3e-6), kept(exact, rows[i], 3e-6)
        assert (surely <= row).all()
        assert (row <= perhaps).all()


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2**64 - 1), st.integers(0, 2**31 - 1)), min_size=1, max_size=20))
def test_uniforms_against_integers(pairs: list[tuple[int, int]]) -> None:
    got = uniforms(np.array([s for s, _ in pairs], dtype=np.uint64), np.array([p for _, p in pairs]))
    assert got.tolist() == [uniform(seed, position) for seed, position in pairs]


@pytest.mark.parametrize("seed", [0, 1])
def test_splitmix64_has_its_published_constants(seed: int) -> None:
    """First outputs of the published generator from seeds 0 and 1."""
    from sampling_reference import GOLDEN, splitmix64

    known = {0: 0xE220A8397B1DCDAF, 1: 0x910A2DEC89025CC1}
    assert splitmix64((seed + GOLDEN) & (2**64 - 1)) == known[seed]
