"""Reads one call written in Qwen3-Coder's tags:

    <function=get_weather>
    <parameter=city>
    Paris
    </parameter>
    </function>

Values are plain text; the tool's schema says which of them are something else than a string.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from atom_async.text.tool_calls.base import Collector
from atom_async.text.tool_calls.json_call import Status

FUNCTION = "<function="
_FUNCTION_END = "</function>"
_PARAMETER = "<parameter="
_PARAMETER_END = "</parameter>"
# A model that forgets to close a value goes on with one of these on a line of its own.
_VALUE_ENDS = (_PARAMETER_END, "\n" + _PARAMETER, "\n" + _FUNCTION_END)
_NAME_BYTES_MAX = 256

Types = Mapping[str, Mapping[str, Any]]
"""Tool name -> parameter name -> its JSON Schema."""


class XmlCallReader:
    """Reads from after `<function=` on."""

    def __init__(self, out: Collector, types: Types) -> None:
        self.announced = False
        self._out = out
        self._types = types
        self._expect = self._in_name
        self._text = ""
        self._function = ""
        self._parameter = ""
        self._count = 0

    def feed(self, character: str) -> Status:
        return self._expect(character)

    @property
    def pending(self) -> str:
        """What was read outside any value since the last tag: content, if the call breaks."""
        return self._text if self._expect in (self._in_name, self._between) else ""

    def finish(self) -> None:
        """The text ended inside the call: what there is of a value goes out, and the arguments stay
        open, so that nobody takes the call for a complete one."""
        if self._expect == self._in_value:
            self._argument(self._text, closed=False)

    def _in_name(self, character: str) -> Status:
        if character == ">" and self._text.strip():
            self._function = self._text.strip().strip("\"'")
            self._out.announce(self._function)
            self.announced = True
            self._text, self._expect = "", self._between
            return Status.MORE
        if character in "<>\n" or len(self._text) > _NAME_BYTES_MAX:
            return Status.BROKEN
        self._text += character
        return Status.MORE

    def _between(self, character: str) -> Status:
        """Outside a value: only white space and the two tags may come."""
        text = (self._text + character).lstrip()
        if text and not _PARAMETER.startswith(text) and not _FUNCTION_END.startswith(text):
            return Status.BROKEN
        self._text = text
        if text == _PARAMETER:
            self._text, self._expect = "", self._in_parameter_name
        if text == _FUNCTION_END:
            self._out.arguments("{}" if self._count == 0 else "}")
            return Status.DONE
        return Status.MORE

    def _in_parameter_name(self, character: str) -> Status:
        if character != ">":
            self._text += character
            return Status.MORE
        self._parameter = self._text.strip().strip("\"'")
        self._text, self._expect = "", self._in_value
        return Status.MORE

    def _in_value(self, character: str) -> Status:
        self._text += character
        for end in _VALUE_ENDS:
            if self._text.endswith(end):
                return self._value_ended(end)
        return Status.MORE

    def _value_ended(self, end: str) -> Status:
        self._argument(self._text.removesuffix(end), closed=True)
        self._text, self._expect = "", self._between
        status = Status.MORE
        if end != _PARAMETER_END:
            for character in end:
                status = self._between(character)
        return status

    def _argument(self, written: str, *, closed: bool) -> None:
        """One line break at each end of a value is layout."""
        text = written.removeprefix("\n")
        text = text.removesuffix("\n") if closed else text
        value = self._typed(text) if closed else json.dumps(text, ensure_ascii=False)[:-1]
        key = json.dumps(self._parameter, ensure_ascii=False)
        self._out.arguments(f"{', ' if self._count else '{'}{key}: {value}")
        self._count += 1

    def _typed(self, text: str) -> str:
        """JSON text of a value, by the parameter's schema; a string where it is none of its type."""
        schema = self._types.get(self._function, {}).get(self._parameter)
        kinds = schema.get("type") if isinstance(schema, Mapping) else None
        expected = set(kinds if isinstance(kinds, list) else [kinds]) & set(_PYTHON_TYPES)
        if expected:
            try:
                value = json.loads(text.strip().lower() if expected == {"boolean"} else text.strip())
            except (ValueError, RecursionError):
                value = text
            if any(_is_a(value, kind) for kind in expected) and not ("string" in _as_set(kinds) and value == text):
                return json.dumps(value, ensure_ascii=False)
        return json.dumps(text, ensure_ascii=False)


_PYTHON_TYPES: dict[str, type | tuple[type, ...]] = {
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "object": dict,
    "array": list,
    "null": type(None),
}


def _as_set(kinds: Any) -> set[Any]:
    return set(kinds if isinstance(kinds, list) else [kinds])


def _is_a(value: Any, kind: str) -> bool:
    is_flag = isinstance(value, bool)  # in Python also an int
    return isinstance(value, _PYTHON_TYPES[kind]) and (is_flag == (kind == "boolean"))


def parameter_types(tools: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """From OpenAI's tool list."""
    types: dict[str, dict[str, Any]] = {}
    for tool in tools:
        function = tool.get("function") or {}
        properties = (function.get("parameters") or {}).get("properties")
        types[function.get("name", "")] = properties if isinstance(properties, dict) else {}
    return types
