"""Calls between `<tool_call>` tags: Hermes' JSON, and Qwen3-Coder's `<function=…>` tags.

Taken as well, since models write them: several objects or a list of them in one tag (SmolLM2), a missing
closing tag, and `<function=…>` without a tag around it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from atom_async.text.tool_calls.base import Collector, ParsedDelta
from atom_async.text.tool_calls.json_call import JsonCallReader, Status
from atom_async.text.tool_calls.xml_call import FUNCTION, XmlCallReader, parameter_types

OPEN = "<tool_call>"
CLOSE = "</tool_call>"
_SPACE = " \t\r\n"
_STRAY = ",]}"
"""Punctuation after a call: of a list, or a bracket too many, which small models write."""


class TaggedParser:
    """A state is the method that takes the next character."""

    def __init__(self, tools: Sequence[dict[str, Any]] = (), *, xml: bool) -> None:
        """`xml` reads Qwen3-Coder's tags besides JSON."""
        self._out = Collector()
        self._types = parameter_types(list(tools))
        self._openers = (OPEN, FUNCTION) if xml else (OPEN,)
        self._xml = xml
        self._state: Callable[[str], None] = self._outside
        self._held = ""
        """The beginning of what may become a tag."""
        self._raw = ""
        """From the opening tag to where a call begins: content, if none does."""
        self._in_list = False
        self._reader: JsonCallReader | XmlCallReader = JsonCallReader(self._out)

    @property
    def found_calls(self) -> bool:
        return self._out.calls > 0

    def push(self, text: str) -> ParsedDelta:
        position = 0
        while position < len(text):
            if self._state == self._outside and not self._held:
                tag = text.find("<", position)
                plain_end = len(text) if tag < 0 else tag
                self._out.content(text[position:plain_end])
                position = plain_end
            if position < len(text):
                self._state(text[position])
                position += 1
        return self._out.take()

    def finish(self) -> ParsedDelta:
        if self._state == self._outside:
            self._out.content(self._held)
        elif self._state == self._body:
            self._out.content(self._raw + self._held)
        elif self._state == self._in_call:
            self._reader.finish()
            if not self._reader.announced:
                self._out.content(self._raw + self._reader.pending)
        self._out.end()
        return self._out.take()

    def _outside(self, character: str) -> None:
        text = self._held + character
        if text in self._openers:
            self._opened(text)
        elif any(opener.startswith(text) for opener in self._openers):
            self._held = text
        elif character == "<":  # a tag begins with "<" and has no other
            self._out.content(self._held)
            self._held = character
        else:
            self._out.content(text)
            self._held = ""

    def _opened(self, tag: str) -> None:
        self._held, self._in_list = "", False
        self._raw = tag
        self._state = self._body
        if tag == FUNCTION:
            self._begin(XmlCallReader(self._out, self._types))

    def _begin(self, reader: JsonCallReader | XmlCallReader) -> None:
        self._held, self._reader, self._state = "", reader, self._in_call

    def _body(self, character: str) -> None:
        """After the opening tag: white space, perhaps "[", then a call of either kind."""
        text = self._held + character
        if not self._held and (character in _SPACE or (character == "[" and not self._in_list)):
            self._in_list = self._in_list or character == "["
            self._raw += character
        elif text == "{":
            self._begin(JsonCallReader(self._out))
            self._reader.feed(character)
        elif self._xml and text == FUNCTION:
            self._raw += text
            self._begin(XmlCallReader(self._out, self._types))
        elif self._xml and FUNCTION.startswith(text):
            self._held = text
        else:
            self._give_up(self._raw + self._held, character)

    def _in_call(self, character: str) -> None:
        status = self._reader.feed(character)
        if status is Status.DONE:
            self._raw, self._state = "", self._after_call
        elif status is Status.BROKEN:
            before = "" if self._reader.announced else self._raw
            self._give_up(before + self._reader.pending, character)

    def _after_call(self, character: str) -> None:
        """The closing tag, or what models write in its place."""
        text = self._held + character
        if not self._held and character in _SPACE + _STRAY:
            return
        if text == "{":
            self._begin(JsonCallReader(self._out))
            self._reader.feed(character)
        elif text == CLOSE:
            self._held, self._state = "", self._outside
        elif text in self._openers:
            self._opened(text)
        elif any(tag.startswith(text) for tag in (CLOSE, *self._openers)):
            self._held = text
        else:
            self._give_up(self._held, character)

    def _give_up(self, text: str, character: str) -> None:
        """`text` was no call after all; `character` may begin a tag again."""
        self._held, self._raw, self._state = "", "", self._outside
        self._out.content(text)
        self._outside(character)
