"""Hugging Face `config.json` to ModelSpec.

Reads both spellings that are in use: `rope_theta` + `rope_scaling` (transformers 4) and
`rope_parameters` (transformers 5), `torch_dtype` and `dtype`. Whatever would change the model's output
and is not implemented is refused by name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

from atom_async.wire.model import Architecture, ModelSpec, RopeScaling

Config = dict[str, Any]


@dataclass(frozen=True, slots=True)
class _Family:
    """What a class of models fixes, and the values its configuration class assumes for absent keys."""

    name: Architecture
    max_positions: int
    num_kv_heads: int | None = None
    head_dim: int | None = None
    sliding_window: int | None = None


_FAMILIES = {
    "LlamaForCausalLM": _Family("llama", max_positions=2048),
    "MistralForCausalLM": _Family("mistral", max_positions=131_072, num_kv_heads=8, sliding_window=4096),
    "Qwen2ForCausalLM": _Family("qwen2", max_positions=32_768, num_kv_heads=32, sliding_window=4096),
    "Qwen3ForCausalLM": _Family("qwen3", max_positions=32_768, num_kv_heads=32, head_dim=128, sliding_window=4096),
}
KNOWN_ARCHITECTURES = tuple(_FAMILIES)
_ROPE_KINDS = ("linear", "dynamic", "llama3", "yarn")
_DTYPES = ("float32", "bfloat16", "float16")
_REFUSED_WHEN_SET = {
    "quantization_config": "quantised checkpoints (other than GGUF)",
    "compression_config": "quantised checkpoints (other than GGUF)",
    "attn_logit_softcapping": "attention logit soft-capping",
    "final_logit_softcapping": "final logit soft-capping",
    "attention_sink": "attention sinks",
    "attention_sinks": "attention sinks",
    "num_experts": "mixture of experts",
    "num_local_experts": "mixture of experts",
    "vision_config": "image input",
    "audio_config": "audio input",
}


def spec_from_hf_config(config: Config) -> ModelSpec:
    """`config` is the parsed config.json.

    Raises ValueError naming what is missing, unknown or not implemented.
    """
    family = _family(config)
    _refuse_unsupported(config)
    heads = _positive(config, "num_attention_heads")
    kv_heads = _kv_heads(config, family, heads)
    layers = _positive(config, "num_hidden_layers")
    max_positions = _positive(config, "max_position_embeddings", family.max_positions)
    theta, scaling = _rope(config, max_positions)
    attention_bias = bool(config.get("attention_bias", False))
    return ModelSpec(
        architecture=family.name,
        hidden_size=_positive(config, "hidden_size"),
        intermediate_size=_positive(config, "intermediate_size"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=_head_dim(config, family, heads),
        vocab_size=_positive(config, "vocab_size"),
        max_positions=_reach(max_positions, scaling),
        rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        rope_theta=theta,
        rope_scaling=scaling,
        tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=family.name == "qwen2" or (family.name in ("llama", "qwen3") and attention_bias),
        output_bias=family.name in ("llama", "qwen3") and attention_bias,
        mlp_bias=family.name == "llama" and bool(config.get("mlp_bias", False)),
        qk_norm=family.name == "qwen3",
        sliding_windows=_sliding_windows(config, family, layers),
        dtype=_dtype(config),
    )


def _family(config: Config) -> _Family:
    names = config.get("architectures") or []
    for name in names:
        if name in _FAMILIES:
            return _FAMILIES[name]
    if not names:
        for family in _FAMILIES.values():
            if family.name == config.get("model_type"):
                return family
    found = ", ".join(names) or config.get("model_type") or "none given"
    raise ValueError(f"unknown architecture ({found}); known ones: {', '.join(KNOWN_ARCHITECTURES)}")


def _refuse_unsupported(config: Config) -> None:
    for key, what in _REFUSED_WHEN_SET.items():
        if config.get(key):
            raise ValueError(f"config.json sets {key}: {what} is not implemented")
    activation = config.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise ValueError(f"config.json sets hidden_act to {activation!r}; only silu is implemented")


def _positive(config: Config, key: str, default: int | None = None) -> int:
    value = config.get(key, default)
    if value is None:
        raise ValueError(f"config.json lacks {key}")
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"config.json: {key} is {value!r}, not a positive integer")
    return value


def _kv_heads(config: Config, family: _Family, heads: int) -> int:
    absent = family.num_kv_heads or heads
    value = absent if "num_key_value_heads" not in config else config["num_key_value_heads"] or heads
    if not isinstance(value, int) or value < 1 or heads % value:
        raise ValueError(f"config.json: num_key_value_heads is {value!r}, which does not divide {heads} heads")
    return value


def _head_dim(config: Config, family: _Family, heads: int) -> int:
    if config.get("head_dim") is not None:
        head_dim = _positive(config, "head_dim")
    else:
        head_dim = family.head_dim or _positive(config, "hidden_size") // heads
    if head_dim % 2:
        raise ValueError(f"head_dim is {head_dim}; rotary embeddings need an even one")
    return head_dim


def _dtype(config: Config) -> str:
    value = config.get("dtype") or config.get("torch_dtype") or "float32"
    name = str(value).removeprefix("torch.")
    if name not in _DTYPES:
        raise ValueError(f"config.json: dtype {name} is not supported; supported: {', '.join(_DTYPES)}")
    return name


# Rotary embedding ---------------------------------------------------------------------------------


def _rope(config: Config, max_positions: int) -> tuple[float, RopeScaling | None]:
    parameters = _rope_parameters(config)
    if float(parameters.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0) != 1.0:
        raise ValueError("config.json sets partial_rotary_factor: partial rotary embedding is not implemented")
    theta = parameters.get("rope_theta") or config.get("rope_theta") or config.get("default_theta") or 10_000.0
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    if kind == "default":
        return float(theta), None
    if kind not in _ROPE_KINDS:
        raise ValueError(f"rope scaling {kind!r} is not implemented; implemented: {', '.join(_ROPE_KINDS)}")
    return float(theta), _rope_scaling(kind, parameters, config, max_positions)


def _rope_parameters(config: Config) -> Config:
    """One flat mapping, also where transformers 5 nests one per layer type and all are equal."""
    parameters = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(parameters, dict):
        raise ValueError("config.json: rope parameters are not an object")
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    if not nested:
        return parameters
    if any(value != nested[0] for value in nested):
        raise ValueError("config.json: rope parameters that differ between layers are not implemented")
    return cast(Config, nested[0])


def _rope_scaling(kind: str, parameters: Config, config: Config, max_positions: int) -> RopeScaling:
    original = int(
        parameters.get("original_max_position_embeddings")
        or config.get("original_max_position_embeddings")
        or max_positions
    )
    if kind == "dynamic":
        # Dynamic NTK stretches whatever goes beyond the model's own limit, whatever else is stated.
        original = max_positions
    factor = parameters.get("factor")
    if factor is None:
        if kind != "yarn" or original >= max_positions:
            raise ValueError(f"config.json: rope scaling {kind!r} lacks factor")
        factor = max_positions / original
    if kind == "llama3":
        _require(parameters, kind, "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    return RopeScaling(
        kind=cast(Any, kind),
        factor=float(factor),
        original_max_positions=original,
        low_freq_factor=float(parameters.get("low_freq_factor") or 1.0),
        high_freq_factor=float(parameters.get("high_freq_factor") or 4.0),
        beta_fast=float(parameters.get("beta_fast") or 32.0),
        beta_slow=float(parameters.get("beta_slow") or 1.0),
        attention_factor=_optional_float(parameters, "attention_factor"),
        mscale=_optional_float(parameters, "mscale"),
        mscale_all_dim=_optional_float(parameters, "mscale_all_dim"),
        truncate=bool(parameters.get("truncate", True)),
    )


def _require(parameters: Config, kind: str, *keys: str) -> None:
    missing = [key for key in keys if parameters.get(key) is None]
    if missing:
        raise ValueError(f"config.json: rope scaling {kind!r} lacks {', '.join(missing)}")


def _optional_float(parameters: Config, key: str) -> float | None:
    value = parameters.get(key)
    return None if value is None else float(value)


def _reach(max_positions: int, scaling: RopeScaling | None) -> int:
    """Positions the model can use. YaRN and dynamic NTK are often switched on in a config that still
    states the original limit; the other kinds state the final one."""
    if scaling is None or scaling.kind not in ("yarn", "dynamic"):
        return max_positions
    return max(max_positions, int(scaling.original_max_positions * scaling.factor))


# Sliding window -----------------------------------------------------------------------------------


def _sliding_windows(config: Config, family: _Family, layers: int) -> tuple[int, ...]:
    window = config.get("sliding_window", family.sliding_window)
    if family.name in ("qwen2", "qwen3") and not config.get("use_sliding_window", False):
        window = None
    slides = _sliding_layers(config, family, layers, window)
    if not any(slides):
        return ()
    if not isinstance(window, int) or window < 1:
        raise ValueError(f"config.json: sliding_window is {window!r}, not a positive integer")
    return tuple(window if slide else 0 for slide in slides)


def _sliding_layers(config: Config, family: _Family, layers: int, window: Any) -> list[bool]:
    kinds = config.get("layer_types")
    if kinds and family.name in ("qwen2", "qwen3"):
        unknown = set(kinds) - {"full_attention", "sliding_attention"}
        if unknown or len(kinds) != layers:
            raise ValueError(f"config.json: layer_types must name {layers} layers, full_attention or sliding_attention")
        return [kind == "sliding_attention" for kind in kinds]
    if window is None or family.name == "llama":
        return [False] * layers
    first = int(config.get("max_window_layers", 28)) if family.name != "mistral" else 0
    return [layer >= first for layer in range(layers)]
