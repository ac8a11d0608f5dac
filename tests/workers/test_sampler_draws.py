"""The draw itself: its distribution, its independence of the batch, and that nothing cut is ever drawn."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from workers.sampling.draws import _invert, chunk_sums, draw, uniforms
from workers.sampling.truncation import least_weights

DRAWS = 20_000


def draw_many(weights: torch.Tensor, uniform: np.ndarray) -> np.ndarray:
    rows = weights.expand(len(uniform), -1)
    return draw(rows, chunk_sums(rows), torch.from_numpy(uniform)).numpy()


@pytest.mark.parametrize("vocab", [7, 512, 1100])
@pytest.mark.parametrize("by", ["position", "seed"])
def test_draws_follow_the_distribution(vocab: int, by: str) -> None:
    """Pearson's chi-square with fixed seeds: deterministic, and far inside the bound when it passes."""
    weights = torch.from_numpy(np.random.default_rng(3).gamma(0.5, size=(1, vocab)).astype(np.float32))
    running, fixed = np.arange(DRAWS, dtype=np.uint64), np.full(DRAWS, 11, dtype=np.uint64)
    uniform = uniforms(running, fixed) if by == "seed" else uniforms(fixed, running)
    observed = np.bincount(draw_many(weights, uniform), minlength=vocab)
    expected = weights[0].double().numpy() / weights.double().sum().item() * DRAWS
    common = expected >= 5
    observed = np.append(observed[common], observed[~common].sum())
    expected = np.append(expected[common], expected[~common].sum())
    statistic = ((observed - expected) ** 2 / np.maximum(expected, 1e-9)).sum()
    freedom = len(expected) - 1
    assert statistic < freedom + 4 * np.sqrt(2 * freedom)


def test_uniforms_of_neighbours_are_unrelated() -> None:
    """Neighbouring seeds must not give shifted copies of one stream."""
    seeds = np.repeat(np.arange(200, dtype=np.uint64), 50)
    values = uniforms(seeds, np.tile(np.arange(50), 200))
    assert len(np.unique(values)) == len(values)
    table = values.reshape(200, 50)
    assert abs(np.corrcoef(table[:-1].ravel(), table[1:].ravel())[0, 1]) < 0.03
    assert abs(np.corrcoef(table[:, :-1].ravel(), table[:, 1:].ravel())[0, 1]) < 0.03


@settings(max_examples=150, deadline=None)
@given(
    st.integers(1, 1300),
    st.integers(0, 2**32),
    st.floats(0, 1, exclude_max=True),
    st.sampled_from([0.0, 0.5, 0.99]),
)
def test_zero_weights_are_never_drawn(vocab: int, seed: int, point: float, zeros: float) -> None:
    rng = np.random.default_rng(seed)
    weights = (rng.random((1, vocab)) * (rng.random((1, vocab)) >= zeros)).astype(np.float32)
    weights[0, rng.integers(vocab)] = 1
    for uniform in (0.0, point, 1 - 2**-53):
        token = draw_many(torch.from_numpy(weights), np.array([uniform]))[0]
        assert weights[0, token] > 0


def test_a_target_rounded_up_to_the_total_stays_on_the_last_weight() -> None:
    cumulative = torch.tensor([[1.0, 3.0, 3.0, 3.0], [0.0, 0.0, 2.0, 2.0]], dtype=torch.float64)
    assert _invert(cumulative, cumulative[:, -1:]).tolist() == [[1], [2]]


@settings(max_examples=150, deadline=None)
@given(st.integers(2, 1300), st.integers(0, 2**32), st.integers(0, 1300), st.floats(0, 1), st.floats(0, 1))
def test_truncation_of_a_row_does_not_depend_on_its_neighbours(
    vocab: int, seed: int, top_k: int, top_p: float, min_p: float
) -> None:
    """Rows differ in whether the first look at the largest weights is enough."""
    rng = np.random.default_rng(seed)
    weights = torch.from_numpy(np.exp(rng.normal(size=(6, vocab)) * rng.gamma(1, 2, (6, 1))).astype(np.float32))
    weights /= weights.amax(1, keepdim=True)
    ks = torch.tensor([top_k, 0, 3, top_k, 0, vocab])
    ps = torch.tensor([top_p, top_p, 1.0, 0.5, 1.0, 0.999], dtype=torch.float64)
    mins = torch.tensor([min_p, 0, 0, 0, min_p, 0], dtype=torch.float64)
    mass = weights.double().sum(1)
    together = least_weights(weights, mass, ks, ps, mins)
    alone = [
        least_weights(weights[i : i + 1], mass[i : i + 1], ks[i : i + 1], ps[i : i + 1], mins[i : i + 1])
        for i in range(6)
    ]
    assert together.tolist() == torch.cat(alone).tolist()
    assert (weights >= together[:, None]).any(1).all()
