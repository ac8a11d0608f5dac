"""Whether a grammar can be enforced, found out before the request is accepted."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence

from llguidance import LLMatcher

from atom_async.wire.grammar import on_deep_stack, parser_limits, to_llguidance
from atom_async.wire.sampling import Grammar

_LONGEST_MESSAGE = 1000


def check_grammar(grammar: Grammar) -> str | None:
    """None when the grammar is good, else what is wrong with it, fit for the client.

    Takes milliseconds, up to about a second for the largest schemas, with the GIL released: not for the
    event loop's own thread.
    """
    try:
        # Named apart, for a plainer message than that of the JSON that the schema gets wrapped in.
        if grammar.kind == "json_schema" and not isinstance(json.loads(grammar.source), dict):
            return "the schema must be a JSON object"
        return on_deep_stack(functools.partial(_verdict, grammar))
    except json.JSONDecodeError as error:
        return f"the schema is not valid JSON: {error}"
    except (ValueError, RecursionError) as error:
        return _clip(str(error))


def _clip(message: str) -> str:
    """Parsers quote the source, which may be long."""
    return message if len(message) <= _LONGEST_MESSAGE else message[:_LONGEST_MESSAGE] + " …"


def _verdict(grammar: Grammar) -> str | None:
    # Warnings are of what the schema's own "x-guidance" asked for; a keyword that cannot be enforced is an error.
    failed, messages = LLMatcher.validate_grammar_with_warnings(to_llguidance(grammar), limits=parser_limits())
    if not failed:
        return None
    verdict = "; ".join(str(message).strip() for message in messages)
    if "coerce_one_of" in verdict:
        verdict += ' (in the schema: "x-guidance": {"coerce_one_of": true})'
    return _clip(verdict)


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
