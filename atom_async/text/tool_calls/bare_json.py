"""Calls without tags: the message is JSON from its first character on (Llama 3, Mistral).

One object, a list of them, or several after one another (`;` or a new line between). Since a JSON answer
looks the same, only calls of the request's own tools count; everything else is content.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from atom_async.text.tool_calls.base import Collector, ParsedDelta
from atom_async.text.tool_calls.json_call import JsonCallReader, Status
from atom_async.text.tool_calls.xml_call import parameter_types

_SPACE = " \t\r\n"


class BareJsonParser:
    """A state is the method that takes the next character."""

    def __init__(self, tools: Sequence[dict[str, Any]] = ()) -> None:
        self._out = Collector()
        self._names = frozenset(parameter_types(list(tools)))
        self._state: Callable[[str], None] = self._start
        self._raw = ""
        """Read since the last call, and content if no call follows."""
        self._in_list = False
        self._reader = JsonCallReader(self._out, self._names)

    @property
    def found_calls(self) -> bool:
        return self._out.calls > 0

    def push(self, text: str) -> ParsedDelta:
        for position, character in enumerate(text):
            if self._state == self._content:
                self._out.content(text[position:])
                break
            self._state(character)
        return self._out.take()

    def finish(self) -> ParsedDelta:
        if self._state == self._in_call:
            self._reader.finish()
            if not self._reader.announced:
                self._out.content(self._raw + self._reader.pending)
        elif self._state == self._start and not self.found_calls:
            self._out.content(self._raw)
        self._out.end()
        return self._out.take()

    def _start(self, character: str) -> None:
        """White space, perhaps "[", then an object; between calls also separators."""
        separators = ",;]" if self.found_calls else ""
        if character in _SPACE + separators:
            self._raw += character
        elif character == "[" and not self._in_list:
            self._in_list = True
            self._raw += character
        elif character == "{":
            self._reader = JsonCallReader(self._out, self._names)
            self._reader.feed(character)
            self._state = self._in_call
        else:
            self._give_up(self._raw, character)

    def _in_call(self, character: str) -> None:
        status = self._reader.feed(character)
        if status is Status.DONE:
            self._raw, self._state = "", self._start
        elif status is Status.BROKEN:
            before = "" if self._reader.announced else self._raw
            self._give_up(before + self._reader.pending, character)

    def _content(self, character: str) -> None:
        self._out.content(character)

    def _give_up(self, text: str, character: str) -> None:
        self._state = self._content
        self._out.content(text + character)
