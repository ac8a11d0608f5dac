"""What a worker must know of a model to build it, whatever file format it came from."""

from __future__ import annotations

from typing import Literal

import msgspec

Architecture = Literal["llama", "mistral", "qwen2", "qwen3"]


class RopeScaling(msgspec.Struct, frozen=True, kw_only=True):
    """Rotary scaling. Kinds: `linear` (position interpolation), `dynamic` (NTK), `llama3`, `yarn`."""

    kind: Literal["linear", "dynamic", "llama3", "yarn"]
    factor: float = 1.0
    original_max_positions: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


class ModelSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Shape of a decoder-only transformer of the Llama family. Sizes are for the whole model (TP 1)."""

    architecture: Architecture
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None = None
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    """Bias on the attention output projection."""
    mlp_bias: bool = False
    qk_norm: bool = False
    """RMS norm over head_dim on queries and keys (Qwen3)."""
    sliding_windows: tuple[int, ...] = ()
    """Per layer: attend only the last so many tokens, the current one included; 0 is full attention.
    Empty: full attention everywhere."""
    dtype: str = "float32"
    """The dtype the checkpoint was published in."""


class TensorEntry(msgspec.Struct, frozen=True, array_like=True):
    """One tensor of a GGUF file. `shape` is outermost first (torch order, elements)."""

    name: str
    shape: tuple[int, ...]
    ggml_type: int
    offset: int
    """Byte offset from the start of the file."""


class WeightSource(msgspec.Struct, frozen=True, kw_only=True):
    """Where the weights lie: a GGUF file with its tensor index, safetensors shards, or nothing."""

    kind: Literal["gguf", "safetensors", "random"]
    """`random`: seeded random weights, for tests and benchmarks of speed (`--load-format dummy`)."""
    files: tuple[str, ...] = ()
    tensors: tuple[TensorEntry, ...] = ()
    """GGUF only."""
