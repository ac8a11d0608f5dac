"""Where a model's tensors come from: one protocol over file formats.

Names are those of Hugging Face checkpoints. Only what a rank needs is read; files are memory-mapped.
"""

from __future__ import annotations

from typing import Protocol

import torch

Shape = tuple[int, ...]


class TensorReader(Protocol):
    """`shape` is what the model expects of the whole tensor; a file that says otherwise raises ValueError,
    and so does a tensor that is missing."""

    def rows(self, name: str, shape: Shape, start: int, length: int) -> torch.Tensor:
        """[length, ...] from the first dimension."""
        ...

    def columns(self, name: str, shape: Shape, start: int, length: int) -> torch.Tensor:
        """[shape[0], length] from the second dimension."""
        ...

    def unread(self) -> list[str]:
        """Tensors of the files that nobody asked for: of a model that this is not."""
        ...


def check_shape(name: str, found: Shape, expected: Shape) -> None:
    """Raises ValueError."""
    if found != expected:
        raise ValueError(f"tensor {name} has shape {list(found)}, the model's configuration says {list(expected)}")
