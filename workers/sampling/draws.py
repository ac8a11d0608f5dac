"""Random draws that depend on nothing but (seed, position) and the distribution."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_CHUNK = 512


def _mix(z: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The finaliser of splitmix64."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def uniforms(seeds: npt.NDArray[np.uint64], positions: npt.NDArray[np.integer[Any]]) -> npt.NDArray[np.float64]:
    """One number in [0, 1) for each (seed, position), all 53 bits random.

    Value number `position` of a splitmix64 stream (Steele, Lea, Flood: Fast Splittable Pseudorandom Number
    Generators, OOPSLA 2014) that starts at the mixed seed: mixing keeps neighbouring seeds apart.
    """
    state = _mix(seeds + _GOLDEN) + (positions.astype(np.uint64) + np.uint64(1)) * _GOLDEN
    return (_mix(state) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def chunk_sums(weights: torch.Tensor) -> torch.Tensor:
    """float32 [n, V] -> float64 [n, ceil(V / 512)]: sums over runs of 512 tokens."""
    whole = weights.shape[1] // _CHUNK * _CHUNK
    sums = weights[:, :whole].unflatten(1, (-1, _CHUNK)).sum(-1)
    if whole < weights.shape[1]:
        sums = torch.cat((sums, weights[:, whole:].sum(-1, keepdim=True)), 1)
    return sums.double()


def _invert(cumulative: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """First index whose cumulative sum exceeds the target; float64 [n, m], [n, 1] -> int64 [n, 1]."""
    below_total = torch.nextafter(cumulative[:, -1:], torch.zeros_like(targets))
    return torch.searchsorted(cumulative, torch.minimum(targets, below_total), right=True).clamp_(
        max=cumulative.shape[1] - 1
    )


def draw(weights: torch.Tensor, sums: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Inverse CDF over unnormalised weights in the order of token ids; int64 [n].

    weights: float32 [n, V], none negative. sums: their `chunk_sums`. uniform: float64 [n] in [0, 1).
    A token of weight zero is never drawn. A row that holds NaN gives an arbitrary valid id.
    """
    cumulative = sums.cumsum(1)
    target = uniform[:, None] * cumulative[:, -1:]
    chunk = _invert(cumulative, target)
    mass = sums.gather(1, chunk)
    inside = (target - (cumulative.gather(1, chunk) - mass)).clamp_(min=0) / mass
    ids = chunk * _CHUNK + torch.arange(_CHUNK, device=weights.device)
    beyond = ids >= weights.shape[1]
    ids.clamp_(max=weights.shape[1] - 1)
    # The chunk's own float64 sum differs from its float32 one in the last digits, hence the fraction.
    within = weights.gather(1, ids).double().masked_fill_(beyond, 0).cumsum(1)
    return ids.gather(1, _invert(within, inside * within[:, -1:])).squeeze(1)
