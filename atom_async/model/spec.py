"""ModelSpec from whatever describes a model, and the tensor-parallel sizes that fit it."""

from __future__ import annotations

from atom_async.model.gguf_config import KNOWN_GGUF_ARCHITECTURES, spec_from_gguf
from atom_async.model.hf_config import KNOWN_ARCHITECTURES, spec_from_hf_config
from atom_async.wire.model import ModelSpec

__all__ = [
    "KNOWN_ARCHITECTURES",
    "KNOWN_GGUF_ARCHITECTURES",
    "check_tp",
    "spec_from_gguf",
    "spec_from_hf_config",
    "valid_tp_sizes",
]


def valid_tp_sizes(spec: ModelSpec) -> tuple[int, ...]:
    """Every TP size whose ranks get equal shares, ascending.

    Each rank holds num_heads / tp query heads and intermediate_size / tp MLP columns. KV heads are
    either divided too, or each is replicated on tp / num_kv_heads ranks. The vocabulary is padded.
    """
    return tuple(tp for tp in range(1, spec.num_heads + 1) if _divides(spec, tp))


def _divides(spec: ModelSpec, tp: int) -> bool:
    kv_heads_fit = spec.num_kv_heads % tp == 0 or tp % spec.num_kv_heads == 0
    return spec.num_heads % tp == 0 and spec.intermediate_size % tp == 0 and kv_heads_fit


def check_tp(spec: ModelSpec, tp: int) -> None:
    """Raises ValueError with the sizes that work."""
    if tp < 1 or not _divides(spec, tp):
        sizes = ", ".join(map(str, valid_tp_sizes(spec)))
        raise ValueError(
            f"tensor-parallel size {tp} does not fit a model with {spec.num_heads} heads, {spec.num_kv_heads} KV heads "
            f"and MLP width {spec.intermediate_size}; sizes that do: {sizes}"
        )
