"""The block pool: who owns each KV block, what it contains, which one is evicted next.

A block is in exactly one of three sets, and `free + cached + owned == total` always holds:

    free    nothing worth keeping
    cached  its hash is in the index, no request refers to it; least recently used is evicted first
    owned   at least one request refers to it

Apart from that, a hashed block is *pending* (a submitted step will write it) or *committed* (written).
Both can be found: steps run in order on the workers, so whoever reads a pending block runs in the step
that writes it or a later one. For the same reason a block may change owner while an older step is still
in flight: that step's writes land before any write of the new owner. When a step fails, its pending
blocks leave the index before anyone else can find them.

Copies of one prefix (two requests computed it at once) are all known; evicting one leaves the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

COMMITTED = 0
"""`BlockPool.writer` of a block that no step in flight will write."""


MATCH_SLICE = 64
"""Hashes looked up in one go: a run of hits costs little per block, a miss at once costs little in all."""


class BlockPool:
    """Owns every block of the KV cache, by id in [0, num_blocks)."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"a pool needs at least one block, got {num_blocks}")
        self.num_blocks = num_blocks
        self.references: list[int] = [0] * num_blocks
        self.hashes: list[bytes | None] = [None] * num_blocks
        self.writer: list[int] = [COMMITTED] * num_blocks
        """Id of the step that will write the block, while it is pending."""
        self.evicted_blocks = 0
        self.forgotten = 0
        """Grows when a block leaves the index: while it stands still, what was found is still there."""
        self._free: list[int] = list(range(num_blocks - 1, -1, -1))
        self._cached: dict[int, None] = {}
        """Insertion order is eviction order."""
        self._index: dict[bytes, int] = {}
        self._copies: dict[bytes, list[int]] = {}
        """Further blocks with the same hash, where there are any."""
        self._pending: dict[int, list[int]] = {}
        """Step id -> blocks it will write, as registered."""

    @property
    def available(self) -> int:
        """Blocks that `allocate` can hand out."""
        return len(self._free) + len(self._cached)

    @property
    def cached(self) -> int:
        return len(self._cached)

    @property
    def owned(self) -> int:
        return self.num_blocks - self.available

    @property
    def pending_steps(self) -> set[int]:
        """Steps that will write blocks which can be found already."""
        return set(self._pending)

    def find(self, block_hash: bytes) -> int | None:
        """A pending or committed block with this hash."""
        return self._index.get(block_hash)

    def match(self, chain: Sequence[bytes], *, start: int = 0) -> list[int]:
        """Blocks of the longest run of `chain[start:]` that is in the index."""
        blocks: list[int] = []
        for position in range(start, len(chain), MATCH_SLICE):
            found = list(map(self._index.get, chain[position : position + MATCH_SLICE]))
            if None in found:
                blocks += found[: found.index(None)]  # type: ignore[arg-type]
                break
            blocks += found  # type: ignore[arg-type]
        return blocks

    def acquire(self, blocks: Iterable[int]) -> None:
        """One more reference to each of these indexed blocks."""
        references, cached = self.references, self._cached
        for block in blocks:
            if references[block] == 0:
                del cached[block]
            references[block] += 1

    def allocate(self, count: int) -> list[int]:
        """`count` blocks with one reference each, evicting cached ones where nothing is free.

        The caller has checked `available`: asking for more is a broken invariant.
        """
        assert count <= self.available, f"{count} blocks asked, {self.available} available"
        blocks: list[int] = []
        for _ in range(count):
            block = self._free.pop() if self._free else self._evict()
            self.references[block] = 1
            blocks.append(block)
        return blocks

    def release(self, blocks: Sequence[int]) -> None:
        """One reference less to each block of a sequence, given in sequence order.

        Walks backwards, so that of one sequence the tail is evicted before the prefix it builds on.
        """
        references = self.references
        for block in reversed(blocks):
            references[block] -= 1
            if references[block] == 0:
                if self.hashes[block] is not None:
                    self._cached[block] = None
                else:
                    self._free.append(block)
            else:
                assert references[block] > 0, f"block {block} released more often than acquired"

    def register(self, block: int, block_hash: bytes, *, step_id: int = COMMITTED) -> None:
        """Names the contents of an owned block. With a step id it is pending until that step completes."""
        assert self.hashes[block] is None, f"block {block} is registered already"
        assert self.references[block] > 0, f"block {block} has no owner"
        self.hashes[block] = block_hash
        if block_hash in self._index:
            self._copies.setdefault(block_hash, []).append(block)
        else:
            self._index[block_hash] = block
        if step_id != COMMITTED:
            self.writer[block] = step_id
            self._pending.setdefault(step_id, []).append(block)

    def commit_step(self, step_id: int) -> None:
        """The step has written its blocks."""
        for block in self._pending.pop(step_id, ()):
            if self.writer[block] == step_id:
                self.writer[block] = COMMITTED

    def fail_step(self, step_id: int) -> list[int]:
        """The step will never write: its pending blocks leave the index. Returns those still owned."""
        owned: list[int] = []
        for block in self._pending.pop(step_id, ()):
            if self.writer[block] != step_id:
                continue
            self._forget(block)
            if self.references[block]:
                owned.append(block)
            else:
                del self._cached[block]
                self._free.append(block)
        return owned

    def clear_cached(self) -> int:
        """Forgets every cached block; returns how many."""
        count = len(self._cached)
        for block in self._cached:
            self._forget(block)
            self._free.append(block)
        self._cached.clear()
        return count

    def _evict(self) -> int:
        block = next(iter(self._cached))
        del self._cached[block]
        self._forget(block)
        self.evicted_blocks += 1
        return block

    def _forget(self, block: int) -> None:
        block_hash = self.hashes[block]
        assert block_hash is not None
        self.forgotten += 1
        self.hashes[block] = None
        self.writer[block] = COMMITTED
        copies = self._copies.get(block_hash)
        if self._index[block_hash] != block:
            assert copies is not None
            copies.remove(block)
        elif copies:
            self._index[block_hash] = copies.pop()
        else:
            del self._index[block_hash]
        if copies is not None and not copies:
            del self._copies[block_hash]

    def check(self) -> None:
        """Asserts the ledger and the index from scratch. O(num_blocks); for tests and idle moments."""
        owned = {b for b in range(self.num_blocks) if self.references[b] > 0}
        free, cached = set(self._free), set(self._cached)
        assert len(free) == len(self._free), "a block is free twice"
        assert not (free & cached or free & owned or cached & owned), "a block is in two sets"
        assert len(free) + len(cached) + len(owned) == self.num_blocks, "a block is in no set"
        assert all(self.hashes[b] is None for b in free), "a free block has a hash"
        assert all(self.hashes[b] is not None for b in cached), "a cached block has no hash"
        indexed = set(self._index.values()).union(*self._copies.values())
        assert indexed == {b for b in range(self.num_blocks) if self.hashes[b] is not None}
        assert all(self.hashes[b] == h for h, b in self._index.items()), "the index points at other contents"
        assert all(self.hashes[b] == h for h, twins in self._copies.items() for b in twins)
        pending = {b for b in range(self.num_blocks) if self.writer[b] != COMMITTED}
        assert pending <= indexed, "a block is pending without a hash"
        assert all(b in self._pending[self.writer[b]] for b in pending), "a pending block has no step"
