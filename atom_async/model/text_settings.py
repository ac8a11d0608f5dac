"""What a model's files say of its text: chat templates, and the tokens that begin and end it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from atom_async.model.gguf_header import GgufHeader

TOOL_TEMPLATE = "tool_use"
_GGUF_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")


@dataclass(frozen=True, slots=True)
class TextSettings:
    chat_template: str | None
    tool_chat_template: str | None
    """For requests with tools, where the model has a separate one."""
    eos_ids: tuple[int, ...]
    """Every id that ends a generation."""
    bos_id: int | None
    bos_token: str | None
    eos_token: str | None


def gguf_text_settings(header: GgufHeader) -> TextSettings:
    metadata = header.metadata
    ids = [metadata.get(f"tokenizer.ggml.{key}") for key in _GGUF_END_KEYS]
    bos_id = metadata.get("tokenizer.ggml.bos_token_id")
    return TextSettings(
        chat_template=metadata.get("tokenizer.chat_template"),
        tool_chat_template=metadata.get(f"tokenizer.chat_template.{TOOL_TEMPLATE}"),
        eos_ids=_unique(index for index in ids if index is not None),
        bos_id=bos_id,
        bos_token=_gguf_token(header, bos_id),
        eos_token=_gguf_token(header, ids[0]),
    )


def _gguf_token(header: GgufHeader, index: int | None) -> str | None:
    tokens: list[str] = header.metadata.get("tokenizer.ggml.tokens", [])
    if index is None or not 0 <= index < len(tokens):
        return None
    return tokens[index]


def folder_text_settings(model: Path, tokenizer: Path, config: dict[str, Any]) -> TextSettings:
    """`model` is the folder of config.json (parsed: `config`) and generation_config.json; `tokenizer` that of
    tokenizer.json and tokenizer_config.json, often the same. Raises ValueError for broken JSON."""
    own = read_json(tokenizer / "tokenizer_config.json")
    eos_token = _token_text(own.get("eos_token"))
    bos_token = _token_text(own.get("bos_token"))
    ids = _added_token_ids(tokenizer / "tokenizer.json")
    ends = [*_as_ids(read_json(model / "generation_config.json").get("eos_token_id"))]
    ends += _as_ids(config.get("eos_token_id"))
    ends += _as_ids(ids.get(eos_token) if eos_token else None)
    bos_id = ids.get(bos_token) if bos_token else config.get("bos_token_id")
    plain, for_tools = _folder_templates(tokenizer, own)
    return TextSettings(plain, for_tools, _unique(ends), bos_id, bos_token, eos_token)


def read_json(path: Path) -> dict[str, Any]:
    """Empty when there is no such file. Raises ValueError when it is no JSON object."""
    if not path.is_file():
        return {}
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise ValueError(f"{path} is not a JSON object: {error}") from error


def _folder_templates(folder: Path, own: dict[str, Any]) -> tuple[str | None, str | None]:
    """The template files that transformers writes today, else the entry in tokenizer_config.json."""
    plain, for_tools = folder / "chat_template.jinja", folder / "additional_chat_templates" / f"{TOOL_TEMPLATE}.jinja"
    if plain.is_file():
        return plain.read_text(encoding="utf-8"), for_tools.read_text(encoding="utf-8") if for_tools.is_file() else None
    template = own.get("chat_template") or read_json(folder / "chat_template.json").get("chat_template")
    if isinstance(template, list):
        named = {entry["name"]: entry["template"] for entry in template}
        return named.get("default"), named.get(TOOL_TEMPLATE)
    return template, None


class _AddedToken(msgspec.Struct):
    id: int
    content: str


class _AddedTokens(msgspec.Struct):
    added_tokens: list[_AddedToken] = []


def _added_token_ids(path: Path) -> dict[str, int]:
    """Only the added tokens of a tokenizer.json, without building its vocabulary."""
    try:
        return {
            token.content: token.id for token in msgspec.json.decode(path.read_bytes(), type=_AddedTokens).added_tokens
        }
    except msgspec.DecodeError as error:
        raise ValueError(f"{path} is not a tokenizer.json: {error}") from error


def _token_text(value: Any) -> str | None:
    """tokenizer_config.json writes a token as text or as an object with `content`."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _as_ids(value: Any) -> list[int]:
    if value is None:
        return []
    return [int(item) for item in value] if isinstance(value, list) else [int(value)]


def _unique(ids: Iterable[int]) -> tuple[int, ...]:
    return tuple(dict.fromkeys(ids))
