"""Puts a `Decoder` together from a model's shape and a reader of its tensors, each rank its shard."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from atom_async.wire.model import ModelSpec
from workers.kv import kv_heads_per_rank
from workers.layers.embedding import VocabParallelEmbedding, VocabParallelHead, shard_rows
from workers.layers.linear import Linear, RowParallelLinear
from workers.layers.norm import RmsNorm
from workers.layers.rotary import Rotary
from workers.loading.reader import TensorReader
from workers.parallel import ParallelGroup

from .decoder import Attention, Decoder, Layer, Mlp


@dataclass(slots=True)
class Shard:
    """A contiguous part of one dimension: all of it where the part is the whole."""

    start: int
    length: int

    @classmethod
    def of(cls, total: int, rank: int, size: int) -> Shard:
        """An even share. Raises ValueError when there is none."""
        if total % size:
            raise ValueError(f"{total} do not divide evenly over {size} ranks")
        return cls(rank * total // size, total // size)


class Builder:
    def __init__(
        self,
        spec: ModelSpec,
        reader: TensorReader,
        group: ParallelGroup,
        *,
        dtype: torch.dtype,
        device: torch.device,
        max_model_len: int,
    ) -> None:
        self._spec = spec
        self._reader = reader
        self._group = group
        self._dtype = dtype
        self._device = device
        self._max_model_len = max_model_len
        rank, size = group.rank, group.size
        heads = Shard.of(spec.num_heads, rank, size)
        self._queries = Shard(heads.start * spec.head_dim, heads.length * spec.head_dim)
        kv_heads = kv_heads_per_rank(spec, size)
        first_kv = heads.start * spec.num_kv_heads // spec.num_heads
        self._keys = Shard(first_kv * spec.head_dim, kv_heads * spec.head_dim)
        self._inner = Shard.of(spec.intermediate_size, rank, size)

    def build(self, progress: Callable[[int, int], None]) -> Decoder:
        """Reads every tensor of this rank once. `progress(done, total)` after each layer."""
        spec = self._spec
        embedding = self._embedding()
        layers: list[Layer] = []
        for index in range(spec.num_layers):
            layers.append(self._layer(index))
            progress(index + 1, spec.num_layers)
        norm = self._norm("model.norm", spec.hidden_size)
        head = VocabParallelHead(
            embedding.weight_SH if spec.tie_word_embeddings else self._vocabulary("lm_head.weight"),
            spec.vocab_size,
            self._group,
        )
        rotary = Rotary(spec, self._max_model_len, self._dtype, self._device)
        return Decoder(embedding, layers, norm, head, rotary)

    def _layer(self, index: int) -> Layer:
        spec, prefix = self._spec, f"model.layers.{index}"
        window = spec.sliding_windows[index] if spec.sliding_windows else 0
        norms = (
            [self._norm(f"{prefix}.self_attn.{name}_norm", spec.head_dim) for name in "qk"]
            if spec.qk_norm
            else [None, None]
        )
        attention = Attention(
            layer=index,
            qkv=self._qkv(f"{prefix}.self_attn"),
            output=self._row_parallel(
                f"{prefix}.self_attn.o_proj",
                (spec.hidden_size, spec.num_heads * spec.head_dim),
                self._queries,
                bias=spec.output_bias,
            ),
            query_norm=norms[0],
            key_norm=norms[1],
            num_heads=self._queries.length // spec.head_dim,
            num_kv_heads=self._keys.length // spec.head_dim,
            head_dim=spec.head_dim,
            window=window,
        )
        return Layer(
            input_norm=self._norm(f"{prefix}.input_layernorm", spec.hidden_size),
            attention=attention,
            mlp_norm=self._norm(f"{prefix}.post_attention_layernorm", spec.hidden_size),
            mlp=self._mlp(f"{prefix}.mlp"),
        )

    def _qkv(self, prefix: str) -> Linear:
        spec = self._spec
        queries, keys = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        parts = [("q_proj", queries, self._queries), ("k_proj", keys, self._keys), ("v_proj", keys, self._keys)]
        return self._fused(prefix, parts, bias=spec.qkv_bias)

    def _mlp(self, prefix: str) -> Mlp:
        spec = self._spec
        parts = [(name, spec.intermediate_size, self._inner) for name in ("gate_proj", "up_proj")]
        down = self._row_parallel(
            f"{prefix}.down_proj", (spec.hidden_size, spec.intermediate_size), self._inner, bias=spec.mlp_bias
        )
        return Mlp(self._fused(prefix, parts, bias=spec.mlp_bias), down)

    def _fused(self, prefix: str, parts: list[tuple[str, int, Shard]], *, bias: bool) -> Linear:
        """Rows of several matrices over the same input, one below the other, filled in place."""
        rows = sum(shard.length for _, _, shard in parts)
        weight = torch.empty((rows, self._spec.hidden_size), dtype=self._dtype, device=self._device)
        bias_O = torch.empty(rows, dtype=self._dtype, device=self._device) if bias else None
        first = 0
        for name, total, shard in parts:
            rows_slice = slice(first, first + shard.length)
            shape = (total, self._spec.hidden_size)
            weight[rows_slice] = self._reader.rows(f"{prefix}.{name}.weight", shape, shard.start, shard.length)
            if bias_O is not None:
                bias_O[rows_slice] = self._reader.rows(f"{prefix}.{name}.bias", (total,), shard.start, shard.length)
            first += shard.length
        return Linear(weight, bias_O)

    def _row_parallel(self, name: str, shape: tuple[int, int], shard: Shard, *, bias: bool) -> RowParallelLinear:
        weight = self._put(self._reader.columns(f"{name}.weight", shape, shard.start, shard.length))
        bias_O = None
        if bias and self._group.rank == 0:
            bias_O = self._put(self._reader.rows(f"{name}.bias", shape[:1], 0, shape[0]))
        return RowParallelLinear(weight, bias_O, self._group)

    def _norm(self, name: str, size: int) -> RmsNorm:
        weight = self._put(self._reader.rows(f"{name}.weight", (size,), 0, size))
        return RmsNorm(weight, self._spec.rms_norm_eps)

    def _embedding(self) -> VocabParallelEmbedding:
        first, _, _ = shard_rows(self._spec.vocab_size, self._group.rank, self._group.size)
        return VocabParallelEmbedding(self._vocabulary("model.embed_tokens.weight"), first, self._group)

    def _vocabulary(self, name: str) -> torch.Tensor:
        spec = self._spec
        first, present, padded = shard_rows(spec.vocab_size, self._group.rank, self._group.size)
        shape = (spec.vocab_size, spec.hidden_size)
        if present == padded:
            return self._put(self._reader.rows(name, shape, first, present))
        weight = torch.zeros((padded, spec.hidden_size), dtype=self._dtype, device=self._device)
        if present > 0:
            weight[:present] = self._reader.rows(name, shape, first, present)
        return weight

    def _put(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(device=self._device, dtype=self._dtype).contiguous()
