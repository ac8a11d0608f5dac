"""Seeded random weights (`--load-format dummy`): shapes and speed of a model without its file.

Every rank draws the whole tensor and keeps its part, so the model is the same for every TP size.
"""

from __future__ import annotations

import torch
from xxhash import xxh3_64_intdigest

from .reader import Shape

SCALE = 0.02


class RandomReader:
    """Satisfies `TensorReader`."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def rows(self, name: str, shape: Shape, start: int, length: int) -> torch.Tensor:
        return self._whole(name, shape)[start : start + length]

    def columns(self, name: str, shape: Shape, start: int, length: int) -> torch.Tensor:
        return self._whole(name, shape)[:, start : start + length]

    def unread(self) -> list[str]:
        return []

    def _whole(self, name: str, shape: Shape) -> torch.Tensor:
        if name.endswith("norm.weight"):
            return torch.ones(shape)
        generator = torch.Generator().manual_seed(xxh3_64_intdigest(f"{self._seed}.{name}".encode()) >> 1)
        return torch.randn(shape, generator=generator) * SCALE
