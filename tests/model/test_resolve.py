"""MODEL in all its forms, and what each refusal says."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from gguf_bytes import EMBEDDING, Gguf, llama

from atom_async.config import EngineConfig
from atom_async.model import device
from atom_async.model.paths import cache_dir
from atom_async.model.resolve import ResolvedModel, resolve_model
from atom_async.text.tokenizer import Tokenizer

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 8,
    "max_position_embeddings": 128,
    "torch_dtype": "bfloat16",
    "eos_token_id": 3,
    "bos_token_id": 1,
}


def save_tokenizer(folder: Path) -> None:
    backend = tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0, "b": 1}, []))
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "<end>", "</s>"])
    backend.save(str(folder / "tokenizer.json"))


def write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A complete model folder with an empty weight file."""
    path = tmp_path / "tiny-model"
    path.mkdir()
    write_json(path / "config.json", CONFIG)
    write_json(path / "generation_config.json", {"eos_token_id": [5, 3]})
    write_json(
        path / "tokenizer_config.json",
        {"bos_token": "<s>", "eos_token": {"content": "<end>"}, "chat_template": "own"},
    )
    save_tokenizer(path)
    (path / "model.safetensors").write_bytes(bytes(64))
    return path


def resolve(source: Path | str, **options: Any) -> ResolvedModel:
    return resolve_model(EngineConfig(model=str(source), **{"device": "cpu", **options}))


def test_default_model(default_model: ResolvedModel) -> None:
    assert default_model.name == "SmolLM2-135M-Instruct"
    assert default_model.weights.kind == "gguf"
    assert len(default_model.weights.tensors) == 272
    assert default_model.max_model_len == 8192
    assert default_model.dtype == "float32"
    assert default_model.text.eos_ids == (2,)
    assert default_model.text.bos_token == "<|im_start|>"
    assert default_model.text.chat_template is not None
    assert resolve("smollm2-135m-instruct").weights == default_model.weights


def test_folder(folder: Path) -> None:
    model = resolve(folder)
    assert model.name == "tiny-model"
    assert model.weights.kind == "safetensors"
    assert model.weights.files == (str(folder / "model.safetensors"),)
    assert model.text.eos_ids == (5, 3), "of generation_config.json, config.json and tokenizer, in this order"
    assert (model.text.bos_id, model.text.bos_token, model.text.eos_token) == (2, "<s>", "<end>")
    assert model.text.chat_template == "own"
    assert model.max_model_len == 128
    assert model.spec.dtype == "bfloat16"
    assert Tokenizer.from_file(model.tokenizer_json).encode("ab") == [0, 1]


def test_the_tokenizer_s_end_is_an_end_too(folder: Path) -> None:
    write_json(folder / "tokenizer_config.json", {"eos_token": "</s>"})
    assert resolve(folder).text.eos_ids == (5, 3, 4)


def test_shards_come_from_the_index(folder: Path) -> None:
    write_json(folder / "model.safetensors.index.json", {"weight_map": {"x": "b.safetensors", "y": "a.safetensors"}})
    with pytest.raises(FileNotFoundError, match=r"lacks a\.safetensors, b\.safetensors, which its index names"):
        resolve(folder)
    for name in ("a", "b"):
        (folder / f"{name}.safetensors").write_bytes(bytes(64))
    assert [Path(name).name for name in resolve(folder).weights.files] == ["a.safetensors", "b.safetensors"]
    write_json(folder / "model.safetensors.index.json", {"weight_map": {"x": "../../etc/passwd"}})
    with pytest.raises(ValueError, match="no weight_map of file names"):
        resolve(folder)


def test_pickled_weights_are_refused(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"only pickled weights \(pytorch_model\.bin\)"):
        resolve(folder)
    with pytest.raises(ValueError, match="is a pickled checkpoint"):
        resolve(folder / "pytorch_model.bin")


@pytest.mark.parametrize(
    ("name", "content", "error", "message"),
    [
        ("model.safetensors", None, FileNotFoundError, "holds no weights"),
        ("model.safetensors", b"version https://git-lfs.github.com/spec/v1", ValueError, "run `git lfs pull`"),
        ("config.json", None, FileNotFoundError, "holds no config.json"),
        ("config.json", b"[1]", ValueError, "config.json is not a JSON object"),
        ("tokenizer.json", None, FileNotFoundError, "holds no tokenizer.json"),
        ("tokenizer_config.json", b"{", ValueError, "tokenizer_config.json is not a JSON object"),
    ],
)
def test_incomplete_folders(folder: Path, name: str, content: bytes | None, error: type, message: str) -> None:
    (folder / name).unlink()
    if content is not None:
        (folder / name).write_bytes(content)
    with pytest.raises(error, match=message):
        resolve(folder)


def test_hints_for_other_formats(folder: Path) -> None:
    (folder / "tokenizer.json").rename(folder / "tokenizer.model")
    with pytest.raises(FileNotFoundError, match=r"only tokenizer\.model: load and save it once"):
        resolve(folder)
    (folder / "config.json").rename(folder / "q4.gguf")
    with pytest.raises(FileNotFoundError, match=r"it holds q4\.gguf: give the path"):
        resolve(folder)


def test_dummy_weights_need_no_files(folder: Path, default_model: ResolvedModel) -> None:
    (folder / "model.safetensors").unlink()
    assert resolve(folder, load_format="dummy").weights.kind == "random"
    assert resolve("default", load_format="dummy").weights.kind == "random"


def test_another_tokenizer(folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    save_tokenizer(other)
    write_json(other / "tokenizer_config.json", {"eos_token": "</s>", "chat_template": "other"})
    for setting in (other, other / "tokenizer.json"):
        model = resolve(folder, tokenizer=str(setting))
        assert model.tokenizer_json == other / "tokenizer.json"
        assert model.text.chat_template == "other"
        assert model.text.eos_ids == (5, 3, 4)
    gguf = resolve("default", tokenizer=str(other))
    assert gguf.text.eos_ids == (4,)
    assert gguf.text.chat_template == "other"
    with pytest.raises(FileNotFoundError, match=r"neither a folder nor a file called tokenizer\.json"):
        resolve(folder, tokenizer="/nowhere")


def test_chat_template_files_come_first(folder: Path) -> None:
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    write_json(folder / "tokenizer_config.json", {"chat_template": named})
    text = resolve(folder).text
    assert (text.chat_template, text.tool_chat_template) == ("plain", "tools")
    (folder / "chat_template.jinja").write_text("file")
    text = resolve(folder).text
    assert (text.chat_template, text.tool_chat_template) == ("file", None)
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("file for tools")
    assert resolve(folder).text.tool_chat_template == "file for tools"


def test_limits_and_tp_are_checked(folder: Path) -> None:
    assert resolve(folder, max_model_len=64).max_model_len == 64
    with pytest.raises(ValueError, match="max_model_len 129 is over the 128 tokens"):
        resolve(folder, max_model_len=129)
    with pytest.raises(ValueError, match="sizes that do: 1, 2, 4"):
        resolve(folder, tp=3)


def test_dtype(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve(folder).dtype == "float32"
    assert resolve(folder, dtype="float16").dtype == "float16"
    assert resolve(folder, device="simulated").dtype == "bfloat16"
    monkeypatch.setattr(device, "torch_has_gpu_support", lambda: True)
    cuda = resolve(folder, device="cuda")
    assert (cuda.device, cuda.dtype) == ("cuda", "bfloat16")


def test_cuda_without_a_gpu_build_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "torch_has_gpu_support", lambda: False)
    with pytest.raises(ValueError, match="built without CUDA or ROCm"):
        resolve(folder, device="cuda")
    assert resolve(folder, device="auto").device == "cpu"


def test_torch_build_is_read_without_importing_it() -> None:
    import torch

    expected = torch.version.cuda is not None or torch.version.hip is not None
    assert device.torch_has_gpu_support() == expected


@pytest.mark.parametrize("source", ["no-such-thing", "./nowhere/model", "a/b/c"])
def test_unknown_source_says_what_there_is(source: str) -> None:
    with pytest.raises(FileNotFoundError, match=r"no folder, no \.gguf file, no hub id .* SmolLM2-135M-Instruct"):
        resolve(source)


def test_a_file_that_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(ValueError, match=r"neither a folder nor a \.gguf file"):
        resolve(tmp_path / "notes.txt")


def test_gguf_file_and_its_converted_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATOM_CACHE_DIR", str(tmp_path / "cache"))
    metadata = llama() | {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": ["a", "b", "ab", "<end>", "<turn>", "c", "d", "e"],
        "tokenizer.ggml.token_type": [1, 1, 1, 3, 3, 1, 1, 1],
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.eos_token_id": 3,
        "tokenizer.ggml.eot_token_id": 4,
        "tokenizer.chat_template": "t",
        "tokenizer.chat_template.tool_use": "u",
    }
    path = tmp_path / "tiny.gguf"
    path.write_bytes(Gguf(metadata, EMBEDDING).to_bytes())
    model = resolve(path)
    assert model.name == "tiny"
    assert model.text.eos_ids == (3, 4)
    assert (model.text.eos_token, model.text.bos_token) == ("<end>", None)
    assert (model.text.chat_template, model.text.tool_chat_template) == ("t", "u")
    assert model.tokenizer_json.is_relative_to(cache_dir())
    assert Tokenizer.from_file(model.tokenizer_json).encode("abc<end>") == [2, 5, 3]
    made = model.tokenizer_json.stat().st_mtime_ns
    shutil.copy(path, tmp_path / "copy.gguf")
    again = resolve(tmp_path / "copy.gguf")
    assert again.tokenizer_json == model.tokenizer_json, "the same header is the same tokenizer"
    assert again.tokenizer_json.stat().st_mtime_ns == made
    path.write_bytes(Gguf(metadata | {"tokenizer.ggml.pre": "gpt-2"}, EMBEDDING).to_bytes())
    assert resolve(path).tokenizer_json != model.tokenizer_json
