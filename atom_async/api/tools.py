"""Tools: what of them the model is shown, what its output is bound to, and how calls are read from it.

| tool_choice | the prompt has the tools | the output | read by |
|---|---|---|---|
| none | no | free | nobody: it is content |
| auto | yes | free; `strict` calls follow their schemas; with a JSON Schema, it or calls | the model's own parser |
| required | yes | a JSON list of calls, by grammar | the `json` parser, in `CallsOnly` |
| a function | yes | the function's arguments, by grammar | `WholeIsArguments` |
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from atom_async.api.constraints import Constraint, schema_grammar
from atom_async.api.errors import bad_request
from atom_async.api.requests import ChatRequest, JsonObject, NamedToolChoice, Tool
from atom_async.text.tool_calls import ParsedDelta, ToolCallDelta, ToolCallParser, make_parser
from atom_async.wire.grammar import JSON_OPTIONS
from atom_async.wire.sampling import Grammar

NO_ARGUMENTS: JsonObject = {"type": "object", "properties": {}, "additionalProperties": False}
"""What a function without `parameters` takes."""


@dataclass(frozen=True, slots=True)
class ToolPlan:
    shown: list[Tool] | None
    """For the chat template."""
    make_parser: Callable[[], ToolCallParser]
    """One for each choice."""
    constraints: list[Constraint]
    """All that binds the output, the request's other fields included."""


class WholeIsArguments:
    """The output is one call's arguments and nothing else."""

    found_calls = False

    def __init__(self, name: str) -> None:
        self._name = name

    def push(self, text: str) -> ParsedDelta:
        if not text and self.found_calls:
            return ParsedDelta()
        name = None if self.found_calls else self._name
        self.found_calls = True
        return ParsedDelta(tool_calls=[ToolCallDelta(0, name, text)])

    def finish(self) -> ParsedDelta:
        return ParsedDelta()


class CallsOnly:
    """A list of calls: what is between them, or left of one that the length cut off, is no content."""

    def __init__(self, parser: ToolCallParser) -> None:
        self._parser = parser

    @property
    def found_calls(self) -> bool:
        return self._parser.found_calls

    def push(self, text: str) -> ParsedDelta:
        return ParsedDelta(tool_calls=self._parser.push(text).tool_calls)

    def finish(self) -> ParsedDelta:
        return ParsedDelta(tool_calls=self._parser.finish().tool_calls)


def tool_plan(body: ChatRequest, parser: str, others: list[Constraint]) -> ToolPlan:
    """`parser` is the served model's; `others` is what the request's other fields bind the output to.

    Raises ApiError.
    """
    tools = body.tools or []
    choice = body.tool_choice or "auto"
    _check_names(tools, choice)
    if not tools or choice == "none":
        return ToolPlan(None, lambda: make_parser("none"), others)
    plain = [msgspec.to_builtins(tool) for tool in tools]
    if isinstance(choice, NamedToolChoice):
        name = choice.function.name
        parameters = next(_parameters(tool) for tool in tools if tool.function.name == name)
        constraint = ("tool_choice", schema_grammar(parameters))
        return ToolPlan(tools, lambda: WholeIsArguments(name), [*others, constraint])
    if choice == "required":
        most = 1 if body.parallel_tool_calls is False else None
        constraint = ("tool_choice", schema_grammar(calls_schema(tools, most)))
        return ToolPlan(tools, lambda: CallsOnly(make_parser("json", plain)), [*others, constraint])
    constraints = _calls_or(others, tools, parser) if others else _strict(tools, parser)
    return ToolPlan(tools, lambda: make_parser(parser, plain), constraints)


def _check_names(tools: list[Tool], choice: str | NamedToolChoice) -> None:
    names = [tool.function.name for tool in tools]
    if len(set(names)) < len(names):
        raise bad_request("tools: two functions have the same name", "tools")
    if not tools and choice not in ("auto", "none"):
        raise bad_request("tool_choice asks for a call, but there are no tools", "tool_choice")
    if isinstance(choice, NamedToolChoice) and choice.function.name not in names:
        raise bad_request(
            f"tool_choice names {choice.function.name}, which is not among the tools: {', '.join(names)}", "tool_choice"
        )


def _parameters(tool: Tool) -> JsonObject:
    return NO_ARGUMENTS if tool.function.parameters is None else tool.function.parameters


def calls_schema(tools: list[Tool], most: int | None) -> JsonObject:
    """JSON Schema of a list of calls, one at least."""
    definitions = {f"tool{index}": _moved(_parameters(tool), index) for index, tool in enumerate(tools)}
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": tool.function.name}, "arguments": {"$ref": f"#/$defs/tool{index}"}},
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for index, tool in enumerate(tools)
    ]
    schema: JsonObject = {"type": "array", "minItems": 1, "items": {"anyOf": calls}, "$defs": definitions}
    return schema if most is None else {**schema, "maxItems": most}


def _moved(schema: Any, index: int) -> Any:
    """The schema as a part of a larger one: its references follow it there."""
    if isinstance(schema, dict):
        moved = {key: _moved(value, index) for key, value in schema.items()}
        reference = schema.get("$ref")
        if isinstance(reference, str) and reference.startswith("#"):
            moved["$ref"] = f"#/$defs/tool{index}{reference[1:]}"
        return moved
    return [_moved(value, index) for value in schema] if isinstance(schema, list) else schema


def _strict(tools: list[Tool], parser: str) -> list[Constraint]:
    """With `strict` functions: text is free, but a call that begins is one that fits."""
    if not any(tool.function.strict for tool in tools):
        return []
    if parser != "hermes":
        raise bad_request(
            "strict is not supported for this model with tool_choice auto; leave it out, or use tool_choice required "
            "or a named function, which always follow the schema",
            "tools",
        )
    return [("tools", Grammar("lark", _STRICT + _called(tools)))]


def _calls_or(others: list[Constraint], tools: list[Tool], parser: str) -> list[Constraint]:
    """An answer that follows a schema, or calls: the model chooses with its first token."""
    field, grammar = others[0]
    if parser != "hermes" or grammar.kind != "json_schema":
        raise bad_request(
            f"{field} would keep the model from calling any tool; use it with tool_choice none, or without tools", field
        )
    try:
        schema = json.loads(grammar.source)
    except ValueError:
        return others  # checking it will say what is wrong
    combined = Grammar("lark", _CALLS_OR.format(schema=_inline(schema)) + _called(tools))
    return [(field, combined), *others[1:]]


def _called(tools: list[Tool]) -> str:
    """The rule of what follows `<tool_call>`. Only `strict` functions have their arguments checked."""
    calls = []
    for tool in tools:
        parameters = _parameters(tool) if tool.function.strict else {"type": "object"}
        begin = f'\n{{"name": {json.dumps(tool.function.name)}, "arguments": '
        calls.append(f"{json.dumps(begin)} {_inline(parameters)} {json.dumps(_END)}")
    return "call: " + "\n    | ".join(calls) + "\n"


def _inline(schema: Any) -> str:
    """A schema as a part of a Lark grammar, with the spacing that whole schemas have too."""
    if isinstance(schema, dict):
        schema = {"x-guidance": JSON_OPTIONS} | schema
    return "%json " + json.dumps(schema)


_END = "}\n</tool_call>"
_STRICT = """\
start: called* TEXT
called: opening call
opening[lazy]: TEXT "<tool_call>"
TEXT: /(.|\\n)*/
"""
_CALLS_OR = """\
start: answer | called ("\\n" called)*
answer: {schema}
called: "<tool_call>" call
"""
