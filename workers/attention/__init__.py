"""Attention backends behind one protocol."""

from __future__ import annotations

from workers.kv import KvPool

from .base import AttentionBackend

__all__ = ["AttentionBackend", "create_attention"]


def create_attention(pool: KvPool, scale: float) -> AttentionBackend:
    """The backend for the pool's device. Raises ValueError where there is none."""
    if pool.keys_BKHD[0].device.type == "cuda":
        from .varlen import VarlenAttention

        return VarlenAttention(pool, scale)
    from .cpu_sdpa import CpuSdpa

    return CpuSdpa(pool, scale)
