"""Tensors of one or several safetensors files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import safe_open

from .reader import Shape, check_shape

IGNORED_SUFFIXES = ("rotary_emb.inv_freq", "masked_bias")
"""Buffers that old checkpoints carry and nobody needs."""


class SafetensorsReader:
    """Satisfies `TensorReader`."""

    def __init__(self, files: Sequence[str]) -> None:
        self._files = [safe_open(file, framework="pt", device="cpu") for file in files]
        self._where = {name: file for file in self._files for name in file.keys()}  # noqa: SIM118 (not a dict)
        self._read: set[str] = set()
        self._names = ", ".join(Path(file).name for file in files)

    def rows(self, name: str, shape: Shape, start: int, length: int) -> torch.Tensor:
        return self._slice(name, shape)[start : start + length]

    def columns(self, name: str, shape: Shape, start: int, length: int) -> torch.Tensor:
        return self._slice(name, shape)[:, start : start + length]

    def unread(self) -> list[str]:
        return sorted(n for n in self._where if n not in self._read and not n.endswith(IGNORED_SUFFIXES))

    def _slice(self, name: str, shape: Shape):  # type: ignore[no-untyped-def]
        file = self._where.get(name)
        if file is None:
            raise ValueError(f"tensor {name} is not in {self._names}")
        part = file.get_slice(name)
        check_shape(name, tuple(part.get_shape()), shape)
        self._read.add(name)
        return part
