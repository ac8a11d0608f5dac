"""Write the embedded default model as a Hugging Face folder in float32, for engines that cannot read the GGUF.

python tools/export_default_model.py FOLDER
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

from atom_async.config import EngineConfig
from atom_async.model.resolve import ResolvedModel, resolve_model
from workers.loading.gguf import GgufReader


def tensor_shapes(model: ResolvedModel) -> dict[str, tuple[int, ...]]:
    spec = model.spec
    hidden, inner = spec.hidden_size, spec.intermediate_size
    queries, keys = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (spec.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    for index in range(spec.num_layers):
        prefix = f"model.layers.{index}."
        shapes |= {
            prefix + "input_layernorm.weight": (hidden,),
            prefix + "post_attention_layernorm.weight": (hidden,),
            prefix + "self_attn.q_proj.weight": (queries, hidden),
            prefix + "self_attn.k_proj.weight": (keys, hidden),
            prefix + "self_attn.v_proj.weight": (keys, hidden),
            prefix + "self_attn.o_proj.weight": (hidden, queries),
            prefix + "mlp.gate_proj.weight": (inner, hidden),
            prefix + "mlp.up_proj.weight": (inner, hidden),
            prefix + "mlp.down_proj.weight": (hidden, inner),
        }
    return shapes


def main() -> None:
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    model = resolve_model(EngineConfig(device="cpu"))
    spec, reader = model.spec, GgufReader(model.weights, model.spec)
    tensors: dict[str, torch.Tensor] = {}
    for name, shape in tensor_shapes(model).items():
        tensors[name] = reader.rows(name, shape, 0, shape[0]).contiguous()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": "float32",
        "hidden_act": "silu",
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "max_position_embeddings": spec.max_positions,
        "rms_norm_eps": spec.rms_norm_eps,
        "rope_theta": spec.rope_theta,
        "tie_word_embeddings": True,
        "bos_token_id": model.text.bos_id,
        "eos_token_id": model.text.eos_ids[0],
    }
    tokenizer = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": model.text.bos_token,
        "eos_token": model.text.eos_token,
        "chat_template": model.text.chat_template,
        "model_max_length": spec.max_positions,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer, indent=1))
    shutil.copyfile(model.tokenizer_json, folder / "tokenizer.json")
    print(folder)


if __name__ == "__main__":
    main()
