"""Attention on CUDA and ROCm with torch's own variable-length kernel over the paged pool.

One call a layer for the whole ragged batch: the pool is read in place through the block table.
Shapes: T tokens, S sequences, H query heads, G KV heads, D head size, B pool blocks, K tokens per block.
"""

from __future__ import annotations

import numpy as np
import torch
from torch.nn.attention.varlen import varlen_attn

from workers.batch import Batch
from workers.kv import KvPool


class VarlenAttention:
    """Satisfies `AttentionBackend`."""

    name = "varlen"

    def __init__(self, pool: KvPool, scale: float) -> None:
        device = pool.keys_BKHD[0].device
        if device.type != "cuda":
            raise ValueError(f"the varlen attention backend needs a CUDA or ROCm device, not {device.type}")
        if pool.keys_BKHD[0].dtype not in (torch.float16, torch.bfloat16):
            raise ValueError("attention on a GPU needs --dtype bfloat16 or float16")
        self._pool = pool
        self._scale = scale
        self._device = device
        self._batch: Batch
        self._starts_S1: torch.Tensor
        self._lengths_S: torch.Tensor
        self._tables_SB: torch.Tensor
        self._longest_query = 0
        self._longest_context = 0

    def begin(self, batch: Batch) -> None:
        self._batch = batch
        queries = np.array([1] * batch.num_decodes + [chunk.length for chunk in batch.chunks], dtype=np.int32)
        starts = np.concatenate([[0], np.cumsum(queries)]).astype(np.int32)
        width = max(len(table) for table in batch.block_tables)
        tables = np.zeros((len(batch.block_tables), width), dtype=np.int32)
        for row, table in enumerate(batch.block_tables):
            tables[row, : len(table)] = table
        self._starts_S1 = torch.from_numpy(starts).to(self._device, non_blocking=True)
        self._lengths_S = torch.from_numpy(batch.context_lengths.astype(np.int32)).to(self._device, non_blocking=True)
        self._tables_SB = torch.from_numpy(tables).to(self._device, non_blocking=True)
        self._longest_query = int(queries.max())
        self._longest_context = int(batch.context_lengths.max())

    def attend(
        self, layer: int, query_THD: torch.Tensor, key_TGD: torch.Tensor, value_TGD: torch.Tensor, window: int
    ) -> torch.Tensor:
        rows = self._batch.write_rows_N
        if rows is not None:
            key_TGD, value_TGD = key_TGD[rows], value_TGD[rows]
        self._pool.write(layer, self._batch.write_places_N, key_TGD, value_TGD)
        out = varlen_attn(
            query_THD,
            self._pool.keys_BKHD[layer],
            self._pool.values_BKHD[layer],
            self._starts_S1,
            None,
            self._longest_query,
            self._longest_context,
            scale=self._scale,
            window_size=(window - 1 if window else -1, 0),
            enable_gqa=query_THD.shape[1] != self._pool.keys_BKHD[layer].shape[2],
            seqused_k=self._lengths_S,
            block_table=self._tables_SB,
        )
        assert isinstance(out, torch.Tensor)
        return out.flatten(1)
