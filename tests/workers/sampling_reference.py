"""What one row's draw should be, in plain float64 numpy and Python integers, written from the definitions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from atom_async.wire.sampling import SamplingParams

MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15

Row = npt.NDArray[np.float64]


def splitmix64(state: int) -> int:
    z = state & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def uniform(seed: int, position: int) -> float:
    return (splitmix64(splitmix64((seed + GOLDEN) & MASK) + (position + 1) * GOLDEN) >> 11) / (1 << 53)


def adjusted(
    logits: npt.NDArray[np.float32], sampling: SamplingParams, prompt: Sequence[int], output: Sequence[int]
) -> Row:
    row = logits.astype(np.float64)
    if len(output) < sampling.min_tokens:
        row[list(sampling.end_token_ids)] = -np.inf
    for token, bias in sampling.logit_bias:
        row[token] += bias
    for token in {*prompt, *output}:
        factor = 1 / sampling.repetition_penalty if row[token] > 0 else sampling.repetition_penalty
        row[token] *= factor
    for token, count in Counter(output).items():
        row[token] -= sampling.frequency_penalty * count + sampling.presence_penalty
    return row


def kept(row: Row, sampling: SamplingParams, slack: float) -> npt.NDArray[np.bool_]:
    """Tokens that survive truncation, with its bounds moved by `slack` (relative) towards keeping more."""
    weights = np.exp((row - row.max()) / sampling.temperature)
    ordered = np.sort(weights)[::-1]
    least = sampling.min_p
    mass = ordered.sum()
    if 0 < sampling.top_k < len(row):
        least = max(least, ordered[sampling.top_k - 1])
        mass = ordered[: sampling.top_k].sum()
    if sampling.top_p < 1:
        reached = np.cumsum(ordered) >= sampling.top_p * mass * (1 + slack)
        least = max(least, ordered[np.argmax(reached)] if reached.any() else ordered[-1])
    survives: npt.NDArray[np.bool_] = weights >= least * (1 - slack)
    return survives


def possible_tokens(row: Row, sampling: SamplingParams, position: int, slack: float = 3e-6) -> set[int] | None:
    """The token that the draw must give; several when it falls within rounding of a boundary between
    tokens; None when rounding decides which tokens are kept."""
    if sampling.temperature == 0:
        return set(np.flatnonzero(row >= row.max() - slack).tolist())
    survives = kept(row, sampling, slack)
    if (survives != kept(row, sampling, -slack)).any():
        return None
    weights = np.where(survives, np.exp((row - row.max()) / sampling.temperature), 0)
    cumulative = np.cumsum(weights / weights.sum())
    point = uniform(sampling.seed, position)
    first, last = (int(np.searchsorted(cumulative, point + d, side="right")) for d in (-slack, slack))
    return {token for token in range(first, min(last, len(row) - 1) + 1) if weights[token] > 0}
