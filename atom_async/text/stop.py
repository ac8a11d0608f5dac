"""Stop strings across token boundaries.

An Aho-Corasick automaton over the characters (Aho and Corasick 1975, "Efficient string matching") reads
each character once. Its state is the longest end of the text that is the beginning of a stop string:
exactly what must be held back, and no more.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence


class StopMatcher:
    """Watches one text for the stop string that is complete first; of several that end at the same
    character, the longest. Where the text was cut into pieces makes no difference."""

    def __init__(self, stops: Sequence[str], *, include_stop: bool = False) -> None:
        """`include_stop` leaves the stop string in the text. Raises ValueError for an empty stop string."""
        if "" in stops:
            raise ValueError("a stop string must not be empty")
        self._automaton = _Automaton(stops)
        self._include_stop = include_stop
        self._state = 0
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """What can be released: everything before what may still become a stop string. After a match,
        the text up to it; nothing from then on."""
        if self.matched is not None or not text:
            return ""
        known = self._held + text
        position = len(self._held)
        for character in text:
            position += 1
            self._state = self._automaton.step(self._state, character)
            stop = self._automaton.stops[self._state]
            if stop is not None:
                self.matched, self._held = stop, ""
                return known[: position if self._include_stop else position - len(stop)]
        released = len(known) - self._automaton.depths[self._state]
        self._held = known[released:]
        return known[:released]

    def flush(self) -> str:
        """What was held back, when no more text comes."""
        held, self._held, self._state = self._held, "", 0
        return held


class _Automaton:
    """Row i of each table describes state i; state 0 is the empty prefix."""

    def __init__(self, stops: Sequence[str]) -> None:
        self.depths = [0]
        self.stops: list[str | None] = [None]
        """The longest stop string that ends in this state."""
        self._next: list[dict[str, int]] = [{}]
        self._fallback = [0]
        """The state of the longest proper suffix."""
        for stop in stops:
            self._insert(stop)
        self._link()

    def step(self, state: int, character: str) -> int:
        while state and character not in self._next[state]:
            state = self._fallback[state]
        return self._next[state].get(character, 0)

    def _insert(self, stop: str) -> None:
        state = 0
        for character in stop:
            if character not in self._next[state]:
                self._next[state][character] = len(self.depths)
                self.depths.append(self.depths[state] + 1)
                self.stops.append(None)
                self._next.append({})
                self._fallback.append(0)
            state = self._next[state][character]
        self.stops[state] = stop

    def _link(self) -> None:
        """Breadth first, so that a state's shorter suffixes are linked before it."""
        queue = deque(self._next[0].values())
        while queue:
            state = queue.popleft()
            self.stops[state] = self.stops[state] or self.stops[self._fallback[state]]
            for character, child in self._next[state].items():
                self._fallback[child] = self.step(self._fallback[state], character)
                queue.append(child)
