"""Reads one call written as a JSON object, character by character.

Accepted: `{"name": "f", "arguments": {…}}`, with `parameters` for `arguments` (Llama 3), arguments as
JSON text, keys in any order, other keys besides, and OpenAI's own nesting under `function`. As soon as
the name is known, arguments stream through as they are written.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from enum import Enum, auto
from typing import Any

from atom_async.text.tool_calls.base import Collector

_ARGUMENT_KEYS = ("arguments", "parameters")
_KEYS = ("name", *_ARGUMENT_KEYS, "function", "type", "id")
_SPACE = " \t\r\n"


class Status(Enum):
    MORE = auto()
    DONE = auto()
    """The call ended with this character."""
    BROKEN = auto()
    """This character cannot follow, and was not taken."""


class ValueScanner:
    """Finds the end of one JSON value. Brackets and strings are balanced, the rest is not checked."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self._begun = False

    def ends_before(self, character: str) -> bool:
        """Whether a number or literal ended before this character."""
        return self._begun and self._depth == 0 and not self._in_string and character in ",}]" + _SPACE

    def ends_with(self, character: str) -> bool:
        """Takes the character; whether it completes a string, an object or an array."""
        self._begun = True
        if self._in_string:
            return self._string(character)
        if character == '"':
            self._in_string = True
        elif character in "{[":
            self._depth += 1
        elif character in "}]":
            self._depth -= 1
            return self._depth == 0
        return False

    def _string(self, character: str) -> bool:
        if self._escaped:
            self._escaped = False
        elif character == "\\":
            self._escaped = True
        elif character == '"':
            self._in_string = False
            return self._depth == 0
        return False


class JsonCallReader:
    """`known_names`: a call of any other name is broken; None takes all."""

    def __init__(self, out: Collector, known_names: Collection[str] | None = None) -> None:
        self.announced = False
        self.pending = ""
        """What was read and is neither announced nor sent as arguments: content, if the call breaks."""
        self._out = out
        self._known_names = known_names
        self._expect = self._start
        self._text = ""
        self._key = ""
        self._scanner = ValueScanner()
        self._values: dict[str, str] = {}
        self._streamed = 0
        """Characters of arguments sent."""

    def feed(self, character: str) -> Status:
        claimed = (self.announced, self._streamed)
        status = self._expect(character)
        if status is not Status.BROKEN:
            unchanged = claimed == (self.announced, self._streamed)
            self.pending = self.pending + character if unchanged else ""
        return status

    def finish(self) -> None:
        """The text ended inside the call. Arguments that were still being gathered go out as they are."""
        if self.announced and self._expect == self._in_value and self._key in _ARGUMENT_KEYS and not self._streamed:
            self._out.arguments(self._text)

    def _start(self, character: str) -> Status:
        if character in _SPACE:
            return Status.MORE
        if character != "{":
            return Status.BROKEN
        self._expect = self._key_or_end
        return Status.MORE

    def _key_or_end(self, character: str) -> Status:
        if character in _SPACE or character == ",":
            return Status.MORE
        if character == "}":
            return self._end()
        if character != '"':
            return Status.BROKEN
        self._text, self._scanner = "", ValueScanner()
        self._expect = self._in_key
        return self._in_key(character)

    def _in_key(self, character: str) -> Status:
        self._text += character
        if not self._scanner.ends_with(character):
            return Status.MORE
        key = _decoded(self._text)
        if key not in _KEYS and not self.announced:
            return Status.BROKEN
        self._key, self._expect = str(key), self._colon
        return Status.MORE

    def _colon(self, character: str) -> Status:
        if character in _SPACE:
            return Status.MORE
        if character != ":":
            return Status.BROKEN
        self._expect = self._value_start
        return Status.MORE

    def _value_start(self, character: str) -> Status:
        if character in _SPACE:
            return Status.MORE
        if character in ",}]":
            return Status.BROKEN
        self._text, self._scanner = "", ValueScanner()
        streams = character == "{" and self._key in _ARGUMENT_KEYS and self.announced and not self._streamed
        self._expect = self._in_arguments if streams else self._in_value
        return self._expect(character)

    def _in_arguments(self, character: str) -> Status:
        self._streamed += 1
        self._out.arguments(character)
        if self._scanner.ends_with(character):
            self._expect = self._key_or_end
        return Status.MORE

    def _in_value(self, character: str) -> Status:
        if self._scanner.ends_before(character):
            return self._value(again=character)
        self._text += character
        return self._value() if self._scanner.ends_with(character) else Status.MORE

    def _value(self, again: str = "") -> Status:
        self._values.setdefault(self._key, self._text)
        self._expect = self._key_or_end
        if self._key == "name" and not self.announced and not self._announce(_decoded(self._text)):
            return Status.BROKEN
        return self._key_or_end(again) if again else Status.MORE

    def _announce(self, name: Any) -> bool:
        if not isinstance(name, str) or not name:
            return False
        if self._known_names is not None and name not in self._known_names:
            return False
        self._out.announce(name)
        self.announced = True
        return True

    def _end(self) -> Status:
        if not self.announced and not self._announce_nested():
            return Status.BROKEN
        if not self._streamed:
            written = next((self._values[key] for key in _ARGUMENT_KEYS if key in self._values), "{}")
            self._out.arguments(_object_text(written))
        return Status.DONE

    def _announce_nested(self) -> bool:
        function = _decoded(self._values.get("function", ""))
        if not isinstance(function, dict) or not self._announce(function.get("name")):
            return False
        for key in _ARGUMENT_KEYS:
            if key in function:
                self._values.setdefault(key, json.dumps(function[key], ensure_ascii=False))
        return True


def _decoded(text: str) -> Any:
    try:
        return json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return None


def _object_text(written: str) -> str:
    """The arguments as an object's text where they were written as text of one, or as null."""
    value = _decoded(written)
    if value is None and written.strip() == "null":
        return "{}"
    if isinstance(value, str) and isinstance(_decoded(value), dict):
        return value
    return written
