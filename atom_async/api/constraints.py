"""Which grammar a request binds its output to."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable

import msgspec

from atom_async.api.errors import bad_request
from atom_async.api.requests import JsonObject, ResponseFormat, SharedFields, StructuredOutputs
from atom_async.text.grammar_check import check_grammar, choice_grammar
from atom_async.wire.sampling import Grammar

ANY_OBJECT = Grammar("json_schema", '{"type":"object"}')

Constraint = tuple[str, Grammar]
"""The field that asks for it, and what it asks for."""


def schema_grammar(schema: JsonObject | str) -> Grammar:
    return Grammar("json_schema", schema if isinstance(schema, str) else msgspec.json.encode(schema).decode())


def constraints(body: SharedFields, response_format: ResponseFormat | None) -> list[Constraint]:
    """All that the body's own fields ask for. Raises ApiError."""
    found: list[Constraint] = []
    for name, make in _MAKERS.items():
        value = getattr(body, f"guided_{name}")
        if value is not None:
            found.append((f"guided_{name}", _made(make, value, f"guided_{name}")))
    if body.structured_outputs is not None:
        found.append(("structured_outputs", _structured(body.structured_outputs)))
    if response_format is not None and (grammar := _response_format(response_format)) is not None:
        found.append(("response_format", grammar))
    return found


async def accepted(found: list[Constraint]) -> Grammar | None:
    """The one constraint, checked. Raises ApiError for several, or for one that cannot be enforced."""
    if not found:
        return None
    if len(found) > 1:
        fields = ", ".join(field for field, _ in found)
        raise bad_request(f"an output follows one grammar, and these fields ask for one each: {fields}", found[1][0])
    field, grammar = found[0]
    problem = await asyncio.to_thread(_checked, grammar)
    if problem is not None:
        raise bad_request(f"{field}: {problem}", field, "invalid_grammar")
    return grammar


@functools.lru_cache(maxsize=64)
def _checked(grammar: Grammar) -> str | None:
    """Clients send the same few grammars again and again."""
    return check_grammar(grammar)


_MAKERS: dict[str, Callable[..., Grammar]] = {
    "json": schema_grammar,
    "regex": lambda pattern: Grammar("regex", pattern),
    "choice": choice_grammar,
    "grammar": lambda source: Grammar("lark", source),
}


def _made(make: Callable[..., Grammar], value: object, field: str) -> Grammar:
    try:
        return make(value)
    except ValueError as error:
        raise bad_request(f"{field}: {error}", field) from error


def _structured(asked: StructuredOutputs) -> Grammar:
    given = {name: getattr(asked, name) for name in _MAKERS if getattr(asked, name) is not None}
    if bool(asked.json_object) + len(given) != 1:
        raise bad_request(
            "structured_outputs needs exactly one of json, json_object, regex, choice and grammar", "structured_outputs"
        )
    if asked.json_object:
        return ANY_OBJECT
    name, value = next(iter(given.items()))
    return _made(_MAKERS[name], value, f"structured_outputs.{name}")


def _response_format(asked: ResponseFormat) -> Grammar | None:
    if (asked.json_schema is not None) != (asked.type == "json_schema"):
        raise bad_request(
            "response_format.json_schema goes with type json_schema, and only with it", "response_format.json_schema"
        )
    if asked.json_schema is not None:
        return schema_grammar(asked.json_schema.schema)
    return ANY_OBJECT if asked.type == "json_object" else None
