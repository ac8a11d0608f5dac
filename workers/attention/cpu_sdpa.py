"""Attention on the CPU with torch's scaled_dot_product_attention over gathered blocks.

Decodes of similar context length share one call: their blocks are gathered into a padded batch, and the query
heads that share a KV head are taken as that many queries, so keys are not repeated. Each chunk is a call of its
own; one that begins its sequence needs no gather at all.

Shapes: T tokens, N sequences of a group, L padded context, H query heads, G KV heads, R = H / G, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from workers.batch import Batch, ChunkRows
from workers.kv import KvPool

PADDING_RATIO = 1.5
"""Decodes are grouped as long as the longest context is at most this times the shortest."""
GATHER_BYTES = 64 << 20
"""Most keys and values that one call gathers per layer, unless a single sequence has more: bounds the scratch
memory. Smaller is slower, even where it would fit the caches."""


@dataclass(slots=True)
class _DecodeGroup:
    rows_N: torch.Tensor
    blocks_NB: torch.Tensor
    """int64; behind a sequence's own blocks any block, which the mask hides."""
    positions_N1: torch.Tensor
    """Of the token computed now."""
    masks: dict[int, torch.Tensor]
    """Per window: additive [N, 1, 1, L], made once and used by all layers."""


@dataclass(slots=True)
class _ChunkContext:
    chunk: ChunkRows
    blocks_B: torch.Tensor | None
    """None when the chunk begins its sequence: all it reads is its own."""
    masks: dict[int, torch.Tensor]
    """Per window: boolean [length, end]."""


class CpuSdpa:
    """Satisfies `AttentionBackend`."""

    name = "cpu-sdpa"

    def __init__(self, pool: KvPool, scale: float) -> None:
        self._pool = pool
        self._scale = scale
        self._most_tokens = GATHER_BYTES // (2 * pool.keys_BKHD[0][0, 0].nbytes)
        self._scratch = torch.empty(0, dtype=pool.keys_BKHD[0].dtype)
        """Where decodes' keys and values are gathered, layer after layer: fresh pages would cost as much again."""
        self._batch: Batch
        self._groups: list[_DecodeGroup] = []
        self._contexts: list[_ChunkContext] = []

    def begin(self, batch: Batch) -> None:
        self._batch = batch
        self._groups = _decode_groups(batch, self._most_tokens)
        self._contexts = [
            _ChunkContext(chunk, None if chunk.start == 0 else torch.from_numpy(table.astype(np.int64)), {})
            for chunk, table in zip(batch.chunks, batch.block_tables[batch.num_decodes :], strict=True)
        ]

    def attend(
        self, layer: int, query_THD: torch.Tensor, key_TGD: torch.Tensor, value_TGD: torch.Tensor, window: int
    ) -> torch.Tensor:
        rows = self._batch.write_rows_N
        if rows is None:
            self._pool.write(layer, self._batch.write_places_N, key_TGD, value_TGD)
        elif len(rows):
            self._pool.write(layer, self._batch.write_places_N, key_TGD[rows], value_TGD[rows])
        if len(self._groups) == 1 and not self._contexts:
            return self._decode(layer, self._groups[0], query_THD, window).flatten(1)
        out_THD = torch.empty_like(query_THD)
        for group in self._groups:
            out_THD[group.rows_N] = self._decode(layer, group, query_THD[group.rows_N], window)
        for context in self._contexts:
            rows_slice = slice(context.chunk.first_row, context.chunk.first_row + context.chunk.length)
            out_THD[rows_slice] = self._prefill(
                layer, context, query_THD[rows_slice], key_TGD[rows_slice], value_TGD[rows_slice], window
            )
        return out_THD.flatten(1)

    def _decode(self, layer: int, group: _DecodeGroup, query_NHD: torch.Tensor, window: int) -> torch.Tensor:
        kv_heads, head_dim = self._pool.keys_BKHD[layer].shape[2:]
        key_NGLD, value_NGLD = self._gather(layer, group.blocks_NB)
        query_NGRD = query_NHD.view(len(query_NHD), kv_heads, -1, head_dim)
        mask = group.masks.get(window)
        if mask is None:
            mask = group.masks[window] = _decode_mask(group, key_NGLD.shape[2], window, query_NHD.dtype)
        out_NGRD = scaled_dot_product_attention(query_NGRD, key_NGLD, value_NGLD, attn_mask=mask, scale=self._scale)
        return out_NGRD.reshape(query_NHD.shape)

    def _gather(self, layer: int, blocks_NB: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [N, G, L, D] of sequences, in scratch memory."""
        keys_BKGD, values_BKGD = self._pool.keys_BKHD[layer], self._pool.values_BKHD[layer]
        block = keys_BKGD[0].numel()
        size = 2 * blocks_NB.numel() * block
        if len(self._scratch) < size:
            self._scratch = torch.empty(size, dtype=keys_BKGD.dtype)
        both = self._scratch[:size].view(2, blocks_NB.numel(), block)
        blocks = blocks_NB.flatten()
        for out, pool_BKGD in zip(both, (keys_BKGD, values_BKGD), strict=True):
            torch.index_select(pool_BKGD.view(-1, block), 0, blocks, out=out)
        both_NLGD = both.view(2, len(blocks_NB), -1, *keys_BKGD.shape[2:])
        return both_NLGD[0].transpose(1, 2), both_NLGD[1].transpose(1, 2)

    def _prefill(
        self,
        layer: int,
        context: _ChunkContext,
        query_nHD: torch.Tensor,
        key_nGD: torch.Tensor,
        value_nGD: torch.Tensor,
        window: int,
    ) -> torch.Tensor:
        chunk = context.chunk
        if context.blocks_B is not None:
            key_nGD = self._pool.keys_BKHD[layer].index_select(0, context.blocks_B).flatten(0, 1)[: chunk.end]
            value_nGD = self._pool.values_BKHD[layer].index_select(0, context.blocks_B).flatten(0, 1)[: chunk.end]
        causal = context.blocks_B is None and (window == 0 or chunk.end <= window)
        mask = None
        if not causal:
            mask = context.masks.get(window)
            if mask is None:
                mask = context.masks[window] = _chunk_mask(chunk, window)
        repeats = query_nHD.shape[1] // key_nGD.shape[1]
        out_HnD = scaled_dot_product_attention(
            query_nHD.transpose(0, 1).unsqueeze(0),
            key_nGD.repeat_interleave(repeats, dim=1).transpose(0, 1).unsqueeze(0),
            value_nGD.repeat_interleave(repeats, dim=1).transpose(0, 1).unsqueeze(0),
            attn_mask=mask,
            is_causal=causal,
            scale=self._scale,
        )[0]
        return out_HnD.transpose(0, 1)


def _decode_groups(batch: Batch, most_tokens: int) -> list[_DecodeGroup]:
    """Sequences sorted by length, cut where padding would grow beyond PADDING_RATIO or the group beyond
    `most_tokens` with padding (one sequence may exceed it)."""
    lengths = batch.context_lengths[: batch.num_decodes]
    order = np.argsort(lengths, kind="stable")
    groups: list[_DecodeGroup] = []
    begin = 0
    for end in range(1, len(order) + 1):
        if end < len(order):
            longest = lengths[order[end]]
            if longest <= PADDING_RATIO * lengths[order[begin]] and (end + 1 - begin) * longest <= most_tokens:
                continue
        groups.append(_decode_group(batch, np.sort(order[begin:end])))
        begin = end
    return groups


def _decode_group(batch: Batch, members: np.ndarray) -> _DecodeGroup:
    tables = [batch.block_tables[member] for member in members]
    blocks = np.zeros((len(tables), max(len(table) for table in tables)), dtype=np.int64)
    for row, table in enumerate(tables):
        blocks[row, : len(table)] = table
    positions = batch.context_lengths[members] - 1
    return _DecodeGroup(
        torch.from_numpy(members), torch.from_numpy(blocks), torch.from_numpy(positions).unsqueeze(1), {}
    )


def _decode_mask(group: _DecodeGroup, length: int, window: int, dtype: torch.dtype) -> torch.Tensor:
    place_L = torch.arange(length)
    hidden_NL = place_L > group.positions_N1
    if window:
        hidden_NL |= place_L <= group.positions_N1 - window
    mask_NL = torch.zeros(hidden_NL.shape, dtype=dtype).masked_fill_(hidden_NL, float("-inf"))
    return mask_NL[:, None, None, :]


def _chunk_mask(chunk: ChunkRows, window: int) -> torch.Tensor:
    position_n1 = torch.arange(chunk.start, chunk.end).unsqueeze(1)
    place_L = torch.arange(chunk.end)
    visible_nL = place_L <= position_n1
    if window:
        visible_nL &= place_L > position_n1 - window
    return visible_nL
