"""A `Grammar` in llguidance's terms: one definition for the side that checks and the side that enforces."""

from __future__ import annotations

from llguidance import LLMatcher, LLParserLimits

from .sampling import GRAMMAR_KINDS, Grammar

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


def to_llguidance(grammar: Grammar) -> str:
    """The grammar as `LLMatcher` takes it.

    Raises ValueError for an unknown kind and for a schema that is not JSON.
    """
    if grammar.kind == "json_schema":
        return str(LLMatcher.grammar_from_json_schema(grammar.source, defaults=JSON_OPTIONS))
    if grammar.kind == "regex":
        return str(LLMatcher.grammar_from_regex(grammar.source))
    if grammar.kind == "lark":
        return str(LLMatcher.grammar_from_lark(grammar.source))
    raise ValueError(f"unknown grammar kind {grammar.kind!r}; known are {', '.join(GRAMMAR_KINDS)}")
