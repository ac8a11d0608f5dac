"""How much of a prompt is there already."""

from __future__ import annotations

from collections.abc import Sequence

from atom_async.cache.pool import BlockPool

from .request import Request


def find_blocks(pool: BlockPool, request: Request) -> list[int]:
    """Blocks of the longest prefix of its chain that the pool has. Looks again only at what may have changed:
    while nothing was forgotten, what was found is still there and only more can have come."""
    if request.found_as_of != pool.forgotten:
        request.found = pool.match(request.chain)
        request.found_as_of = pool.forgotten
    else:
        request.found += pool.match(request.chain, start=len(request.found))
    return list(request.found)


def common_blocks(a: Sequence[bytes], b: Sequence[bytes], at_least: int) -> int:
    """Leading blocks that two chains share, knowing that the first `at_least` are equal.

    Equal hashes mean equal prefixes, so the end is found by bisection.
    """
    low, high = at_least, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[middle - 1] == b[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low
