"""Log-probabilities of the model's own distribution, with ranks and the most likely alternatives."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

_ROWS_AT_ONCE = 256
"""Bounds the temporaries of a long prompt."""


class Described(NamedTuple):
    """For each row: the given token's log-probability and rank, and the k most likely tokens."""

    logprobs: list[float]
    ranks: list[int]
    top_ids: npt.NDArray[np.int64]
    top_logprobs: npt.NDArray[np.float32]


def describe(logits: torch.Tensor, token_ids: torch.Tensor, k: int) -> Described:
    """logits: float32 [n, vocab]; token_ids: int64 [n] on the same device.

    Equal logits are listed in the order of their ids; a rank is one more than the number of tokens that
    are strictly more likely.
    """
    parts = [
        _describe(logits[start : start + _ROWS_AT_ONCE], token_ids[start : start + _ROWS_AT_ONCE], k)
        for start in range(0, len(logits), _ROWS_AT_ONCE)
    ]
    chosen, ranks, top_ids, top = (np.concatenate(part) for part in zip(*parts, strict=True))
    return Described(chosen.tolist(), ranks.tolist(), top_ids, top)


def _describe(logits: torch.Tensor, token_ids: torch.Tensor, k: int) -> tuple[npt.NDArray[Any], ...]:
    normalizer = logits.logsumexp(-1, keepdim=True)
    chosen = logits.gather(1, token_ids[:, None])
    ranks = torch.gt(logits, chosen, out=torch.empty_like(logits)).sum(1).long() + 1
    top, ids = logits.topk(min(k, logits.shape[1]))
    best = logits.argmax(-1, keepdim=True)
    top_ids, top_logits = _in_order(ids.cpu().numpy(), top.cpu().numpy(), best.cpu().numpy())
    shift = normalizer.cpu().numpy()
    return (chosen.cpu().numpy() - shift).squeeze(1), ranks.cpu().numpy(), top_ids, top_logits - shift


def _in_order(
    ids: npt.NDArray[np.int64], values: npt.NDArray[np.float32], best: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
    """Rows by falling value, then rising id. When more than k tokens share the first place, topk may have
    left out the one that greedy decoding takes; it must be in the list."""
    if ids.shape[1]:
        absent = ~(ids == best).any(1)
        ids[absent, -1] = best[absent, 0]
    order = np.lexsort((ids, -values), axis=-1)
    return np.take_along_axis(ids, order, 1), np.take_along_axis(values, order, 1)
