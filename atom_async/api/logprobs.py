"""Log-probabilities in the two shapes that OpenAI has for them, and vLLM's for prompts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from atom_async.api.responses import (
    ChatLogprobs,
    ChatTokenLogprob,
    CompletionLogprobs,
    PromptLogprob,
    PromptLogprobs,
    TopLogprob,
)
from atom_async.engine.client import TokenLogprob
from atom_async.text.tokenizer import Tokenizer

LOWEST = -9999.0
"""OpenAI's value for what is next to impossible; JSON has no infinity."""


def completion_logprobs(
    tokenizer: Tokenizer, entries: Iterable[TokenLogprob | None], token_ids: Iterable[int], offsets: Iterable[int]
) -> CompletionLogprobs:
    """One entry, id and offset a token. An entry is None where nothing comes before the token."""
    shape = CompletionLogprobs()
    for entry, token_id, offset in zip(entries, token_ids, offsets, strict=True):
        shape.tokens.append(token_name(tokenizer, token_id))
        shape.token_logprobs.append(None if entry is None else _finite(entry.logprob))
        shape.top_logprobs.append(None if entry is None else _top_by_name(tokenizer, entry))
        shape.text_offset.append(offset)
    return shape


def _top_by_name(tokenizer: Tokenizer, entry: TokenLogprob) -> dict[str, float]:
    """The most likely ones, and the token itself."""
    top = {token_name(tokenizer, token_id): _finite(logprob) for token_id, logprob in entry.top}
    top.setdefault(token_name(tokenizer, entry.token_id), _finite(entry.logprob))
    return top


def chat_logprobs(tokenizer: Tokenizer, entries: Sequence[TokenLogprob]) -> ChatLogprobs:
    return ChatLogprobs([_chat_token(tokenizer, entry) for entry in entries])


def _chat_token(tokenizer: Tokenizer, entry: TokenLogprob) -> ChatTokenLogprob:
    data = tokenizer.token_bytes(entry.token_id)
    top = []
    for token_id, logprob in entry.top:
        other = tokenizer.token_bytes(token_id)
        top.append(TopLogprob(other.decode(errors="replace"), _finite(logprob), list(other)))
    return ChatTokenLogprob(data.decode(errors="replace"), _finite(entry.logprob), list(data), top)


def prompt_logprobs(tokenizer: Tokenizer, entries: Iterable[TokenLogprob | None]) -> PromptLogprobs:
    return [None if entry is None else _prompt_token(tokenizer, entry) for entry in entries]


def _prompt_token(tokenizer: Tokenizer, entry: TokenLogprob) -> dict[str, PromptLogprob]:
    own = PromptLogprob(_finite(entry.logprob), entry.rank, tokenizer.token_text(entry.token_id))
    by_id = {str(entry.token_id): own}
    for rank, (token_id, logprob) in enumerate(entry.top, start=1):
        by_id.setdefault(str(token_id), PromptLogprob(_finite(logprob), rank, tokenizer.token_text(token_id)))
    return by_id


def token_name(tokenizer: Tokenizer, token_id: int) -> str:
    """Its text; `bytes:\\xf0\\x9f` for part of a character, as OpenAI writes it."""
    data = tokenizer.token_bytes(token_id)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST)
