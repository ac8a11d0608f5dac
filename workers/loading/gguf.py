"""Tensors of a GGUF file, dequantised to float32 row by row.

The index comes with the engine's first message, so the file's header is not parsed again here. A row of a
matrix is a whole number of quantisation blocks, so a rank dequantises only its rows; for a column shard it
dequantises all rows and keeps its columns.

Files of architecture `llama` (Mistral's too) store query and key rows with each head's two rotary halves
interleaved; `_uninterleave` puts them back into the order that Hugging Face checkpoints have.
"""

from __future__ import annotations

import math
import re

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from atom_async.wire.model import ModelSpec, TensorEntry, WeightSource

from .reader import Shape, check_shape

_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)")
_IN_LAYER = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_OUTSIDE = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_IGNORED = ("rope_freqs.weight",)


def gguf_name(name: str) -> str:
    """llama.cpp's name of a Hugging Face tensor. Raises KeyError for one that has none."""
    if name in _OUTSIDE:
        return _OUTSIDE[name]
    match = _LAYER.fullmatch(name)
    if match is None:
        raise KeyError(name)
    return f"blk.{match[1]}.{_IN_LAYER[match[2]]}.{match[3]}"


class GgufReader:
    """Satisfies `TensorReader`."""

    def __init__(self, source: WeightSource, spec: ModelSpec) -> None:
        (file,) = source.files
        self._file = file
        self._bytes = np.memmap(file, dtype=np.uint8, mode="r")
        self._entries = {entry.name: entry for entry in source.tensors}
        self._read: set[str] = set()
        self._head_dim = spec.head_dim
        self._interleaved = spec.architecture in ("llama", "mistral")

    def rows(self, name: str, shape: Shape, start: int, length: int) -> torch.Tensor:
        entry = self._entry(name, shape)
        values = self._dequantize(entry, start, length)
        if self._interleaved and (".self_attn.q_proj." in name or ".self_attn.k_proj." in name):
            values = self._uninterleave(values)
        return torch.from_numpy(values)

    def columns(self, name: str, shape: Shape, start: int, length: int) -> torch.Tensor:
        entry = self._entry(name, shape)
        return torch.from_numpy(self._dequantize(entry, 0, shape[0])[:, start : start + length])

    def unread(self) -> list[str]:
        return sorted(name for name in self._entries if name not in self._read and name not in _IGNORED)

    def _entry(self, name: str, shape: Shape) -> TensorEntry:
        entry = self._entries.get(gguf_name(name))
        if entry is None:
            raise ValueError(f"tensor {gguf_name(name)} is not in {self._file}")
        check_shape(entry.name, tuple(entry.shape), shape)
        self._read.add(entry.name)
        return entry

    def _dequantize(self, entry: TensorEntry, start: int, length: int) -> np.ndarray:
        """Rows [start, start + length) as float32, in memory of their own."""
        row = math.prod(entry.shape[1:])  # 1 for a vector, which is never quantised
        kind = GGMLQuantizationType(entry.ggml_type)
        block_elements, block_bytes = GGML_QUANT_SIZES[kind]
        row_bytes = row // block_elements * block_bytes
        begin = entry.offset + start * row_bytes
        raw = self._bytes[begin : begin + length * row_bytes].reshape(length, row_bytes)
        values = np.array(dequantize(raw, kind), dtype=np.float32)
        return values.reshape((length, *entry.shape[1:]))

    def _uninterleave(self, rows: np.ndarray) -> np.ndarray:
        half = self._head_dim // 2
        heads = rows.shape[0] // self._head_dim
        swapped = rows.reshape(heads, half, 2, *rows.shape[1:]).swapaxes(1, 2)
        return np.ascontiguousarray(swapped.reshape(rows.shape))
