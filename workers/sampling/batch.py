"""The rows of one call of the sampler, and the settings that their slots have."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from workers.sampling.settings import Need, Settings

_LOGITS_AT_ONCE = 1 << 20

IntArray = npt.NDArray[np.int64]


class Batch:
    def __init__(self, settings: Settings, slots: Sequence[int], positions: Sequence[int], device: torch.device):
        self.slots: IntArray = np.asarray(slots, dtype=np.int64)
        self.positions: IntArray = np.asarray(positions, dtype=np.int64)
        self.flags = settings.flags[self.slots]
        self.needs = Need(int(np.bitwise_or.reduce(self.flags, initial=0)))
        self._device = device

    def rows(self, need: Need) -> IntArray:
        return np.flatnonzero(self.flags & int(need))

    def blocks(self, need: Need, vocab_size: int) -> list[IntArray]:
        """`rows` in pieces small enough, on a CPU, for temporaries that the allocator and the cache keep."""
        rows = self.rows(need)
        size = _LOGITS_AT_ONCE // vocab_size if self._device.type == "cpu" else len(rows)
        size = max(size, 1)
        return [rows[start : start + size] for start in range(0, len(rows), size)]

    def column(self, values: npt.NDArray[Any], rows: IntArray) -> torch.Tensor:
        """Settings of these rows, on the device, [len(rows)]."""
        return torch.from_numpy(values[self.slots[rows]]).to(self._device)

    def index(self, rows: IntArray) -> torch.Tensor:
        return torch.from_numpy(rows).to(self._device)

    def entries(self, rows: IntArray, ids: dict[int, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Coordinates in the logits of each slot's token ids, concatenated."""
        lists = [ids[slot] for slot in self.slots[rows].tolist()]
        return self.index(np.repeat(rows, [len(one) for one in lists])), torch.cat(lists)

    def select(self, logits: torch.Tensor, rows: IntArray) -> torch.Tensor:
        """logits[rows]: a view where the rows are adjacent, else a copy."""
        if _adjacent(rows):
            return logits[int(rows[0]) : int(rows[-1]) + 1]
        return logits[self.index(rows)]

    def replace(self, logits: torch.Tensor, rows: IntArray, values: torch.Tensor) -> None:
        """Puts back what `select` gave and was then changed in place."""
        if not _adjacent(rows):
            logits[self.index(rows)] = values


def _adjacent(rows: IntArray) -> bool:
    return int(rows[-1] - rows[0]) + 1 == len(rows)
