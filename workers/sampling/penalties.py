"""Presence, frequency and repetition penalties over dense rows of counts, held only by the slots that need them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch


class TokenCounts:
    """How often each token occurred, float32 [rows, vocab]; a slot takes a row when it enters.

    float32 counts exactly up to 2**24 and needs no conversion before it meets the logits.
    """

    def __init__(self, vocab_size: int, max_num_seqs: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._counts = torch.zeros((0, vocab_size), dtype=torch.float32, device=device)
        self._row_of = np.full(max_num_seqs, -1, dtype=np.int64)
        self._free: list[int] = []

    def add(self, slot: int) -> None:
        if not self._free:
            self._grow()
        row = self._free.pop()
        self._counts[row] = 0
        self._row_of[slot] = row

    def remove(self, slot: int) -> None:
        """No effect for a slot without a row."""
        row = int(self._row_of[slot])
        if row >= 0:
            self._free.append(row)
            self._row_of[slot] = -1

    def _grow(self) -> None:
        old = len(self._counts)
        size = min(max(4, 2 * old), len(self._row_of))
        grown = self._counts.new_zeros((size, self._vocab_size))
        grown[:old] = self._counts
        self._counts = grown
        self._free = list(range(size - 1, old - 1, -1))

    def count(self, slot: int, token_ids: npt.NDArray[np.int32]) -> None:
        """Adds the tokens to a slot's counts; no effect for a slot without a row."""
        row = int(self._row_of[slot])
        if row < 0 or not len(token_ids):
            return
        ids, times = np.unique(token_ids, return_counts=True)
        index = torch.from_numpy(ids.astype(np.int64)).to(self._counts.device)
        self._counts[row, index] += torch.from_numpy(times.astype(np.float32)).to(self._counts.device)

    def count_sampled(self, slots: npt.NDArray[np.int64], tokens: torch.Tensor) -> None:
        """Adds one token to each of these slots, all of which have a row; slots are distinct."""
        self._counts[self._rows(slots), tokens] += 1

    def of(self, slots: npt.NDArray[np.int64]) -> torch.Tensor:
        """A copy of the counts of these slots, float32 [n, vocab]."""
        return self._counts[self._rows(slots)]

    def _rows(self, slots: npt.NDArray[np.int64]) -> torch.Tensor:
        return torch.from_numpy(self._row_of[slots]).to(self._counts.device)


def penalize_output(
    logits: torch.Tensor, counts: torch.Tensor, presence: torch.Tensor, frequency: torch.Tensor
) -> torch.Tensor:
    """OpenAI's: logit - frequency * count - presence * [count > 0].

    logits, counts: float32 [n, vocab], both overwritten; presence, frequency: float32 [n, 1].
    """
    logits.addcmul_(counts, frequency, value=-1)
    return logits.addcmul_(torch.gt(counts, 0, out=counts), presence, value=-1)


def penalize_repetition(logits: torch.Tensor, counts: torch.Tensor, penalty: torch.Tensor) -> torch.Tensor:
    """CTRL's (arXiv:1909.05858): tokens that occurred have positive logits divided, negative ones multiplied.

    logits, counts: float32 [n, vocab], both overwritten; penalty: float32 [n, 1], positive.
    """
    # All in float32: on a CPU a boolean mask of this size costs many times the arithmetic.
    factor = torch.gt(logits, 0, out=torch.empty_like(logits)).mul_(1 / penalty - 1)
    factor.addcmul_(torch.le(logits, 0, out=torch.empty_like(logits)), penalty - 1)
    factor.mul_(torch.gt(counts, 0, out=counts)).add_(1)
    return logits.mul_(factor)
