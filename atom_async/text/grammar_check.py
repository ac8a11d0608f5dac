"""Whether a grammar can be enforced, found out before the request is accepted."""

from __future__ import annotations

import json
from collections.abc import Sequence

from llguidance import LLMatcher

from atom_async.wire.grammar import parser_limits, to_llguidance
from atom_async.wire.sampling import Grammar

MAX_SOURCE_BYTES = 1 << 20
"""Longest grammar text taken; checking takes time in proportion."""


def check_grammar(grammar: Grammar, *, max_source_bytes: int = MAX_SOURCE_BYTES) -> str | None:
    """None when the grammar is good, else what is wrong with it, fit for the client.

    Takes milliseconds, up to about a second for the largest schemas, with the GIL released: not for the
    event loop's own thread.
    """
    try:
        size = len(grammar.source.encode())
        if size > max_source_bytes:
            return f"the grammar is {size} bytes long; at most {max_source_bytes} are taken"
        # Named apart, for a plainer message than that of the JSON that the schema gets wrapped in.
        if grammar.kind == "json_schema" and not isinstance(json.loads(grammar.source), dict):
            return "the schema must be a JSON object"
        source = to_llguidance(grammar)
    except json.JSONDecodeError as error:
        return f"the schema is not valid JSON: {error}"
    except (ValueError, RecursionError) as error:
        return str(error)
    return _verdict(source)


def _verdict(source: str) -> str | None:
    # Warnings are of what the schema's own "x-guidance" asked for; a keyword that cannot be enforced is an error.
    failed, messages = LLMatcher.validate_grammar_with_warnings(source, limits=parser_limits())
    if not failed:
        return None
    verdict = "; ".join(str(message).strip() for message in messages)
    if "coerce_one_of" in verdict:
        verdict += ' (in the schema: "x-guidance": {"coerce_one_of": true})'
    return verdict


def choice_grammar(choices: Sequence[str]) -> Grammar:
    """One of these literals, exactly; an empty one ends the output at once.

    Raises ValueError when there is no choice, or text that UTF-8 cannot carry.
    """
    if not choices:
        raise ValueError("a choice needs at least one text")
    for choice in choices:
        choice.encode()
    # Lark's string literals escape as JSON's do.
    return Grammar("lark", "start: " + " | ".join(json.dumps(choice) for choice in choices))
