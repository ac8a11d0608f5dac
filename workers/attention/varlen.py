"""Attention on CUDA and ROCm with torch's own variable-length kernel: one call a layer for the whole ragged batch.

Where the kernel can, it reads the pool in place through the block table. Elsewhere the step's contexts are gathered
into contiguous keys and values first, which costs a copy of the context per layer but works with every block size:

    CUDA, flash attention 2 (torch's own)   pages of a multiple of 256 tokens only
    CUDA, FA3 or FA4 activated in torch     any page size
    ROCm                                    no block table, no `seqused_k`

Shapes: T tokens, S sequences, C tokens of all contexts, H query heads, G KV heads, D head size, B blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.nn.attention import current_flash_attention_impl

from workers.batch import Batch, LongArray
from workers.kv import KvPool

PAGE_MULTIPLE = 256
"""Of flash attention 2."""
MOST_HEAD_DIM = 256
HEAD_DIM_MULTIPLE = 8


def reads_pages(block_size: int) -> bool:
    """Whether the kernel that torch would use here takes the pool through a block table."""
    if torch.version.hip is not None:
        return False
    return block_size % PAGE_MULTIPLE == 0 or current_flash_attention_impl() is not None


def check_supported(dtype: torch.dtype, head_dim: int) -> None:
    """Raises ValueError for a model that the kernel cannot compute."""
    if dtype not in (torch.float16, torch.bfloat16):
        raise ValueError(
            f"attention on a GPU needs --dtype bfloat16 or float16, not {str(dtype).removeprefix('torch.')}"
        )
    if head_dim > MOST_HEAD_DIM or head_dim % HEAD_DIM_MULTIPLE:
        raise ValueError(
            f"attention on a GPU needs a head size that is a multiple of {HEAD_DIM_MULTIPLE}, at most {MOST_HEAD_DIM}; "
            f"this model's is {head_dim}"
        )


class VarlenAttention:
    """Satisfies `AttentionBackend`. `kernel` has the signature of torch.nn.attention.varlen.varlen_attn."""

    def __init__(self, pool: KvPool, scale: float, *, paged: bool, kernel: Callable[..., Any]) -> None:
        self.name = "varlen-paged" if paged else "varlen-gathered"
        self._pool = pool
        self._scale = scale
        self._paged = paged
        self._kernel = kernel
        self._device = pool.keys_BKHD[0].device
        self._batch: Batch
        self._query_starts_S1: torch.Tensor
        self._longest = (0, 0)
        """Queries and context."""
        self._lengths_S: torch.Tensor
        self._tables_SB: torch.Tensor
        self._context_starts_S1: torch.Tensor
        self._context_places_C: torch.Tensor

    def begin(self, batch: Batch) -> None:
        self._batch = batch
        queries = np.array([1] * batch.num_decodes + [chunk.length for chunk in batch.chunks], dtype=np.int64)
        self._query_starts_S1 = self._int32(_starts(queries))
        self._longest = int(queries.max()), int(batch.context_lengths.max())
        if self._paged:
            self._lengths_S = self._int32(batch.context_lengths)
            self._tables_SB = self._int32(_padded_tables(batch))
        else:
            self._context_starts_S1 = self._int32(_starts(batch.context_lengths))
            places = context_places(batch, self._pool.block_size)
            self._context_places_C = torch.from_numpy(places).to(self._device, non_blocking=True)

    def attend(
        self, layer: int, query_THD: torch.Tensor, key_TGD: torch.Tensor, value_TGD: torch.Tensor, window: int
    ) -> torch.Tensor:
        rows = self._batch.write_rows_N
        if rows is not None:
            key_TGD, value_TGD = key_TGD[rows], value_TGD[rows]
        self._pool.write(layer, self._batch.write_places_N, key_TGD, value_TGD)
        key, value = self._pool.keys_BKHD[layer], self._pool.values_BKHD[layer]
        if not self._paged:
            key = key.flatten(0, 1).index_select(0, self._context_places_C)
            value = value.flatten(0, 1).index_select(0, self._context_places_C)
        out_THD: torch.Tensor = self._kernel(
            query_THD,
            key,
            value,
            self._query_starts_S1,
            None if self._paged else self._context_starts_S1,
            *self._longest,
            scale=self._scale,
            window_size=(window - 1 if window else -1, 0),
            enable_gqa=query_THD.shape[1] != key.shape[-2],
            seqused_k=self._lengths_S if self._paged else None,
            block_table=self._tables_SB if self._paged else None,
        )
        return out_THD.flatten(1)

    def _int32(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array.astype(np.int32)).to(self._device, non_blocking=True)


def _starts(lengths: LongArray) -> LongArray:
    """Where each of several runs begins, and the end of the last one."""
    return np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(lengths)])


def _padded_tables(batch: Batch) -> np.ndarray:
    tables = np.zeros((len(batch.block_tables), max(len(table) for table in batch.block_tables)), dtype=np.int32)
    for row, table in enumerate(batch.block_tables):
        tables[row, : len(table)] = table
    return tables


def context_places(batch: Batch, block_size: int) -> LongArray:
    """Flat places in the pool of every token that the step attends to, sequence after sequence, int64."""
    blocks = np.concatenate(batch.block_tables).astype(np.int64)
    places = (blocks[:, None] * block_size + np.arange(block_size)).ravel()
    padded = np.array([len(table) * block_size for table in batch.block_tables], dtype=np.int64)
    position = np.arange(len(places)) - np.repeat(_starts(padded)[:-1], padded)
    return places[position < np.repeat(batch.context_lengths, padded)]
