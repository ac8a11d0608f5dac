"""The decoder-only transformer that Llama, Mistral, Qwen2 and Qwen3 are variants of.

What differs between them is data: biases, query/key norms, windows and rope scalings come from `ModelSpec`,
and which of them an architecture may have is `workers.models.VARIANTS`.

Shapes: T tokens of the step, E hidden size, H query heads and G KV heads of this rank, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

from workers.attention import AttentionBackend
from workers.batch import Batch
from workers.layers.embedding import VocabParallelEmbedding, VocabParallelHead
from workers.layers.linear import Linear, RowParallelLinear
from workers.layers.norm import RmsNorm
from workers.layers.rotary import Rotary, rotate


@dataclass(slots=True)
class Attention:
    """Fused QKV: rows of all query heads, then key heads, then value heads of this rank."""

    layer: int
    qkv: Linear
    output: RowParallelLinear
    query_norm: RmsNorm | None
    key_norm: RmsNorm | None
    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int

    def __call__(
        self, x_TE: torch.Tensor, cos_T1F: torch.Tensor, sin_T1F: torch.Tensor, backend: AttentionBackend
    ) -> torch.Tensor:
        turned = self.num_heads + self.num_kv_heads
        qkv_TXD = self.qkv(x_TE).view(len(x_TE), turned + self.num_kv_heads, self.head_dim)
        value_TGD = qkv_TXD[:, turned:]
        if self.query_norm is None or self.key_norm is None:
            both_TXD = rotate(qkv_TXD[:, :turned], cos_T1F, sin_T1F)
            query_THD, key_TGD = both_TXD[:, : self.num_heads], both_TXD[:, self.num_heads :]
        else:
            query_THD = rotate(self.query_norm(qkv_TXD[:, : self.num_heads]), cos_T1F, sin_T1F)
            key_TGD = rotate(self.key_norm(qkv_TXD[:, self.num_heads : turned]), cos_T1F, sin_T1F)
        return self.output(backend.attend(self.layer, query_THD, key_TGD, value_TGD, self.window))


@dataclass(slots=True)
class Mlp:
    """SwiGLU (Shazeer 2020, arXiv:2002.05202); gate and up are one matrix."""

    gate_up: Linear
    down: RowParallelLinear

    def __call__(self, x_TE: torch.Tensor) -> torch.Tensor:
        gate_TI, up_TI = self.gate_up(x_TE).chunk(2, dim=-1)
        return self.down(functional.silu(gate_TI).mul_(up_TI))


@dataclass(slots=True)
class Layer:
    input_norm: RmsNorm
    attention: Attention
    mlp_norm: RmsNorm
    mlp: Mlp


@dataclass(slots=True)
class Decoder:
    embedding: VocabParallelEmbedding
    layers: list[Layer]
    norm: RmsNorm
    head: VocabParallelHead
    rotary: Rotary

    def forward(self, batch: Batch, backend: AttentionBackend) -> torch.Tensor:
        """Hidden states [T, E] before the last norm. Writes the step's keys and values into the pool."""
        backend.begin(batch)
        x_TE = self.embedding(batch.ids_T)
        cos_T1F, sin_T1F = self.rotary.at(batch.positions_T)
        for layer in self.layers:
            x_TE = x_TE + layer.attention(layer.input_norm(x_TE), cos_T1F, sin_T1F, backend)
            x_TE = x_TE + layer.mlp(layer.mlp_norm(x_TE))
        return x_TE

    def logits(self, hidden_NE: torch.Tensor) -> torch.Tensor:
        """float32 [N, vocabulary] of some rows of `forward`'s result."""
        return self.head(self.norm(hidden_NE))
