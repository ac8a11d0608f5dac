"""The queue of requests that hold nothing: those a walk may admit, and those memory keeps out.

Both are kept in order, so that a walk takes the first without looking at the rest.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from atom_async.cache.pool import BlockPool

from .request import Order, Request


class OrderedQueue:
    """Requests sorted by their `order`, which must not change while they are in it."""

    __slots__ = ("_orders", "items")

    def __init__(self) -> None:
        self.items: list[Request] = []
        self._orders: list[Order] = []
        """Of the items: comparing these touches no request."""

    def __len__(self) -> int:
        return len(self.items)

    def __iter__(self) -> Iterator[Request]:
        return iter(self.items)

    def add(self, request: Request) -> None:
        position = bisect_left(self._orders, request.order)
        self._orders.insert(position, request.order)
        self.items.insert(position, request)

    def remove(self, request: Request) -> None:
        position = bisect_left(self._orders, request.order)
        assert self.items[position] is request
        del self._orders[position]
        del self.items[position]


def size_class(blocks: int) -> int:
    """Monotonic in `blocks`; a class is at most an eighth wide, as in an HDR histogram."""
    shift = max(blocks.bit_length() - 4, 0)
    return (shift << 3) + (blocks >> shift)


class BlockedQueue:
    """Requests that found no memory, by how many blocks they need.

    Whether any of them fits is answered by looking at the heads of the few classes that may, never at all
    of them: a class is wholly open when the headroom reaches the next one, and of the class that the
    headroom falls into only the head is tried.
    """

    def __init__(self) -> None:
        self._classes: dict[int, OrderedQueue] = {}
        self._sizes: list[int] = []
        self._count = 0
        self.by_hash: dict[bytes, dict[str, Request]] = {}
        """Those that need a block which nobody was computing when they were blocked."""

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Request]:
        for size in self._sizes:
            yield from self._classes[size]

    def add(self, request: Request) -> None:
        size = size_class(request.needed_blocks)
        if size not in self._classes:
            self._classes[size] = OrderedQueue()
            insort(self._sizes, size)
        self._classes[size].add(request)
        self._count += 1
        if request.needs is not None:
            self.by_hash.setdefault(request.needs, {})[request.request_id] = request

    def remove(self, request: Request) -> None:
        size = size_class(request.needed_blocks)
        members = self._classes[size]
        members.remove(request)
        self._count -= 1
        if not members:
            del self._classes[size]
            self._sizes.remove(size)
        if request.needs is not None:
            group = self.by_hash[request.needs]
            del group[request.request_id]
            if not group:
                del self.by_hash[request.needs]

    def open_classes(self, headroom: int) -> list[list[Request]]:
        """The classes that may have a member that fits; of the last one perhaps only the head does."""
        limit = size_class(max(headroom, 0))
        classes = []
        for size in self._sizes:
            if size > limit:
                break
            members = self._classes[size].items
            if size == limit:
                if members[0].needed_blocks <= headroom:
                    classes.append(members[:1])
                break
            classes.append(members)
        return classes


@dataclass(frozen=True, slots=True)
class Queues:
    """What a walk reads of the scheduler's state."""

    pool: BlockPool
    running: Sequence[Request]
    """In rank order."""
    ready: Sequence[Request]
    instant: Sequence[Request]
    """Ready, with at most one token to compute."""
    blocked: BlockedQueue
    reserved: Sequence[Request]
    queued_tokens: int
    """To compute, of all who are queued."""
    slots: int
    producers: dict[bytes, Request]
    """Next block to compute -> who computes it."""
