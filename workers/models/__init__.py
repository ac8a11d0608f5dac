"""Models by architecture: which variations of the one decoder each may have."""

from __future__ import annotations

from dataclasses import dataclass

from atom_async.wire.model import ModelSpec


@dataclass(frozen=True, slots=True)
class Variant:
    qkv_bias: bool = False
    qk_norm: bool = False
    sliding_window: bool = False


VARIANTS: dict[str, Variant] = {
    "llama": Variant(qkv_bias=True),
    "mistral": Variant(sliding_window=True),
    "qwen2": Variant(qkv_bias=True, sliding_window=True),
    "qwen3": Variant(qkv_bias=True, qk_norm=True, sliding_window=True),
}


def check_variant(spec: ModelSpec) -> None:
    """Raises ValueError for an architecture or a feature of it that this build does not have."""
    variant = VARIANTS.get(spec.architecture)
    if variant is None:
        raise ValueError(f"unknown architecture {spec.architecture!r}; known: {', '.join(VARIANTS)}")
    asked = {
        "qkv_bias": spec.qkv_bias,
        "qk_norm": spec.qk_norm,
        "sliding_window": any(spec.sliding_windows),
    }
    for name, wanted in asked.items():
        if wanted and not getattr(variant, name):
            raise ValueError(f"architecture {spec.architecture} has no {name}")
