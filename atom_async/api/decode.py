"""From the bytes of a request to a checked struct, or an error that names the field."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import msgspec
from starlette.requests import Request

from atom_async.api.errors import ApiError, bad_request

MAX_BODY_BYTES = 64 << 20

HARMLESS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "safety_identifier": (lambda value: isinstance(value, str), "a string; it changes nothing"),
    "prompt_cache_key": (lambda value: isinstance(value, str), "a string; prefixes are found without it"),
    "store": (lambda value: value is False, "false: nothing is stored"),
    "service_tier": (lambda value: value in ("auto", "default"), "auto or default: there is one tier"),
    "modalities": (lambda value: value == ["text"], '["text"]: this model writes text'),
    "spaces_between_special_tokens": (lambda value: isinstance(value, bool), "a boolean; it changes nothing"),
    "use_beam_search": (lambda value: value is False, "false: there is no beam search"),
    "length_penalty": (lambda value: value == 1, "1: there is no beam search"),
}
"""Fields that are taken with values that change nothing: (which, in words). Null is always one."""

REFUSED = {
    "suffix": "insertion between a prompt and a suffix is not supported",
    "functions": "this form is obsolete; use tools",
    "function_call": "this form is obsolete; use tool_choice",
    "chat_template": "a template from a request is not run; start the server with --chat-template",
    "documents": "documents are not supported; write them into a message",
    "audio": "audio is not supported",
    "prediction": "predicted outputs are not supported",
    "web_search_options": "there is no web search",
    "reasoning_effort": "use chat_template_kwargs, with the variable that the model's chat template has for it",
    "guided_decoding_backend": "there is one backend, llguidance",
    "guided_whitespace_pattern": "set it in the schema: x-guidance, see llguidance",
    "logits_processors": "code from a request is not run",
    "lora_request": "adapters are not supported",
    "prompt_embeds": "prompts are text or token ids",
    "bad_words": "use logit_bias with token ids",
    "allowed_token_ids": "use guided_grammar or logit_bias",
    "kv_transfer_params": "disaggregated prefill is not supported",
}
"""Known fields that are not implemented, and what to do instead."""

MALFORMED = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What a decoder raises for bytes that are no JSON, or nested beyond all reason."""

T = TypeVar("T", bound=msgspec.Struct)
_UNKNOWN = re.compile(r"Object contains unknown field `(.+?)`")
_MISSING = re.compile(r"Object missing required field `(.+?)`")


class BodyDecoder(Generic[T]):
    """For one kind of body."""

    def __init__(self, kind: type[T]) -> None:
        self._kind = kind
        self._decoder = msgspec.json.Decoder(kind)

    async def read(self, request: Request) -> T:
        """Raises ApiError (400, 413 or 415)."""
        return self.decode(await read_bytes(request))

    def decode(self, data: bytes) -> T:
        """Raises ApiError (400)."""
        try:
            return self._decoder.decode(data)
        except msgspec.ValidationError as error:
            return self._without_harmless(_parsed(data), error)
        except MALFORMED as error:
            raise _malformed(error) from error

    def _without_harmless(self, body: Any, error: msgspec.ValidationError) -> T:
        if not isinstance(body, dict):
            raise bad_request("the body must be a JSON object") from error
        rest = {name: value for name, value in body.items() if not _is_harmless(name, value)}
        try:
            return msgspec.convert(rest, self._kind)
        except msgspec.ValidationError as again:
            raise self._explained(again) from again

    def _explained(self, error: msgspec.ValidationError) -> ApiError:
        text, _, path = str(error).partition(" - at `")
        param = path.rstrip("`").removeprefix("$").removeprefix(".")
        unknown = _UNKNOWN.match(text)
        if unknown:
            return self._unknown_field(unknown[1], param)
        missing = _MISSING.match(text)
        if missing:
            name = _joined(param, missing[1])
            return bad_request(f"{name} is required", name)
        return bad_request(f"{param}: {text[0].lower()}{text[1:]}" if param else text, param or None)

    def _unknown_field(self, name: str, parent: str) -> ApiError:
        where = _joined(parent, name)
        if parent:
            return bad_request(f"unknown field {where}", where, "unknown_field")
        if name in REFUSED:
            return bad_request(f"{name} is not supported: {REFUSED[name]}", name, "unsupported_parameter")
        known = sorted((*(field.name for field in msgspec.structs.fields(self._kind)), *HARMLESS))
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.8)
        hint = f"did you mean {near[0]}? " if near else ""
        return bad_request(f"unknown field {name}; {hint}Accepted: {', '.join(known)}", name, "unknown_field")


def _parsed(data: bytes) -> Any:
    """A value whose fields did not fit may be malformed further on: the decoder stops at the first fault."""
    try:
        return msgspec.json.decode(data)
    except MALFORMED as error:
        raise _malformed(error) from error


def _malformed(error: Exception) -> ApiError:
    return bad_request(f"the body is not valid JSON: {error}")


def _joined(parent: str, name: str) -> str:
    return f"{parent}.{name}" if parent else name


def _is_harmless(name: str, value: Any) -> bool:
    """Raises ApiError for a field that is taken with other values only."""
    if name in REFUSED:
        return value is None
    if name not in HARMLESS:
        return False
    accepts, in_words = HARMLESS[name]
    if value is not None and not accepts(value):
        raise bad_request(f"{name}: this value is not supported; accepted: {in_words}", name, "unsupported_parameter")
    return True


async def read_bytes(request: Request) -> bytes:
    """The whole body. Raises ApiError (413, 415)."""
    kind = request.headers.get("content-type", "application/json").split(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        raise ApiError(415, f"the content type is {kind}; send application/json")
    chunks, size = [], 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > MAX_BODY_BYTES:
            raise ApiError(413, f"the body is longer than {MAX_BODY_BYTES} bytes", code="body_too_large")
        chunks.append(chunk)
    return b"".join(chunks)
