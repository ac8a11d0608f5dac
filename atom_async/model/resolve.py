"""From the MODEL argument to everything that engine, workers and text side need to know of it.

MODEL is `default` or another catalog name, a `.gguf` file, a local folder, or a hub id, in that order of
precedence. Weights are safetensors or GGUF only: pickled checkpoints run code on loading and are refused.
"""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

import xxhash

from atom_async.config import EngineConfig
from atom_async.model import catalog, hub
from atom_async.model.device import Device, resolve_device
from atom_async.model.folder import folder_config, folder_weights, tokenizer_file, tokenizer_folder
from atom_async.model.gguf_header import GgufHeader, read_gguf_header
from atom_async.model.gguf_tokenizer import CONVERTER_VERSION, tokenizer_json_from_gguf
from atom_async.model.paths import tokenizers_dir
from atom_async.model.progress import Progress, no_progress
from atom_async.model.spec import check_tp, spec_from_gguf, spec_from_hf_config
from atom_async.model.text_settings import TextSettings, folder_text_settings, gguf_text_settings
from atom_async.wire.model import ModelSpec, WeightSource

DType = Literal["float32", "bfloat16", "float16"]
RANDOM_WEIGHTS = WeightSource(kind="random")


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """A model found on disk and understood; nothing of its weights is read yet."""

    name: str
    """For people: the catalog name, the hub id, or the folder's or file's name."""
    spec: ModelSpec
    weights: WeightSource
    device: Device
    dtype: DType
    """What the workers compute in."""
    max_model_len: int
    """Longest prompt plus output, tokens."""
    tokenizer_json: Path
    """For `text.tokenizer.Tokenizer.from_file`, with the ids and tokens in `text`."""
    text: TextSettings


def resolve_model(config: EngineConfig, progress: Progress = no_progress) -> ResolvedModel:
    """Blocks while it downloads what is missing.

    Raises FileNotFoundError, ValueError (what is wrong with the model or with a setting for it), or
    FetchError (a download that failed).
    """
    source = config.model
    if source == catalog.DEFAULT_ALIAS or _is_catalog_name(source):
        entry = catalog.find(source)
        return _from_gguf(catalog.fetch(entry, progress), entry.name, config)
    path = Path(source).expanduser()
    if path.is_file():
        return _from_file(path, config)
    if path.is_dir():
        return _from_folder(path, path.resolve().name, config)
    if hub.looks_like_hub_id(source):
        folder = hub.snapshot(source, config.revision, with_weights=config.load_format != "dummy")
        return _from_folder(folder, source, config)
    raise FileNotFoundError(
        f"model {source!r} is no folder, no .gguf file, no hub id (owner/name) and not in the catalog (default, "
        + ", ".join(model.name for model in catalog.CATALOG)
        + ")"
    )


def _is_catalog_name(source: str) -> bool:
    return not Path(source).exists() and any(source.lower() == model.name.lower() for model in catalog.CATALOG)


def _from_file(path: Path, config: EngineConfig) -> ResolvedModel:
    if path.suffix in (".bin", ".pt", ".pth", ".ckpt"):
        raise ValueError(f"{path} is a pickled checkpoint, which can run code on loading: convert it to safetensors")
    if path.suffix != ".gguf":
        raise ValueError(f"{path} is neither a folder nor a .gguf file")
    return _from_gguf(path.resolve(), path.stem, config)


def _from_gguf(path: Path, name: str, config: EngineConfig) -> ResolvedModel:
    header = read_gguf_header(path)
    text = gguf_text_settings(header)
    if config.tokenizer is None:
        tokenizer_json = _converted_tokenizer(header)
    else:
        own = tokenizer_folder(config.tokenizer)
        tokenizer_json = tokenizer_file(own)
        text = _overridden(text, folder_text_settings(own, own, {}))
    weights = WeightSource(kind="gguf", files=(str(path),), tensors=header.tensors)
    return _resolved(name, spec_from_gguf(header), weights, tokenizer_json, text, config)


def _from_folder(folder: Path, name: str, config: EngineConfig) -> ResolvedModel:
    folder = folder.resolve()
    settings = folder_config(folder)
    spec = spec_from_hf_config(settings)
    own = folder if config.tokenizer is None else tokenizer_folder(config.tokenizer)
    tokenizer_json = tokenizer_file(own)
    text = folder_text_settings(folder, own, settings)
    weights = RANDOM_WEIGHTS if config.load_format == "dummy" else folder_weights(folder)
    return _resolved(name, spec, weights, tokenizer_json, text, config)


def _overridden(text: TextSettings, other: TextSettings) -> TextSettings:
    """Another tokenizer brings its own tokens and templates, as far as it states them."""
    return TextSettings(
        chat_template=other.chat_template or text.chat_template,
        tool_chat_template=other.tool_chat_template if other.chat_template else text.tool_chat_template,
        eos_ids=other.eos_ids or text.eos_ids,
        bos_id=text.bos_id if other.bos_id is None else other.bos_id,
        bos_token=other.bos_token or text.bos_token,
        eos_token=other.eos_token or text.eos_token,
    )


def _resolved(
    name: str, spec: ModelSpec, weights: WeightSource, tokenizer_json: Path, text: TextSettings, config: EngineConfig
) -> ResolvedModel:
    check_tp(spec, config.tp)
    device = resolve_device(config.device)
    return ResolvedModel(
        name=name,
        spec=spec,
        weights=RANDOM_WEIGHTS if config.load_format == "dummy" else weights,
        device=device,
        dtype=_dtype(config, spec, device),
        max_model_len=_max_model_len(config, spec),
        tokenizer_json=tokenizer_json,
        text=text,
    )


def _dtype(config: EngineConfig, spec: ModelSpec, device: Device) -> DType:
    if config.dtype != "auto":
        return config.dtype
    return "float32" if device == "cpu" else cast(DType, spec.dtype)


def _max_model_len(config: EngineConfig, spec: ModelSpec) -> int:
    if config.max_model_len is None:
        return spec.max_positions
    if config.max_model_len > spec.max_positions:
        raise ValueError(
            f"max_model_len {config.max_model_len} is over the {spec.max_positions} tokens that the model was made for"
        )
    return config.max_model_len


def _converted_tokenizer(header: GgufHeader) -> Path:
    """Converted once; the file's name follows from the header's bytes, so another file is another one."""
    with header.path.open("rb") as file:
        digest = xxhash.xxh3_128_hexdigest(file.read(header.header_bytes))
    path = tokenizers_dir() / f"{digest}-v{CONVERTER_VERSION}.json"
    if not path.is_file():
        text = tokenizer_json_from_gguf(header.metadata)
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, encoding="utf-8", delete=False) as staged:
            staged.write(text)
        os.replace(staged.name, path)
    return path
