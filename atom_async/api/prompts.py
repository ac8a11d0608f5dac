"""From what a client sends to the token ids of its prompts."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import msgspec

from atom_async.api.errors import bad_request
from atom_async.api.requests import ChatMessage, CompletionRequest, Tool
from atom_async.api.state import Served, TextSide
from atom_async.text.chat_template import ChatTemplateError

LONG_TEXT = 8192
"""Characters from which a text is tokenized in a thread: about 2 ms, which other streams would wait."""
MAX_SEQUENCES = 1024
NOT_VARIABLES = frozenset({"self", "messages", "tools", "add_generation_prompt", "continue_final_message"})
"""What the template gets from elsewhere."""


@dataclass(frozen=True, slots=True)
class Prompt:
    token_ids: list[int]
    text: str | None
    """As the client sent it; None when it sent token ids."""


async def encode(side: TextSide, text: str, *, add_special_tokens: bool) -> list[int]:
    tokenizer = side.tokenizer
    if len(text) >= LONG_TEXT:
        return await asyncio.to_thread(tokenizer.encode, text, add_special_tokens=add_special_tokens)
    return tokenizer.encode(text, add_special_tokens=add_special_tokens)


async def completion_prompts(body: CompletionRequest, served: Served) -> list[Prompt]:
    """Raises ApiError."""
    add_special = body.add_special_tokens is not False
    items, n = _items(body.prompt), body.n or 1
    if len(items) * n > MAX_SEQUENCES:
        raise bad_request(
            f"{len(items)} prompts with {n} choices each; at most {MAX_SEQUENCES} are taken in one request", "prompt"
        )
    prompts = []
    for index, item in enumerate(items):
        if isinstance(item, str):
            ids = await encode(served.text, item, add_special_tokens=add_special)
            prompts.append(Prompt(ids, item))
        else:
            prompts.append(Prompt(_checked_ids(item, served), None))
        if not prompts[-1].token_ids:
            raise bad_request(f"prompt {index} is empty; it needs at least one token", "prompt")
    return prompts


def _items(prompt: str | list[str | int | list[int]]) -> list[str | list[int]]:
    if isinstance(prompt, str):
        return [prompt]
    kinds = {type(item) for item in prompt}
    if kinds == {int}:
        return [prompt]  # type: ignore[list-item]
    if len(kinds) != 1:
        raise bad_request(
            "prompt must be a text, texts, token ids, or lists of token ids, not a mix or nothing", "prompt"
        )
    return prompt  # type: ignore[return-value]


def _checked_ids(ids: list[int], served: Served) -> list[int]:
    vocabulary = served.engine.info.vocab_size
    if ids and max(ids) >= vocabulary:
        raise bad_request(f"prompt: {max(ids)} is no token id; they go from 0 to {vocabulary - 1}", "prompt")
    return ids


async def chat_prompt(
    served: Served,
    messages: list[ChatMessage],
    tools: list[Tool] | None,
    *,
    add_generation_prompt: bool,
    continue_final_message: bool,
    add_special_tokens: bool,
    template_kwargs: dict[str, Any] | None,
) -> Prompt:
    """Raises ApiError."""
    template = served.text.chat_template
    if template is None:
        raise bad_request(
            "this model has no chat template: use /v1/completions, or start the server with --chat-template", "messages"
        )
    fixed = next((name for name in template_kwargs or () if name in NOT_VARIABLES), None)
    if fixed is not None:
        raise bad_request(
            f"chat_template_kwargs: {fixed} is not a variable to set; use the field of the request",
            "chat_template_kwargs",
        )
    try:
        text = template.render_chat(
            [msgspec.to_builtins(message) for message in messages],
            [msgspec.to_builtins(tool) for tool in tools] if tools else None,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            **(template_kwargs or {}),
        )
    except ChatTemplateError as error:
        raise bad_request(str(error), "messages") from error
    ids = await encode(served.text, text, add_special_tokens=add_special_tokens)
    if not ids:
        raise bad_request("the chat template renders these messages as nothing", "messages")
    return Prompt(ids, text)


def truncated(prompt: Prompt, keep: int | None, most: int) -> Prompt:
    """The last `keep` tokens; -1: as many as `most`. Raises ApiError."""
    if keep is None:
        return prompt
    if keep != -1 and keep < 1:
        raise bad_request(f"truncate_prompt_tokens is {keep}; it must be -1 or at least 1", "truncate_prompt_tokens")
    keep = max(most, 1) if keep == -1 else keep
    return prompt if len(prompt.token_ids) <= keep else Prompt(prompt.token_ids[-keep:], None)
