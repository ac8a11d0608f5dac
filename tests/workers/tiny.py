"""Tiny random-weight models made by transformers, and their reference logits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers

from atom_async.model.spec import spec_from_hf_config
from atom_async.wire.messages import PROTOCOL_VERSION, WorkerInit
from atom_async.wire.model import ModelSpec, WeightSource

SIZE = {
    "vocab_size": 131,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 256,
    "initializer_range": 0.15,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": None,
}


def rope(kind: str, **settings: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 1000.0, **settings}}


ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-tied": ("Llama", {"tie_word_embeddings": True}),
    "llama-bias": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-head-dim": ("Llama", {"head_dim": 24}),
    "llama-linear": ("Llama", rope("linear", factor=4.0)),
    "llama-dynamic": ("Llama", rope("dynamic", factor=4.0)),
    "llama-llama3": (
        "Llama",
        rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64),
    ),
    "llama-yarn": ("Llama", rope("yarn", factor=4.0, original_max_position_embeddings=64)),
    "mistral": ("Mistral", {"sliding_window": None}),
    "mistral-window": ("Mistral", {"sliding_window": 11}),
    "qwen2": ("Qwen2", {}),
    "qwen2-window": ("Qwen2", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "qwen3-tied": ("Qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
}


class TinyModel:
    """A checkpoint on disk and the transformers model it came from, in float32."""

    def __init__(self, name: str, folder: Path, **overrides: Any) -> None:
        family, settings = ARCHITECTURES[name]
        config = getattr(transformers, f"{family}Config")(**{**SIZE, **settings, **overrides})
        torch.manual_seed(7)
        self.reference = getattr(transformers, f"{family}ForCausalLM")(config).eval().float()
        for parameter in self.reference.parameters():  # norms and biases too, or they would test nothing
            if parameter.dim() == 1:
                parameter.data.add_(torch.randn_like(parameter) * 0.2)
        self.reference.save_pretrained(folder)
        self.folder = folder

    @property
    def spec(self) -> ModelSpec:
        return spec_from_hf_config(json.loads((self.folder / "config.json").read_text()))

    @property
    def weights(self) -> WeightSource:
        return WeightSource(kind="safetensors", files=tuple(sorted(str(f) for f in self.folder.glob("*.safetensors"))))

    @torch.inference_mode()
    def logits(self, ids: list[int]) -> torch.Tensor:
        """float32 [len(ids), vocabulary]."""
        return self.reference(torch.tensor([ids])).logits[0].float()


def worker_init(spec: ModelSpec, weights: WeightSource, **settings: Any) -> WorkerInit:
    values: dict[str, Any] = {
        "protocol_version": PROTOCOL_VERSION,
        "rank": 0,
        "tp_size": 1,
        "model": spec,
        "weights": weights,
        "device": "cpu",
        "dtype": "float32",
        "seed": 0,
        "block_size": 4,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 256,
        "max_model_len": 256,
        "kv_cache_bytes": 1 << 22,
        "gpu_memory_utilization": 0.9,
        "threads": 1,
        "store_port": 0,
        "tokenizer_json": "",
        "end_token_ids": (1,),
        "simulation": "",
    }
    return WorkerInit(**(values | settings))
