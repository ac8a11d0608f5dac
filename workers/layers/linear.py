"""Linear layers over a rank's shard of the weights.

Shapes: T tokens, I inputs and O outputs of this shard.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

from workers.parallel import ParallelGroup


@dataclass(slots=True)
class Linear:
    """y = x W^T + b. As it stands: outputs split over the ranks (column parallel), or everything on each."""

    weight_OI: torch.Tensor
    bias_O: torch.Tensor | None = None

    def __call__(self, x_TI: torch.Tensor) -> torch.Tensor:
        return functional.linear(x_TI, self.weight_OI, self.bias_O)


@dataclass(slots=True)
class RowParallelLinear:
    """Inputs split over the ranks: each computes a part of every output, and the parts are summed.

    Only rank 0 holds the bias, so that it is added once.
    """

    weight_OI: torch.Tensor
    bias_O: torch.Tensor | None
    group: ParallelGroup

    def __call__(self, x_TI: torch.Tensor) -> torch.Tensor:
        return self.group.all_reduce(functional.linear(x_TI, self.weight_OI, self.bias_O))
