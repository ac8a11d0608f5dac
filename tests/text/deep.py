"""Grammars as deep as their greatest length allows."""

from __future__ import annotations

import itertools
import json
import string
from collections.abc import Callable, Iterator

from atom_async.wire.grammar import MAX_SOURCE_BYTES
from atom_async.wire.sampling import Grammar


def _names(letters: str) -> Iterator[str]:
    for length in itertools.count(1):
        yield from map("".join, itertools.product(letters, repeat=length))


def _chain(letters: str, link: str) -> Grammar:
    """Every rule is of the next one."""
    names = (name for name in _names(letters) if name != "start")
    before = next(names)
    lines = [f"start:{before}"]
    size = len(lines[0])
    for name in names:
        line = f"{before}:{name}{link}"
        size += len(line) + 1
        if size > MAX_SOURCE_BYTES - 20:
            break
        lines.append(line)
        before = name
    return Grammar("lark", "\n".join([*lines, f'{before}:"x"']))


def _references() -> Grammar:
    count = MAX_SOURCE_BYTES // len('"10000":{"$ref":"#/$defs/10001"},')
    definitions: dict[str, object] = {str(at): {"$ref": f"#/$defs/{at + 1}"} for at in range(count)}
    definitions[str(count)] = {"type": "string"}
    return Grammar("json_schema", json.dumps({"$defs": definitions, "$ref": "#/$defs/0"}, separators=(",", ":")))


def _nested(kind: str, head: str, before: str, middle: str, after: str) -> Grammar:
    depth = (MAX_SOURCE_BYTES - len(head) - len(middle)) // len(before + after)
    return Grammar(kind, head + before * depth + middle + after * depth)


TAKEN: dict[str, Callable[[], Grammar]] = {
    "rules": lambda: _chain(string.ascii_lowercase, ""),
    "rules that may be left out": lambda: _chain(string.ascii_lowercase, "?"),
    "terminals": lambda: _chain(string.ascii_uppercase, ""),
    "references of a schema": _references,
}
REFUSED: dict[str, Callable[[], Grammar]] = {
    "groups of a grammar": lambda: _nested("lark", "start: ", "(", '"x"', ")"),
    "groups of a regex": lambda: _nested("regex", "", "(", "x", ")"),
    "schemas": lambda: _nested("json_schema", "", '{"anyOf":[', "{}", "]}"),
    "properties": lambda: _nested("json_schema", "", '{"properties":{"a":', "{}", "}}"),
    "a repeated sign": lambda: _nested("lark", "start: A\nA: ", "~", '"x"', ""),
}
