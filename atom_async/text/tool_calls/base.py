"""What tool-call parsers produce, and the interface they share."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(slots=True)
class ToolCallDelta:
    """A piece of one call: its name once, first, then pieces of its arguments (JSON text)."""

    index: int
    """Position of the call in the message."""
    name: str | None = None
    arguments: str = ""


@dataclass(slots=True)
class ToolCall:
    name: str
    arguments: str
    """JSON text; cut short when the output was."""


@dataclass(slots=True)
class ParsedDelta:
    """What became certain."""

    content: str = ""
    tool_calls: list[ToolCallDelta] = field(default_factory=list)


class ToolCallParser(Protocol):
    """Splits one message's text into content and tool calls, however it is cut into pieces.

    Never raises on what a model writes: what is no call comes out as content. Once a call's name is
    out, what follows belongs to its arguments, valid JSON or not, since it cannot be taken back.
    """

    @property
    def found_calls(self) -> bool:
        """Whether any call has been announced."""
        ...

    def push(self, text: str) -> ParsedDelta: ...

    def finish(self) -> ParsedDelta:
        """The text has ended: what was held back."""
        ...


class ContentOnly:
    """The parser `none`: everything is content."""

    found_calls = False

    def push(self, text: str) -> ParsedDelta:
        return ParsedDelta(text)

    def finish(self) -> ParsedDelta:
        return ParsedDelta()


class Collector:
    """Gathers what one push produces.

    White space around calls is layout, not content: it is held back until content follows, and then only
    kept if it has content on both sides.
    """

    def __init__(self) -> None:
        self.calls = 0
        self._space = ""
        self._space_before_call = ""
        self._after_call = False
        self._has_content = False
        self._delta = ParsedDelta()

    def take(self) -> ParsedDelta:
        delta, self._delta = self._delta, ParsedDelta()
        return delta

    def content(self, text: str) -> None:
        if not text:
            return
        visible = text.rstrip()
        if visible:
            self._delta.content += self._gap(visible)
            self._space, self._space_before_call = "", ""
            self._after_call, self._has_content = False, True
        self._space += text[len(visible) :]

    def _gap(self, visible: str) -> str:
        if not self._after_call:
            return self._space + visible
        if not self._has_content:
            return visible.lstrip()
        return (self._space_before_call or self._space) + (visible.lstrip() if self._space_before_call else visible)

    def announce(self, name: str) -> None:
        self._delta.tool_calls.append(ToolCallDelta(self.calls, name))
        self.calls += 1
        if not self._after_call:
            self._space_before_call = self._space
        self._space, self._after_call = "", True

    def arguments(self, text: str) -> None:
        """More of the last announced call's arguments."""
        calls = self._delta.tool_calls
        if calls and calls[-1].index == self.calls - 1:
            calls[-1].arguments += text
        else:
            calls.append(ToolCallDelta(self.calls - 1, None, text))

    def end(self) -> None:
        """Trailing white space is content after all, when there was no call before it."""
        if not self._after_call:
            self._delta.content += self._space
        self._space = ""


def parse_whole(parser: ToolCallParser, text: str) -> tuple[str, list[ToolCall]]:
    """Content and calls of a complete message."""
    return join_deltas([parser.push(text), parser.finish()])


def join_deltas(deltas: Iterable[ParsedDelta]) -> tuple[str, list[ToolCall]]:
    """What a client assembles from a stream."""
    content, calls = "", list[ToolCall]()
    for delta in deltas:
        content += delta.content
        for piece in delta.tool_calls:
            if piece.name is not None:
                calls.append(ToolCall(piece.name, ""))
            calls[piece.index].arguments += piece.arguments
    return content, calls
