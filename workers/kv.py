"""The paged KV pool of one rank.

Shapes: B blocks, K tokens per block, H KV heads of this rank, D head size.
"""

from __future__ import annotations

import math
import os

import numpy as np
import torch

from atom_async.wire.messages import WorkerInit
from atom_async.wire.model import ModelSpec

CPU_SHARE = 0.4
"""Of the memory that is available when the weights are loaded."""
CPU_MOST_BYTES = 4 << 30


def kv_heads_per_rank(spec: ModelSpec, tp_size: int) -> int:
    """Ranks share KV heads evenly; with more ranks than heads each head is held by several."""
    return max(1, spec.num_kv_heads // tp_size)


def bytes_per_block(spec: ModelSpec, tp_size: int, block_size: int, dtype: torch.dtype) -> int:
    """Keys and values over all layers of one rank."""
    width = kv_heads_per_rank(spec, tp_size) * spec.head_dim
    return 2 * spec.num_layers * block_size * width * int(dtype.itemsize)


def cpu_kv_bytes(tp_size: int) -> int:
    """Bytes per rank when none are given: a share of what is available, at most CPU_MOST_BYTES over all ranks."""
    return min(int(_available_memory() * CPU_SHARE), CPU_MOST_BYTES) // tp_size


def _available_memory() -> int:
    with open("/proc/meminfo") as file:
        for line in file:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def gpu_kv_bytes(utilization: float, device: torch.device, activation_bytes: int) -> int:
    """What remains of `utilization` of the device's memory beside weights and a step's activations."""
    free, total = torch.cuda.mem_get_info(device)
    used = total - free
    return int(total * utilization) - int(used) - activation_bytes


class KvPool:
    """Keys and values per layer, [B, K, H, D] each."""

    def __init__(self, init: WorkerInit, num_blocks: int, dtype: torch.dtype, device: torch.device) -> None:
        heads = kv_heads_per_rank(init.model, init.tp_size)
        shape = (num_blocks, init.block_size, heads, init.model.head_dim)
        layers = range(init.model.num_layers)
        self.block_size = init.block_size
        self.keys_BKHD = [_zeros(shape, dtype, device) for _ in layers]
        self.values_BKHD = [_zeros(shape, dtype, device) for _ in layers]

    def write(self, layer: int, places_N: torch.Tensor, key_NHD: torch.Tensor, value_NHD: torch.Tensor) -> None:
        """Stores N tokens at flat places `block * block_size + offset`, int64."""
        self.keys_BKHD[layer].flatten(0, 1).index_copy_(0, places_N, key_NHD)
        self.values_BKHD[layer].flatten(0, 1).index_copy_(0, places_N, value_NHD)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros, since attention reads (and masks) what lies behind a context, and 0 * NaN would spread.

    On the CPU by calloc, whose pages exist only once they are written: a large pool costs nothing until used.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)).view(dtype).view(shape)
