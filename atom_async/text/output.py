"""Tokens to the text, token ids and logprobs that a client sees.

Invariants, over all deltas of one sequence:
- the texts, concatenated, are the decoded tokens up to the stop (a stop string, or a stop token);
- a token, with its logprobs, comes with or after the last character that it contributes to, in order, once;
- a token of which no character is shown because a stop cut it off never comes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from atom_async.text.detokenizer import IncrementalDetokenizer
from atom_async.text.stop import StopMatcher
from atom_async.text.tokenizer import Tokenizer

L = TypeVar("L")


@dataclass(slots=True)
class TextDelta(Generic[L]):
    """What became certain."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    """The tokens that are now fully shown."""
    text_offsets: list[int] = field(default_factory=list)
    """Where each one's text begins, in characters from the start of the whole output."""
    logprobs: list[L] | None = None
    """One a token, or None when none were given."""
    produced: int = 0
    """How many of the tokens pushed belong to the output: up to and with the one that completed a stop string, a
    hidden stop token included."""
    finished_by_stop: str | None = None
    """The stop string that ended the text."""

    @property
    def token_count(self) -> int:
        return len(self.token_ids)


@dataclass(slots=True)
class _Token(Generic[L]):
    token_id: int
    start: int
    end: int
    """Characters of the whole decoded text, stop strings included."""
    logprob: L | None


class TextAssembler(Generic[L]):
    """The output of one sequence. L is what the caller uses for a token's logprobs."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stop: Sequence[str] = (),
        include_stop: bool = False,
        skip_special_tokens: bool = True,
        continues_text: bool = False,
        min_tokens: int = 0,
    ) -> None:
        """`min_tokens`: stop strings are looked for only in the text of later tokens.
        `continues_text`: see IncrementalDetokenizer. Raises ValueError for an empty stop string."""
        self._tokenizer = tokenizer
        self._detokenizer = IncrementalDetokenizer(
            tokenizer, skip_special_tokens=skip_special_tokens, continues_text=continues_text
        )
        self._matcher = StopMatcher(stop, include_stop=include_stop) if stop else None
        self._include_stop = include_stop
        self._skip_special_tokens = skip_special_tokens
        self._min_tokens = min_tokens
        self._waiting: deque[_Token[L]] = deque()
        self._open = 0
        """How many of the last waiting tokens belong to a character that is not complete."""
        self._with_logprobs = False
        self._token_total = 0
        self._decoded = 0
        self._shown = 0

    @property
    def stopped_by(self) -> str | None:
        """The stop string that ended the text; what is pushed afterwards is not shown."""
        return self._matcher.matched if self._matcher else None

    def push(
        self, token_ids: Sequence[int], logprobs: Sequence[L] | None = None, *, stop_token_id: int | None = None
    ) -> TextDelta[L]:
        """`logprobs`: one a token. `stop_token_id`: the engine ended the output with this token, the
        last of `token_ids`; it is shown only when asked for."""
        hide_last = stop_token_id is not None and not self._shows_stop_token(stop_token_id)
        self._with_logprobs = self._with_logprobs or logprobs is not None
        pieces = []
        for index in range(len(token_ids) - hide_last):
            if self.stopped_by is not None:
                break
            pieces.append(self._add(token_ids[index], logprobs[index] if logprobs is not None else None))
        delta = self._delta("".join(pieces))
        delta.produced = len(pieces) if self.stopped_by is not None else len(token_ids)
        return delta

    def finish(self) -> TextDelta[L]:
        """Everything that was held back, when the sequence has ended."""
        if self.stopped_by is not None:
            return self._delta("")
        start, text = self._decoded, self._detokenizer.flush()
        self._decoded += len(text)
        self._complete_open_tokens(start, text)
        self._open = 0
        text = self._release(text)
        if self._matcher:
            text += self._matcher.flush()
        return self._delta(text)

    def _shows_stop_token(self, token_id: int) -> bool:
        special = token_id in self._tokenizer.special_ids
        return self._include_stop or (special and not self._skip_special_tokens)

    def _add(self, token_id: int, logprob: L | None) -> str:
        """Decodes one token and returns the text that is now certain."""
        start = self._decoded
        text = self._detokenizer.push_one(token_id)
        self._token_total += 1
        self._decoded += len(text)
        was_open = bool(self._open)
        self._complete_open_tokens(start, text)
        if was_open and text and not self._continues_character(token_id):
            start += 1  # the character before stays broken: its U+FFFD is not this token's text
        self._waiting.append(_Token(token_id, start, self._decoded, logprob))
        self._open = self._open + 1 if self._detokenizer.in_character else 0
        return self._release(text)

    def _continues_character(self, token_id: int) -> bool:
        """Whether the token's first byte is a UTF-8 continuation byte."""
        return self._tokenizer.token_bytes(token_id)[0] & 0xC0 == 0x80

    def _complete_open_tokens(self, start: int, text: str) -> None:
        """A character made of several tokens belongs to each of them: they end after it."""
        if text:
            for back in range(1, self._open + 1):
                self._waiting[-back].end = start + 1
            self._open = 0

    def _release(self, text: str) -> str:
        if self._matcher is None or self._token_total <= self._min_tokens:
            return text
        return self._matcher.push(text)

    def _delta(self, text: str) -> TextDelta[L]:
        self._shown += len(text)
        delta: TextDelta[L] = TextDelta(text=text, finished_by_stop=self.stopped_by)
        delta.logprobs = [] if self._with_logprobs else None
        while self._waiting and self._is_shown(self._waiting[0]):
            token = self._waiting.popleft()
            delta.token_ids.append(token.token_id)
            delta.text_offsets.append(token.start)
            if delta.logprobs is not None and token.logprob is not None:
                delta.logprobs.append(token.logprob)
        return delta

    def _is_shown(self, token: _Token[L]) -> bool:
        if self.stopped_by is not None:  # a token that the cut goes through is still partly shown
            return token.start < self._shown or token.end <= self._shown
        return token.end <= self._shown and len(self._waiting) > self._open
