"""What a model asks of attention, whatever computes it.

Shapes: T tokens of the step, H query heads and G KV heads of this rank, D head size.
"""

from __future__ import annotations

from typing import Protocol

import torch

from workers.batch import Batch


class AttentionBackend(Protocol):
    """Causal attention of a ragged batch over the paged pool."""

    name: str

    def begin(self, batch: Batch) -> None:
        """Once per step, before the first layer: whatever all layers share."""
        ...

    def attend(
        self, layer: int, query_THD: torch.Tensor, key_TGD: torch.Tensor, value_TGD: torch.Tensor, window: int
    ) -> torch.Tensor:
        """Writes the step's keys and values into the pool, then reads them: [T, H * D].

        Args:
            window: each token sees only the last so many tokens, itself included; 0 is all.
        """
        ...
