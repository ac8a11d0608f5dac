"""Attention backends behind one protocol."""

from __future__ import annotations

import torch

from workers.kv import KvPool

from .base import AttentionBackend

__all__ = ["AttentionBackend", "choose_attention", "create_attention"]


def choose_attention(device: torch.device, *, dtype: torch.dtype, head_dim: int, block_size: int) -> str:
    """Name of the backend for a device. Raises ValueError where none can compute such a model."""
    if device.type == "cpu":
        return "cpu-sdpa"
    from .varlen import check_supported, reads_pages

    check_supported(dtype, head_dim)
    return "varlen-paged" if reads_pages(block_size) else "varlen-gathered"


def create_attention(name: str, pool: KvPool, scale: float) -> AttentionBackend:
    """`name` is what `choose_attention` returned for the pool's device."""
    if name == "cpu-sdpa":
        from .cpu_sdpa import CpuSdpa

        return CpuSdpa(pool, scale)
    from torch.nn.attention.varlen import varlen_attn

    from .varlen import VarlenAttention

    return VarlenAttention(pool, scale, paged=name == "varlen-paged", kernel=varlen_attn)
