"""Tools for models whose chat template knows none: the same Hermes format, written into the messages.

The tools go into the system message as JSON, earlier calls become `<tool_call>` blocks of the assistant,
and results become `<tool_response>` blocks of the user, as in the templates of Hermes and Qwen2.5. The
`hermes` parser reads the answers.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

Message = dict[str, Any]

_INSTRUCTIONS = """\
You can call functions. Their signatures, as JSON, one a line, between <tools> tags:
<tools>
{tools}
</tools>
To call a function, answer with its name and arguments as JSON between <tool_call> tags, once for each call:
<tool_call>
{{"name": "the function's name", "arguments": {{"argument": "value"}}}}
</tool_call>"""
_DEFAULT_SYSTEM = "You are a helpful assistant."


def messages_with_tools(messages: Sequence[Message], tools: Sequence[Message] | None) -> list[Message]:
    """`messages` are plain (`plain_messages`); `tools` are OpenAI's. Returns messages that have only
    roles and text."""
    plain = _merged_results([_as_text(message) for message in messages])
    return _with_instructions(plain, tools) if tools else plain


def _with_instructions(messages: list[Message], tools: Sequence[Message]) -> list[Message]:
    instructions = _INSTRUCTIONS.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
    has_system = bool(messages) and messages[0]["role"] == "system"
    system = messages[0]["content"] if has_system else _DEFAULT_SYSTEM
    first = {"role": "system", "content": f"{system}\n\n{instructions}"}
    return [first, *messages[has_system:]]


def _as_text(message: Message) -> Message:
    content = message.get("content", "")
    if message["role"] == "tool":
        return {"role": "tool", "content": f"<tool_response>\n{content}\n</tool_response>"}
    calls = [_call_text(call["function"]) for call in message.get("tool_calls", [])]
    return {"role": message["role"], "content": "\n".join(([content] if content else []) + calls)}


def _call_text(function: Message) -> str:
    call = {"name": function.get("name", ""), "arguments": function["arguments"]}
    return f"<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>"


def _merged_results(messages: list[Message]) -> list[Message]:
    """Results of one round of calls become one user message."""
    merged: list[Message] = []
    previous = ""
    for message in messages:
        role = message["role"]
        if role == "tool" == previous:
            merged[-1]["content"] += "\n" + message["content"]
        else:
            merged.append({"role": "user" if role == "tool" else role, "content": message["content"]})
        previous = role
    return merged
