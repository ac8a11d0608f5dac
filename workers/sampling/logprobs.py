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
        for start in range(0, max(len(logits), 1), _ROWS_AT_ONCE)
    ]
    chosen, ranks, top_ids, top = (np.concatenate(part) for part in zip(*parts, strict=True))
    return Described(chosen.tolist(), ranks.tolist(), top_ids, top)


def _describe(logits: torch.Tensor, token_ids: torch.Tensor, k: int) -> tuple[npt.NDArray[Any], ...]:
    normalizer = logits.logsumexp(-1, keepdim=True)
    chosen = logits.gather(1, token_ids[:, None])
    ranks = torch.gt(logits, chosen, out=torch.empty_like(logits)).sum(1).long() + 1
    top, ids = logits.topk(min(k, logits.shape[1]))
    top_ids, values = ids.cpu().numpy(), top.cpu().numpy()
    _name_the_first(logits, top_ids, values)
    order = np.lexsort((top_ids, -values), axis=-1)
    top_logprobs = (top - normalizer).cpu().numpy()
    top_ids, top_logprobs = (np.take_along_axis(array, order, 1) for array in (top_ids, top_logprobs))
    return (chosen - normalizer).squeeze(1).cpu().numpy(), ranks.cpu().numpy(), top_ids, top_logprobs


def _name_the_first(logits: torch.Tensor, ids: npt.NDArray[np.int64], values: npt.NDArray[np.float32]) -> None:
    """When more than k tokens share the first place, topk may have left out the one that greedy decoding
    takes, the lowest id; it must be in the list."""
    if not ids.shape[1]:
        return
    rows = np.flatnonzero(values[:, 0] == values[:, -1])
    if len(rows):
        best = logits[torch.from_numpy(rows).to(logits.device)].max(-1).indices.cpu().numpy()
        absent = ~(ids[rows] == best[:, None]).any(1)
        ids[rows[absent], -1] = best[absent]
