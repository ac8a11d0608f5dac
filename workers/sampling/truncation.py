"""Where top_k, top_p and min_p cut a distribution, expressed as one least weight per row."""

from __future__ import annotations

import numpy as np
import torch

_PREFILTER = 256
"""Largest weights looked at before a whole row is sorted."""


def _largest(weights: torch.Tensor, count: int) -> torch.Tensor:
    """The `count` largest values of each row, descending. Values only: numpy sorts those several times
    faster on a CPU than torch, which always sorts indices as well."""
    width = weights.shape[1]
    if weights.device.type != "cpu":
        return weights.topk(count).values if count < width else weights.sort(descending=True).values
    values = weights.numpy()
    if count < width:
        values = np.partition(values, width - count, axis=1)[:, width - count :]
    return torch.from_numpy(np.sort(values, axis=1)[:, ::-1].copy())


def _cut(largest: torch.Tensor, mass: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Index of the last weight kept in each row of `largest`, int64 [n]; its width when it lies beyond."""
    width = largest.shape[1]
    cumulative = largest.double().cumsum(1)
    last_of_k = torch.where(top_k > 0, top_k, width + 1) - 1
    mass_of_k = cumulative.gather(1, last_of_k.clamp(max=width - 1)[:, None]).squeeze(1)
    # Where the k-th lies beyond `largest`, so may the mass: the row is looked at again, whole.
    mass = torch.where(top_k > 0, mass_of_k, mass)
    last_of_p = (cumulative < (top_p * mass)[:, None]).sum(1)
    last_of_p = torch.where(top_p < 1, last_of_p, width)
    last = torch.minimum(last_of_k, last_of_p)
    return torch.where((top_k > width) & (top_p < 1), width, last.clamp_(max=width))


def least_weights(
    weights: torch.Tensor, mass: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor
) -> torch.Tensor:
    """Weight below which a token is cut, float32 [n].

    weights: float32 [n, V], proportional to the probabilities, the largest of each row 1. mass: float64 [n],
    their sums. top_k: int64 [n], 0 is off. top_p, min_p: float64 [n], 1 and 0 are off.

    top_k keeps the k most likely tokens; top_p the fewest of these that reach the share p of their mass;
    min_p, which is relative to the most likely token and so independent of the others, what reaches
    p * 1. Tokens exactly as likely as the last one kept are kept with it, so that the choice does not
    depend on an order among equals.
    """
    least = min_p.float().clamp(max=1)
    rows = torch.nonzero((top_k > 0) | (top_p < 1)).squeeze(1)
    width = weights.shape[1]
    for count in (min(_PREFILTER, width), width):
        if not len(rows):
            break
        largest = _largest(weights[rows] if len(rows) < len(weights) else weights, count)
        last = _cut(largest, mass[rows], top_k[rows].clamp(max=width), top_p[rows])
        if count == width:
            last.clamp_(max=width - 1)
        found = last < count
        cut = largest.gather(1, last.clamp(max=count - 1)[:, None]).squeeze(1)
        least[rows] = torch.where(found, torch.maximum(least[rows], cut), least[rows])
        rows = rows[~found]
    return least
