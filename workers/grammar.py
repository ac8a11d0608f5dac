"""Grammars that constrain the output, behind protocols; llguidance is the implementation."""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import numpy as np
import numpy.typing as npt
from llguidance import LLExecutor, LLMatcher, LLTokenizer

from atom_async.wire.grammar import on_deep_stack, parser_limits, to_llguidance
from atom_async.wire.sampling import Grammar

_COMPILED_KEPT = 64
_THREADS = 2

Words = npt.NDArray[np.int32]


class GrammarError(Exception):
    """The grammar cannot be compiled, or not be followed further; the message is fit for the client."""


class GrammarMatcher(Protocol):
    """Follows one output."""

    def advance(self, token_ids: Sequence[int]) -> None:
        """Takes the next tokens of the output. Raises GrammarError when they do not fit."""
        ...

    @property
    def finished(self) -> bool:
        """Complete, and nothing but an end token may follow."""
        ...


class GrammarFactory(Protocol):
    """Compiles grammars for one tokenizer and computes their masks."""

    mask_words: int
    """int32 words per mask; bit b of word w stands for token 32 * w + b."""

    def compile(self, grammar: Grammar) -> Future[GrammarMatcher]:
        """Starts in the background and returns at once. The future fails with GrammarError."""
        ...

    def fill_masks(self, matchers: Sequence[GrammarMatcher], out: Words) -> list[str]:
        """Allowed next tokens into `out`, int32 [len(matchers), mask_words].

        Returns one message per matcher, empty when its mask is good.
        """
        ...


def _plain(message: str) -> str:
    """Without what llguidance adds for its own developers: a mark where its parser's state would stand, a backtrace."""
    return message.partition("<backtrace>")[0].replace("<non-verbose/>", "").strip()


class LLGuidanceMatcher:
    def __init__(self, matcher: LLMatcher) -> None:
        self.raw = matcher

    def advance(self, token_ids: Sequence[int]) -> None:
        if not self.raw.consume_tokens(list(token_ids)):
            raise GrammarError(f"the grammar cannot go on: {_plain(self.raw.get_error()) or 'it has ended'}")

    @property
    def finished(self) -> bool:
        return bool(self.raw.is_stopped()) and not self.raw.is_error()


class LLGuidanceFactory:
    """The tokenizer is read in the background at once, since it takes from 0.2 s to over a second."""

    def __init__(self, tokenizer_json: str, vocab_size: int, end_token_ids: Sequence[int]) -> None:
        self.mask_words = (vocab_size + 31) // 32
        self._vocab_size = vocab_size
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="grammar")
        self._tokenizer = self._pool.submit(self._load, tokenizer_json, list(end_token_ids))
        self._compiled: OrderedDict[Grammar, Future[LLMatcher]] = OrderedDict()
        self._executor = LLExecutor(_THREADS)

    def _load(self, path: str, end_token_ids: list[int]) -> LLTokenizer:
        end = end_token_ids or None
        try:
            return LLTokenizer(path, n_vocab=self._vocab_size, eos_token=end)
        except ValueError as error:
            if "vocab size too small" not in str(error):
                raise GrammarError(f"the tokenizer cannot be used for grammars: {error}") from error
        # More tokens in the tokenizer than rows in the model: the mask is cut to the model's.
        tokenizer = LLTokenizer(path, eos_token=end)
        self.mask_words = (tokenizer.vocab_size + 31) // 32
        return tokenizer

    def compile(self, grammar: Grammar) -> Future[GrammarMatcher]:
        return self._pool.submit(self._matcher, self._prototype(grammar))

    def _prototype(self, grammar: Grammar) -> Future[LLMatcher]:
        """Many requests share one schema, and copying a compiled one takes microseconds."""
        found = self._compiled.get(grammar)
        if found is None:
            found = self._compiled[grammar] = self._pool.submit(on_deep_stack, functools.partial(self._build, grammar))
            if len(self._compiled) > _COMPILED_KEPT:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(grammar)
        return found

    def _build(self, grammar: Grammar) -> LLMatcher:
        tokenizer = self._tokenizer.result()
        try:
            source = to_llguidance(grammar)
        except ValueError as error:
            raise GrammarError(f"the grammar cannot be compiled: {_plain(str(error))}") from error
        matcher = LLMatcher(tokenizer, source, log_level=0, limits=parser_limits())
        if matcher.is_error():
            raise GrammarError(f"the grammar cannot be compiled: {_plain(matcher.get_error())}")
        return matcher

    @staticmethod
    def _matcher(prototype: Future[LLMatcher]) -> GrammarMatcher:
        # Submitted after its prototype to a first-in-first-out pool, so the prototype runs already.
        return LLGuidanceMatcher(prototype.result().deep_copy())

    def fill_masks(self, matchers: Sequence[GrammarMatcher], out: Words) -> list[str]:
        raw = [matcher.raw for matcher in matchers if isinstance(matcher, LLGuidanceMatcher)]
        if len(raw) != len(matchers):
            raise TypeError("fill_masks takes the matchers that this factory compiled")
        jobs = [(matcher, row) for row, matcher in enumerate(raw) if not matcher.is_error()]
        if jobs:
            self._executor.unsafe_compute_mask_ptr(jobs, out.ctypes.data, out.shape[1] * 4, len(out))
        return [_plain(matcher.get_error()) if matcher.is_error() else "" for matcher in raw]

    def close(self) -> None:
        """Ends the background threads; compilations that have not begun are dropped."""
        self._pool.shutdown(wait=False, cancel_futures=True)


def grammar_factory(tokenizer_json: str, vocab_size: int, end_token_ids: Sequence[int]) -> LLGuidanceFactory | None:
    """None when there is no tokenizer.json: then the model takes no grammars.

    vocab_size: columns of the logits, which may exceed the tokenizer's (such ids are never allowed) or fall
    short of it. end_token_ids: the ids that may end a complete output.
    """
    return LLGuidanceFactory(tokenizer_json, vocab_size, end_token_ids) if tokenizer_json else None
