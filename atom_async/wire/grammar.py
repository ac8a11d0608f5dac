"""A `Grammar` in llguidance's terms: one definition for the side that checks and the side that enforces."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from llguidance import LLMatcher, LLParserLimits

from .sampling import GRAMMAR_KINDS, Grammar

T = TypeVar("T")

MAX_SOURCE_BYTES = 1 << 20
"""Longest grammar text taken; checking and compiling take time in proportion."""
STACK_BYTES = 1 << 30
"""llguidance follows references by recursion, about 3.3 KB of stack for each, and the shortest rule is 8 bytes of
source: 430 MB at most. A stack that overflows ends the process. Only what is used is ever committed."""

_starting = threading.Lock()
"""The stack size of new threads is one setting for the process."""

JSON_OPTIONS = {
    # One line, with a space after a comma or colon where the model wants one. With free whitespace a small
    # model can fill its whole output with line breaks; with none it is pushed off the spacing it learnt.
    # A schema's own "x-guidance" object overrides these.
    "whitespace_flexible": False,
    "item_separator": ", ?",
    "key_separator": ": ?",
}


def parser_limits() -> LLParserLimits:
    """llguidance's own bounds on time and memory; errors without a dump of the parser's state."""
    return LLParserLimits(verbose_errors=False)


def on_deep_stack(work: Callable[[], T]) -> T:
    """What `work` returns or raises, run on a stack deep enough for any grammar; nothing else may hand one to
    llguidance. A thread of its own each time, so that a deep one's memory goes back when it ends.
    """
    done: Future[T] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:
            done.set_exception(error)

    with _starting:
        before = threading.stack_size(STACK_BYTES)
        try:
            thread = threading.Thread(target=run, name="grammar")
            thread.start()
        finally:
            threading.stack_size(before)
    thread.join()
    return done.result()


def to_llguidance(grammar: Grammar) -> str:
    """The grammar as `LLMatcher` takes it.

    Raises ValueError for an unknown kind, one that is too long, and a schema that is not JSON.
    """
    if (size := len(grammar.source.encode())) > MAX_SOURCE_BYTES:
        raise ValueError(f"the grammar is {size} bytes long; at most {MAX_SOURCE_BYTES} are taken")
    if grammar.kind == "json_schema":
        return str(LLMatcher.grammar_from_json_schema(grammar.source, defaults=JSON_OPTIONS))
    if grammar.kind == "regex":
        return str(LLMatcher.grammar_from_regex(grammar.source))
    if grammar.kind == "lark":
        return str(LLMatcher.grammar_from_lark(grammar.source))
    raise ValueError(f"unknown grammar kind {grammar.kind!r}; known are {', '.join(GRAMMAR_KINDS)}")
