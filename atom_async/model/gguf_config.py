"""GGUF metadata to ModelSpec.

A GGUF file names the shapes under its architecture's prefix (`llama.block_count`); biases, norms and
tied embeddings show only in which tensors exist. Llama 3's rotary scaling is not in the metadata at
all: the converter bakes it into the tensor `rope_freqs.weight`, from which it is recognised here.
"""

from __future__ import annotations

import math
import struct
from typing import Any, cast

from atom_async.model.gguf_header import GgufHeader
from atom_async.wire.model import Architecture, ModelSpec, RopeScaling

KNOWN_GGUF_ARCHITECTURES = ("llama", "qwen2", "qwen3")
_FLOAT32 = 0
_LLAMA3_ORIGINAL_POSITIONS = 8192
_LLAMA3_LOW, _LLAMA3_HIGH = 1.0, 4.0
# general.file_type of unquantised files. A quantised one says nothing of the checkpoint it was made of;
# bfloat16 has the range of every checkpoint.
_FILE_DTYPES = {0: "float32", 1: "float16", 32: "bfloat16"}


def spec_from_gguf(header: GgufHeader) -> ModelSpec:
    """Raises ValueError naming what is missing, unknown or not implemented."""
    architecture = header.metadata.get("general.architecture")
    if architecture not in KNOWN_GGUF_ARCHITECTURES:
        known = ", ".join(KNOWN_GGUF_ARCHITECTURES)
        raise ValueError(f"{header.path}: unknown architecture {architecture!r}; known ones: {known}")
    return _Reader(header, architecture).spec()


class _Reader:
    def __init__(self, header: GgufHeader, architecture: str) -> None:
        self.header = header
        self.architecture = architecture
        self.names = {tensor.name for tensor in header.tensors}

    def spec(self) -> ModelSpec:
        self._refuse_unsupported()
        layers = self._integer("block_count")
        heads = self._integer("attention.head_count")
        kv_heads = self._integer("attention.head_count_kv", heads)
        if heads % kv_heads:
            raise self._fail(f"{kv_heads} KV heads do not divide {heads} heads")
        hidden_size = self._integer("embedding_length")
        head_dim = self._head_dim(hidden_size // heads)
        theta = self._number("rope.freq_base", 10_000.0)
        positions = self._integer("context_length")
        window = self._integer("attention.sliding_window", 0)
        return ModelSpec(
            architecture=cast(Architecture, self.architecture),
            hidden_size=hidden_size,
            intermediate_size=self._integer("feed_forward_length"),
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            vocab_size=self._vocab_size(),
            max_positions=positions,
            rms_norm_eps=_short_float(self._number("attention.layer_norm_rms_epsilon", 1e-6)),
            rope_theta=theta,
            rope_scaling=self._rope_scaling(theta, head_dim, positions),
            tie_word_embeddings="output.weight" not in self.names,
            qkv_bias="blk.0.attn_q.bias" in self.names,
            output_bias="blk.0.attn_output.bias" in self.names,
            mlp_bias="blk.0.ffn_down.bias" in self.names,
            qk_norm="blk.0.attn_q_norm.weight" in self.names,
            sliding_windows=(window,) * layers if window else (),
            dtype=_FILE_DTYPES.get(self.header.metadata.get("general.file_type", -1), "bfloat16"),
        )

    def _fail(self, what: str) -> ValueError:
        return ValueError(f"{self.header.path}: {what}")

    def _value(self, key: str, default: Any = None) -> Any:
        value = self.header.metadata.get(f"{self.architecture}.{key}", default)
        if isinstance(value, list):
            if not value or any(item != value[0] for item in value):
                raise self._fail(f"{self.architecture}.{key} differs between layers, which is not implemented")
            value = value[0]
        return value

    def _integer(self, key: str, default: int | None = None) -> int:
        value = self._value(key, default)
        if value is None:
            raise self._fail(f"metadata lacks {self.architecture}.{key}")
        if not isinstance(value, int) or isinstance(value, bool) or value < (1 if default != 0 else 0):
            raise self._fail(f"{self.architecture}.{key} is {value!r}, not a positive integer")
        return value

    def _number(self, key: str, default: float) -> float:
        value = self._value(key, default)
        if not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
            raise self._fail(f"{self.architecture}.{key} is {value!r}, not a positive number")
        return float(value)

    def _refuse_unsupported(self) -> None:
        if self._value("expert_count", 0):
            raise self._fail("mixture of experts is not implemented")
        if self._value("rope.scale_linear", 1.0) != 1.0 or self._value("rope.scaling.attn_factor", 1.0) != 1.0:
            raise self._fail("rope.scale_linear and rope.scaling.attn_factor are not implemented")
        if self.header.metadata.get("split.count", 1) not in (0, 1):
            raise self._fail("a model split over several GGUF files is not supported; merge it with gguf-split")

    def _head_dim(self, default: int) -> int:
        head_dim = self._integer("attention.key_length", default)
        if self._integer("attention.value_length", head_dim) != head_dim:
            raise self._fail("keys and values of different length are not implemented")
        if self._integer("rope.dimension_count", head_dim) != head_dim:
            raise self._fail("partial rotary embedding is not implemented")
        return head_dim

    def _vocab_size(self) -> int:
        embedding = self.header.tensor("token_embd.weight")
        if embedding is None or len(embedding.shape) != 2:
            raise self._fail("there is no token_embd.weight matrix")
        return embedding.shape[0]

    def _rope_scaling(self, theta: float, head_dim: int, positions: int) -> RopeScaling | None:
        if self.header.has_tensor("rope_freqs.weight"):
            return self._baked_llama3(theta, head_dim)
        kind = self._value("rope.scaling.type", "none")
        factor = self._number("rope.scaling.factor", 1.0)
        if kind == "none" or factor == 1.0:
            return None
        original = self._integer("rope.scaling.original_context_length", max(1, int(positions / factor)))
        if kind == "linear":
            return RopeScaling(kind="linear", factor=factor, original_max_positions=original)
        if kind == "yarn":
            return RopeScaling(kind="yarn", factor=factor, original_max_positions=original)
        raise self._fail(f"rope scaling {kind!r} is not implemented; implemented: linear, yarn, llama3")

    def _baked_llama3(self, theta: float, head_dim: int) -> RopeScaling:
        """The frequencies' divisors give the factor; the rest is Llama 3's published constants, checked."""
        divisors = self._float32s("rope_freqs.weight", head_dim // 2)
        factor = max(divisors)
        expected = llama3_divisors(theta, head_dim, factor)
        if any(abs(a - b) > 1e-3 * b for a, b in zip(divisors, expected, strict=True)):
            raise self._fail("rope_freqs.weight is not Llama 3's rotary scaling, and no other kind is implemented")
        return RopeScaling(
            kind="llama3",
            factor=factor,
            original_max_positions=_LLAMA3_ORIGINAL_POSITIONS,
            low_freq_factor=_LLAMA3_LOW,
            high_freq_factor=_LLAMA3_HIGH,
        )

    def _float32s(self, name: str, count: int) -> tuple[float, ...]:
        tensor = self.header.tensor(name)
        if tensor is None or tensor.ggml_type != _FLOAT32 or math.prod(tensor.shape) != count:
            raise self._fail(f"{name} does not hold {count} float32 values")
        with self.header.path.open("rb") as file:
            file.seek(tensor.offset)
            return struct.unpack(f"<{count}f", file.read(4 * count))


def llama3_divisors(theta: float, head_dim: int, factor: float) -> list[float]:
    """What Llama 3.1's scaling divides each rotary frequency by, highest frequency first.

    Source: the Llama 3.1 reference implementation (`apply_scaling`), with its constants.
    """
    divisors = []
    for index in range(head_dim // 2):
        wavelength = 2 * math.pi * theta ** (2 * index / head_dim)
        turns = _LLAMA3_ORIGINAL_POSITIONS / wavelength
        if turns > _LLAMA3_HIGH:
            divisors.append(1.0)
        elif turns < _LLAMA3_LOW:
            divisors.append(factor)
        else:
            smooth = (turns - _LLAMA3_LOW) / (_LLAMA3_HIGH - _LLAMA3_LOW)
            divisors.append(1.0 / ((1.0 - smooth) / factor + smooth))
    return divisors


def _short_float(value: float) -> float:
    """The shortest decimal that is the same float32: 9.999999747378752e-06 was written as 1e-05."""
    for digits in range(1, 10):
        short = float(f"{value:.{digits}g}")
        if struct.pack("<f", short) == struct.pack("<f", value):
            return short
    return value
