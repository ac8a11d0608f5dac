"""Waiting for a prefix that another request is computing.

A *producer* is a request whose chunks will create blocks that others need; a *waiter* is parked until the
producer's submitted chunks reach the *boundary* it waits for. What a boundary is depends on the model
(`Boundaries`): that is all the scheduler knows about it.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from .queues import OrderedQueue
from .request import Order, Request


@dataclass(slots=True)
class Wait:
    """Why a request is parked."""

    producer: Request
    boundary: int
    """Tokens that it will reuse."""
    since: float
    saved: int
    """Tokens that it does not compute, for having waited."""
    seen: int
    """How far the producer had come at the last look."""
    urgency: Order
    """The place it would have if it computed everything itself: the producer moves up to it."""


class Waiters:
    """Of one producer: who waits for which boundary. Each boundary's waiters are in queue order."""

    __slots__ = ("_groups", "boundaries")

    def __init__(self) -> None:
        self.boundaries: list[int] = []
        """Ascending, in tokens."""
        self._groups: dict[int, OrderedQueue] = {}

    def add(self, request: Request) -> None:
        assert request.wait is not None
        boundary = request.wait.boundary
        if boundary not in self._groups:
            self._groups[boundary] = OrderedQueue()
            insort(self.boundaries, boundary)
        self._groups[boundary].add(request)

    def remove(self, request: Request) -> None:
        assert request.wait is not None
        boundary = request.wait.boundary
        members = self._groups[boundary]
        members.remove(request)
        if not members:
            self._drop(boundary)

    def group(self, boundary: int) -> list[Request]:
        return self._groups[boundary].items

    def reached(self, tokens: int) -> Sequence[int]:
        """The boundaries at or below `tokens`."""
        return self.boundaries[: bisect_left(self.boundaries, tokens + 1)]

    def take(self, boundary: int) -> list[Request]:
        members = self._groups[boundary].items
        self._drop(boundary)
        return members

    def all(self) -> list[Request]:
        return [request for boundary in self.boundaries for request in self._groups[boundary]]

    def most_urgent(self) -> Order | None:
        urgencies = [q.items[0].wait.urgency for q in self._groups.values() if q.items[0].wait is not None]
        return min(urgencies, default=None)

    def _drop(self, boundary: int) -> None:
        del self._groups[boundary]
        del self.boundaries[bisect_left(self.boundaries, boundary)]

    def __bool__(self) -> bool:
        return bool(self.boundaries)


class Boundaries(Protocol):
    """Where the computed state of a sequence can be taken up by another one, in tokens.

    Attention: behind each full block. A recurrent or hybrid model: where a checkpoint of the state is kept,
    joined with the KV up to it. Decisions only; what the model must do to keep a checkpoint is the caller's.
    """

    pending_reusable: bool
    """A boundary can be used by the very step that reaches it (attention writes keys and values before it
    reads them), or only once that step has completed."""

    def reusable(self, request: Request, found: int) -> int:
        """The largest reusable boundary within the `found` leading tokens that the pool has."""
        ...

    def promised(self, producer: Request, common: int, reached: int) -> int | None:
        """The largest boundary up to `common` (tokens that both share) that the producer will make reusable
        beyond `reached`; None: it declines."""
        ...

    def cut(self, request: Request, start: int, end: int) -> int:
        """Where a chunk [start, end) must end so that no promised boundary is run over."""
        ...


class BlockBoundaries:
    """Of attention models: every full block."""

    pending_reusable = True

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size

    def reusable(self, request: Request, found: int) -> int:
        return found

    def promised(self, producer: Request, common: int, reached: int) -> int | None:
        return common // self._block_size * self._block_size

    def cut(self, request: Request, start: int, end: int) -> int:
        return end
