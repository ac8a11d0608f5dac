"""The pool against a model that keeps every block's life in plain sets and lists."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from atom_async.cache.pool import BlockPool


def name(number: int) -> bytes:
    return b"%016d" % number


def test_a_pool_needs_a_block() -> None:
    with pytest.raises(ValueError, match="at least one block"):
        BlockPool(0)


def test_evicts_the_least_recently_used_and_of_a_sequence_the_tail_first() -> None:
    pool = BlockPool(4)
    old, new = pool.allocate(2), pool.allocate(2)
    for number, block in enumerate(old + new):
        pool.register(block, name(number))
    pool.release(old)
    pool.release(new)
    assert pool.allocate(1) == [old[1]]
    assert pool.match([name(0), name(1)]) == [old[0]]
    pool.acquire([old[0]])  # used again: no longer the oldest
    pool.release([old[0]])
    assert pool.allocate(2) == [new[1], new[0]]


def test_w12_the_older_copy_of_a_prefix_is_still_found() -> None:
    pool = BlockPool(3)
    first, second = pool.allocate(1), pool.allocate(1)
    pool.register(first[0], name(7))
    pool.register(second[0], name(7))
    pool.release(second)
    pool.allocate(2)  # takes the free block, then evicts the newer copy
    assert pool.find(name(7)) == first[0]
    pool.check()


def test_w12_the_newer_copy_is_found_when_the_older_goes() -> None:
    pool = BlockPool(2)
    first, second = pool.allocate(1), pool.allocate(1)
    pool.register(first[0], name(7))
    pool.register(second[0], name(7))
    pool.release(first)
    pool.allocate(1)
    assert pool.find(name(7)) == second[0]
    pool.check()


def test_w10_blocks_of_a_failed_step_are_never_found() -> None:
    pool = BlockPool(4)
    blocks = pool.allocate(3)
    pool.register(blocks[0], name(0), step_id=1)
    pool.register(blocks[1], name(1), step_id=2)
    pool.register(blocks[2], name(2), step_id=2)
    pool.release(blocks[2:])
    pool.commit_step(1)
    assert pool.match([name(0), name(1), name(2)]) == blocks
    assert pool.fail_step(2) == [blocks[1]]
    assert pool.match([name(0), name(1), name(2)]) == blocks[:1]
    assert pool.find(name(2)) is None
    pool.check()


def test_a_pending_block_that_is_evicted_and_named_anew_belongs_to_the_newer_step() -> None:
    pool = BlockPool(1)
    block = pool.allocate(1)
    pool.register(block[0], name(0), step_id=1)
    pool.release(block)
    assert pool.allocate(1) == block
    pool.register(block[0], name(1), step_id=2)
    pool.commit_step(1)
    pool.check()
    assert pool.fail_step(2) == block
    assert pool.find(name(1)) is None


class PoolMachine(RuleBasedStateMachine):
    """Sequences come and go; names repeat, so copies, hits and evictions all occur."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(8)
        self.sequences: list[list[int]] = []
        self.step = 0
        self.open_steps: list[int] = []

    @rule(count=st.integers(1, 4))
    def allocate(self, count: int) -> None:
        if count <= self.pool.available:
            self.sequences.append(self.pool.allocate(count))

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), number=st.integers(0, 5), pending=st.booleans())
    def register(self, data: st.DataObject, number: int, pending: bool) -> None:
        blocks = [b for s in self.sequences for b in s if self.pool.hashes[b] is None]
        if not blocks:
            return
        block = data.draw(st.sampled_from(blocks))
        if pending:
            self.step += 1
            self.open_steps.append(self.step)
            self.pool.register(block, name(number), step_id=self.step)
        else:
            self.pool.register(block, name(number))
        assert self.pool.find(name(number)) is not None

    @rule(numbers=st.lists(st.integers(0, 5), max_size=4, unique=True))
    def reuse(self, numbers: list[int]) -> None:
        chain = [name(n) for n in numbers]
        blocks = self.pool.match(chain)
        assert [self.pool.hashes[b] for b in blocks] == chain[: len(blocks)]
        if blocks:
            self.pool.acquire(blocks)
            self.sequences.append(blocks)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.sequences) - 1))
        before = self.pool.available
        blocks = self.sequences.pop(index)
        last = [b for b in blocks if not any(b in s for s in self.sequences)]
        self.pool.release(blocks)
        assert self.pool.available == before + len(last)

    @precondition(lambda self: self.open_steps)
    @rule(fails=st.booleans())
    def end_step(self, fails: bool) -> None:
        step = self.open_steps.pop(0)
        if fails:
            pending = [b for b in range(8) if self.pool.writer[b] == step]
            owned = self.pool.fail_step(step)
            assert owned == [b for b in pending if self.pool.references[b]]
            assert all(self.pool.hashes[b] is None for b in pending)
        else:
            self.pool.commit_step(step)
            assert step not in self.pool.writer

    @rule()
    def clear(self) -> None:
        cached = self.pool.cached
        assert self.pool.clear_cached() == cached
        assert self.pool.cached == 0

    @invariant()
    def ledger(self) -> None:
        self.pool.check()
        owned = {b for s in self.sequences for b in s}
        assert self.pool.owned == len(owned)
        for block in range(8):
            assert self.pool.references[block] == sum(s.count(block) for s in self.sequences)


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
