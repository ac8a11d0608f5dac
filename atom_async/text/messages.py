"""OpenAI chat messages in the plain form that chat templates expect.

Templates were written for text content and for tool arguments as objects; clients send lists of parts
and arguments as JSON text. What no template can render (images, audio) is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

Message = dict[str, Any]
_TEXT_PARTS = {"text": "text", "refusal": "refusal"}
_REASONING = ("reasoning_content", "reasoning")


def plain_messages(messages: Sequence[Message]) -> list[Message]:
    """Copies; the input is left alone. Keys whose value is null are dropped, as templates test for
    presence. Raises ValueError that names the message for content that is not text."""
    return [_plain(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _plain(message: Message, where: str) -> Message:
    if not isinstance(message.get("role"), str):
        raise ValueError(f"{where}.role is missing")
    plain = {key: value for key, value in message.items() if value is not None}
    if isinstance(plain.get("content"), list):
        plain["content"] = _joined(plain["content"], f"{where}.content")
    if "tool_calls" in plain:
        plain["tool_calls"] = [_tool_call(call) for call in plain["tool_calls"]]
    reasoning = next((plain[key] for key in _REASONING if key in plain), None)
    if reasoning is not None:
        plain["reasoning_content"] = reasoning
    return plain


def _joined(parts: list[Any], where: str) -> str:
    """Text parts stand on lines of their own."""
    texts = []
    for index, part in enumerate(parts):
        kind = part.get("type") if isinstance(part, dict) else None
        key = _TEXT_PARTS.get(kind or "")
        if key is None or not isinstance(part.get(key), str):
            raise ValueError(f"{where}[{index}]: a part of type {kind!r} is not supported; only text parts are")
        texts.append(part[key])
    return "\n".join(texts)


def _tool_call(call: Message) -> Message:
    function = dict(call.get("function", {}))
    function["arguments"] = _arguments(function.get("arguments"))
    return {**call, "function": function}


def _arguments(value: Any) -> Any:
    """An object where the text is one; text that is none stays as it is, so that it is not lost."""
    if not isinstance(value, str):
        return value if value is not None else {}
    try:
        decoded = msgspec.json.decode(value) if value.strip() else {}
    except (msgspec.DecodeError, ValueError, RecursionError):
        return value
    return decoded if isinstance(decoded, dict) else value
