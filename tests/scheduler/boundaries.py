"""A model whose state can be taken up only at sparse checkpoints, and not always: for tests of the interface."""

from __future__ import annotations

from atom_async.cache.pool import BlockPool
from atom_async.scheduler.request import Request


class Checkpoints:
    """State is kept every `every` tokens, where `declines` does not say no; it can be lost again."""

    pending_reusable = False

    def __init__(self, *, every: int, block_size: int) -> None:
        assert every % block_size == 0
        self.every = every
        self.block_size = block_size
        self.declines: set[str] = set()
        """Producers without room for a checkpoint."""
        self.pool: BlockPool
        self.lost: set[bytes] = set()
        """Hashes of the last block before a checkpoint that is no longer kept."""

    def reusable(self, request: Request, found: int) -> int:
        """Only what is written and kept."""
        boundary = found // self.every * self.every
        while boundary:
            block_hash = request.chain[boundary // self.block_size - 1]
            block = self.pool.find(block_hash)
            if block is not None and self.pool.writer[block] == 0 and block_hash not in self.lost:
                return boundary
            boundary -= self.every
        return 0

    def promised(self, producer: Request, common: int, reached: int) -> int | None:
        if producer.request_id in self.declines:
            return None
        return common // self.every * self.every

    def cut(self, request: Request, start: int, end: int) -> int:
        """A chunk ends at the next checkpoint."""
        return min(end, (start // self.every + 1) * self.every)
