"""Token embedding and output head with the vocabulary split over the ranks.

Shapes: T tokens, H hidden, S vocabulary rows of this rank (padded so that all ranks have as many), V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

from workers.parallel import ParallelGroup


def shard_rows(vocab_size: int, rank: int, size: int) -> tuple[int, int, int]:
    """(first row, rows that exist, rows with padding) of a rank."""
    padded = -(-vocab_size // size)
    first = min(rank * padded, vocab_size)
    return first, min(padded, vocab_size - first), padded


@dataclass(slots=True)
class VocabParallelEmbedding:
    weight_SH: torch.Tensor
    first_row: int
    group: ParallelGroup

    def __call__(self, ids_T: torch.Tensor) -> torch.Tensor:
        """[T] int64 -> [T, H]."""
        if self.group.size == 1:
            return functional.embedding(ids_T, self.weight_SH)
        local_T = ids_T - self.first_row
        mine_T = (local_T >= 0) & (local_T < self.weight_SH.shape[0])
        rows_TH = functional.embedding(local_T.clamp(0, self.weight_SH.shape[0] - 1), self.weight_SH)
        return self.group.all_reduce(rows_TH * mine_T.unsqueeze(1))


@dataclass(slots=True)
class VocabParallelHead:
    weight_SH: torch.Tensor
    vocab_size: int
    group: ParallelGroup

    def __call__(self, hidden_TH: torch.Tensor) -> torch.Tensor:
        """[T, H] -> float32 logits [T, V], on every rank."""
        logits_TS = functional.linear(hidden_TH, self.weight_SH)
        return self.group.gather_columns(logits_TS)[:, : self.vocab_size].float()
