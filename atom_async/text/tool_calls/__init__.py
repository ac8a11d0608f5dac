"""Tool calls in the model's output: which parser a model needs, and the parsers.

| name | written as |
|---|---|
| `hermes` | `<tool_call>{"name": …, "arguments": {…}}</tool_call>` (Hermes, Qwen2.5, Qwen3, SmolLM2) |
| `qwen_xml` | `<tool_call><function=NAME><parameter=KEY>…</parameter></function></tool_call>` (Qwen3-Coder) |
| `json` | the JSON object by itself (Llama 3, Mistral) |
| `none` | not at all: everything is content |
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from atom_async.text.tool_calls.bare_json import BareJsonParser
from atom_async.text.tool_calls.base import (
    ContentOnly,
    ParsedDelta,
    ToolCall,
    ToolCallDelta,
    ToolCallParser,
    join_deltas,
    parse_whole,
)
from atom_async.text.tool_calls.tagged import OPEN, TaggedParser
from atom_async.text.tool_calls.xml_call import FUNCTION

__all__ = [
    "PARSERS",
    "ParsedDelta",
    "ToolCall",
    "ToolCallDelta",
    "ToolCallParser",
    "detect_parser",
    "join_deltas",
    "make_parser",
    "parse_whole",
]

Tools = Sequence[dict[str, Any]]

PARSERS: dict[str, Callable[[Tools], ToolCallParser]] = {
    "hermes": lambda tools: TaggedParser(tools, xml=False),
    "qwen_xml": lambda tools: TaggedParser(tools, xml=True),
    "json": lambda tools: BareJsonParser(tools),
    "none": lambda tools: ContentOnly(),
}


def make_parser(name: str, tools: Tools = ()) -> ToolCallParser:
    """A parser for one message. `tools` is the request's list. Raises ValueError for an unknown name."""
    if name not in PARSERS:
        raise ValueError(f"unknown tool-call parser {name!r}; there are: {', '.join(PARSERS)}")
    return PARSERS[name](tools)


def detect_parser(template: str | None) -> str:
    """The parser for what a chat template tells its model to write. A template without tools gets them
    in Hermes' format (`tool_prompt`)."""
    if template is None or "tools" not in template:
        return "hermes"
    if FUNCTION in template:
        return "qwen_xml"
    if OPEN in template:
        return "hermes"
    return "json"
