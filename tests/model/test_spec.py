"""config.json and GGUF metadata to ModelSpec: against transformers' own reading, and refusals by name."""

import json
import struct
import warnings
from pathlib import Path
from typing import Any

import pytest
from gguf_bytes import EMBEDDING, Gguf, floats, llama

from atom_async.model.gguf_config import llama3_divisors
from atom_async.model.gguf_header import read_gguf_header
from atom_async.model.spec import check_tp, spec_from_gguf, spec_from_hf_config, valid_tp_sizes
from atom_async.wire.model import ModelSpec, RopeScaling

BASE = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}


def spec(**changes: Any) -> ModelSpec:
    return spec_from_hf_config({**BASE, **changes})


def refused(message: str, **changes: Any) -> None:
    with pytest.raises(ValueError, match=message):
        spec(**changes)


@pytest.fixture(scope="module")
def configurations() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import transformers
    return transformers


CASES: list[tuple[str, dict[str, Any]]] = [
    ("Llama", {}),
    ("Llama", {"rope_parameters": {"rope_theta": 500_000.0, **LLAMA3}, "tie_word_embeddings": True}),
    ("Llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 16}),
    ("Llama", {"rope_parameters": {"rope_theta": 10_000.0, "rope_type": "linear", "factor": 2.0}}),
    ("Mistral", {"sliding_window": 32}),
    ("Mistral", {"sliding_window": None, "head_dim": 32}),
    ("Qwen2", {}),
    ("Qwen2", {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 2}),
    ("Qwen3", {"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}}),
    ("Qwen3", {"attention_bias": True, "use_sliding_window": True, "sliding_window": 16, "max_window_layers": 0}),
]


@pytest.mark.parametrize(("name", "changes"), CASES)
def test_reads_what_transformers_writes(
    configurations: Any, tmp_path: Path, name: str, changes: dict[str, Any]
) -> None:
    """The config is saved by transformers, and each field compared with what its class holds."""
    plain = {key: value for key, value in BASE.items() if key != "architectures"}
    theirs = getattr(configurations, f"{name}Config")(**plain, **changes)
    theirs.architectures = [f"{name}ForCausalLM"]
    theirs.save_pretrained(tmp_path)
    ours = spec_from_hf_config(json.loads((tmp_path / "config.json").read_text()))
    assert ours.architecture == name.lower()
    assert ours.num_kv_heads == theirs.num_key_value_heads
    assert ours.head_dim == getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads
    assert ours.rope_theta == theirs.rope_parameters["rope_theta"]
    assert ours.tie_word_embeddings == theirs.tie_word_embeddings
    assert ours.qkv_bias == (name == "Qwen2" or getattr(theirs, "attention_bias", False))
    assert ours.output_bias == (name != "Qwen2" and getattr(theirs, "attention_bias", False))
    assert ours.mlp_bias == getattr(theirs, "mlp_bias", False)
    assert ours.qk_norm == (name == "Qwen3")
    assert ours.max_positions == theirs.max_position_embeddings
    kinds = getattr(theirs, "layer_types", None) or ["sliding_attention"] * 4
    window = getattr(theirs, "sliding_window", None)
    slides = [window if window and kind == "sliding_attention" else 0 for kind in kinds]
    assert list(ours.sliding_windows or [0] * 4) == slides
    kind = theirs.rope_parameters["rope_type"]
    assert (ours.rope_scaling.kind if ours.rope_scaling else "default") == kind


def test_both_spellings_of_rope_mean_the_same() -> None:
    new = spec(rope_parameters={"rope_theta": 500_000.0, **LLAMA3})
    assert spec(rope_theta=500_000.0, rope_scaling=LLAMA3) == new
    assert new.rope_scaling == RopeScaling(
        kind="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=128
    )
    old = {key: value for key, value in LLAMA3.items() if key != "rope_type"}
    assert spec(rope_theta=500_000.0, rope_scaling={"type": "llama3", **old}) == new
    nested = {"full_attention": {"rope_theta": 500_000.0, **LLAMA3}}
    assert spec(rope_parameters=nested) == new


def test_yarn_and_dynamic_reach_beyond_the_stated_limit() -> None:
    yarn = spec(rope_scaling={"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512})
    assert yarn.max_positions == 2048
    stated = spec(
        max_position_embeddings=2048,
        rope_scaling={"rope_type": "yarn", "original_max_position_embeddings": 512, "mscale": 0.7, "truncate": False},
    )
    assert stated.max_positions == 2048
    assert stated.rope_scaling is not None
    assert (stated.rope_scaling.factor, stated.rope_scaling.mscale, stated.rope_scaling.truncate) == (4.0, 0.7, False)
    dynamic = spec(rope_scaling={"type": "dynamic", "factor": 2.0})
    assert dynamic.max_positions == 1024
    assert dynamic.rope_scaling is not None
    assert dynamic.rope_scaling.original_max_positions == 512


def test_defaults_of_absent_keys_are_the_class_s() -> None:
    assert spec(num_key_value_heads=None).num_kv_heads == 8
    assert spec(head_dim=None).head_dim == 8
    assert spec(architectures=["Qwen3ForCausalLM"]).head_dim == 128
    assert spec(architectures=["MistralForCausalLM"]).sliding_windows == (4096,) * 4
    assert spec(architectures=None, model_type="qwen2").architecture == "qwen2"
    assert spec(torch_dtype="bfloat16").dtype == "bfloat16"
    assert spec(dtype="float16").dtype == "float16"


def test_layer_types_decide_where_they_are_given() -> None:
    kinds = ["full_attention", "sliding_attention"] * 2
    found = spec(architectures=["Qwen3ForCausalLM"], use_sliding_window=True, sliding_window=8, layer_types=kinds)
    assert found.sliding_windows == (0, 8, 0, 8)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["MixtralForCausalLM"]}, r"unknown architecture \(MixtralForCausalLM\); known ones: Llama"),
        ({"architectures": []}, "none given"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config: quantised checkpoints"),
        ({"num_local_experts": 8}, "mixture of experts"),
        ({"final_logit_softcapping": 30.0}, "soft-capping"),
        ({"attention_sinks": True}, "attention sinks"),
        ({"hidden_act": "gelu"}, "only silu"),
        ({"rope_scaling": {"type": "longrope", "factor": 2}}, "'longrope' is not implemented; implemented: linear"),
        ({"rope_scaling": {"type": "linear"}}, "lacks factor"),
        ({"rope_scaling": {"type": "llama3", "factor": 2}}, "lacks low_freq_factor, high_freq_factor"),
        ({"partial_rotary_factor": 0.5}, "partial rotary"),
        ({"rope_parameters": {"a": {"rope_theta": 1.0}, "b": {"rope_theta": 2.0}}}, "differ between layers"),
        ({"hidden_size": None}, "lacks hidden_size"),
        ({"vocab_size": -1}, "vocab_size is -1, not a positive integer"),
        ({"num_key_value_heads": 3}, "does not divide 8 heads"),
        ({"head_dim": 7}, "even one"),
        ({"torch_dtype": "float64"}, "float64 is not supported; supported: float32"),
    ],
)
def test_refusals_name_the_cause(changes: dict[str, Any], message: str) -> None:
    refused(message, **changes)


def test_bad_layer_types_are_refused() -> None:
    refused("layer_types", architectures=["Qwen2ForCausalLM"], use_sliding_window=True, layer_types=["linear"] * 4)
    refused("sliding_window is 0", architectures=["MistralForCausalLM"], sliding_window=0)


# GGUF ---------------------------------------------------------------------------------------------


def gguf_spec(folder: Path, metadata: dict[str, Any], tensors: dict[str, Any] | None = None) -> ModelSpec:
    path = folder / "model.gguf"
    path.write_bytes(Gguf(metadata, EMBEDDING | (tensors or {})).to_bytes())
    return spec_from_gguf(read_gguf_header(path))


def test_gguf_llama(tmp_path: Path) -> None:
    found = gguf_spec(tmp_path, llama())
    assert found == ModelSpec(
        architecture="llama",
        hidden_size=16,
        intermediate_size=24,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=4,
        vocab_size=8,
        max_positions=64,
        rms_norm_eps=1e-5,
        rope_theta=10_000.0,
        tie_word_embeddings=True,
    )


def test_gguf_tensors_show_biases_norms_and_untied_embeddings(tmp_path: Path) -> None:
    names = ("output.weight", "blk.0.attn_q.bias", "blk.0.attn_output.bias", "blk.0.ffn_down.bias")
    extra = {name: floats(16) for name in (*names, "blk.0.attn_q_norm.weight")}
    found = gguf_spec(tmp_path, llama(), extra)
    assert not found.tie_word_embeddings
    assert found.qkv_bias
    assert found.output_bias
    assert found.mlp_bias
    assert found.qk_norm


def test_gguf_llama3_scaling_is_recognised_from_its_tensor(tmp_path: Path) -> None:
    sizes = {f"llama.{key}": 16 for key in ("rope.dimension_count", "attention.key_length", "attention.value_length")}
    metadata = llama(**{**sizes, "llama.rope.freq_base": 500_000.0})
    tensor = ((8,), 0, struct.pack("<8f", *llama3_divisors(500_000.0, 16, 8.0)))
    found = gguf_spec(tmp_path, metadata, {"rope_freqs.weight": tensor})
    assert found.rope_scaling == RopeScaling(
        kind="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=8192
    )
    other = ((8,), 0, struct.pack("<8f", *range(1, 9)))
    with pytest.raises(ValueError, match=r"rope_freqs\.weight is not Llama 3's"):
        gguf_spec(tmp_path, metadata, {"rope_freqs.weight": other})


def test_llama3_divisors_agree_with_transformers(configurations: Any) -> None:
    """The published formula, by an independent implementation."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaling = LLAMA3 | {"factor": 32.0, "original_max_position_embeddings": 8192, "rope_theta": 500_000.0}
    config = configurations.LlamaConfig(hidden_size=128, num_attention_heads=1, rope_parameters=scaling)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, device="cpu")
    plain = [500_000.0 ** (-2 * index / 128) for index in range(64)]
    expected = [base / float(frequency) for base, frequency in zip(plain, scaled, strict=True)]
    assert llama3_divisors(500_000.0, 128, 32.0) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.0}, ("linear", 2.0, 32)),
        (
            {
                "llama.rope.scaling.type": "yarn",
                "llama.rope.scaling.factor": 4.0,
                "llama.rope.scaling.original_context_length": 16,
            },
            ("yarn", 4.0, 16),
        ),
    ],
)
def test_gguf_rope_scaling(tmp_path: Path, changes: dict[str, Any], expected: tuple[str, float, int]) -> None:
    scaling = gguf_spec(tmp_path, llama(**changes)).rope_scaling
    assert scaling is not None
    assert (scaling.kind, scaling.factor, scaling.original_max_positions) == expected


def test_gguf_sliding_window_and_per_layer_lists(tmp_path: Path) -> None:
    found = gguf_spec(tmp_path, llama(**{"llama.attention.sliding_window": 8, "llama.attention.head_count_kv": [2, 2]}))
    assert found.sliding_windows == (8, 8)
    assert found.num_kv_heads == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"general.architecture": "gemma3"}, "unknown architecture 'gemma3'; known ones: llama, qwen2, qwen3"),
        ({"llama.block_count": 0}, "block_count is 0"),
        ({"llama.expert_count": 8}, "mixture of experts"),
        ({"split.count": 3}, "split over several"),
        ({"llama.attention.head_count_kv": [1, 2]}, "differs between layers"),
        ({"llama.attention.head_count_kv": 3}, "3 KV heads do not divide 4 heads"),
        ({"llama.attention.value_length": 8}, "different length"),
        ({"llama.rope.dimension_count": 2}, "partial rotary"),
        ({"llama.rope.scaling.type": "longrope", "llama.rope.scaling.factor": 2.0}, "'longrope' is not implemented"),
        ({"llama.rope.scaling.attn_factor": 2.0}, "attn_factor are not implemented"),
        ({"llama.rope.freq_base": 0.0}, "not a positive number"),
    ],
)
def test_gguf_refusals_name_the_cause(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        gguf_spec(tmp_path, llama(**changes))


def test_gguf_without_a_key_or_embedding(tmp_path: Path) -> None:
    metadata = llama()
    del metadata["llama.context_length"]
    with pytest.raises(ValueError, match=r"lacks llama\.context_length"):
        gguf_spec(tmp_path, metadata)
    path = tmp_path / "empty.gguf"
    path.write_bytes(Gguf(llama()).to_bytes())
    with pytest.raises(ValueError, match="no token_embd"):
        spec_from_gguf(read_gguf_header(path))


# Tensor parallelism -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("heads", "kv_heads", "width", "sizes"),
    [
        (9, 3, 1536, (1, 3)),  # SmolLM2-135M: 9 ranks would split 1536 columns unevenly
        (32, 8, 14336, (1, 2, 4, 8, 16, 32)),
        (28, 4, 18944, (1, 2, 4)),
        (8, 1, 64, (1, 2, 4, 8)),
    ],
)
def test_tp_sizes(heads: int, kv_heads: int, width: int, sizes: tuple[int, ...]) -> None:
    model = spec(
        num_attention_heads=heads, num_key_value_heads=kv_heads, intermediate_size=width, hidden_size=heads * 2
    )
    assert valid_tp_sizes(model) == sizes
    for tp in sizes:
        check_tp(model, tp)


def test_a_tp_size_that_does_not_fit_is_refused_with_those_that_do() -> None:
    with pytest.raises(
        ValueError, match=r"size 5 does not fit a model with 8 heads, 2 KV heads .* that do: 1, 2, 4, 8"
    ):
        check_tp(spec(), 5)
    with pytest.raises(ValueError, match="size 0"):
        check_tp(spec(), 0)
