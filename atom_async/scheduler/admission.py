"""The one admission walk: from the state, without changing it, the tentative plan of the next step.

Order: decodes, then prompts already begun, then the queue by rank, up to the limits that `Limits` names.
Memory rules:

- A request enters only if its whole prompt fits beside what the prompts already begun still need, with
  one block to spare for each running sequence, so that admission does not cause the next preemption.
- A running sequence that finds no block takes the blocks of the lowest ranked one (largest priority
  number, then latest arrival), at last its own. A plan that preempts admits nobody.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from atom_async.cache.pool import BlockPool

from .plan import Chunk, Plan, Reuse
from .request import Request

BYTES_PER_SEQUENCE = 512
"""Room for one NewSequence without its int lists and what `Request.sampling_bytes` counts."""
BYTES_PER_INT = 4


@dataclass(frozen=True, slots=True)
class Limits:
    """What one step, and the engine as a whole, may carry."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_plan_bytes: int
    block_size: int
    prefix_caching: bool


class Walk:
    """One pass over running and waiting requests. Use once: `Walk(...).run()`."""

    def __init__(
        self, *, pool: BlockPool, limits: Limits, running: Sequence[Request], waiting: Iterable[Request], slots: int
    ) -> None:
        self.pool = pool
        self.limits = limits
        self.running = running
        self.waiting = waiting
        self.plan = Plan()
        self.tokens_left = limits.max_num_batched_tokens
        self.bytes_left = limits.max_plan_bytes
        self.slots_left = slots
        self.blocks_left = pool.available
        self.blocks_promised = 0
        """Blocks that prompts already begun will still need after this step."""
        self._victims = len(running)
        """Running requests from this index on are preempted by this plan."""
        self._released: dict[int, int] = {}
        """Block -> references that the preemptions of this plan give back."""
        self._planned: dict[bytes, tuple[Request, int]] = {}
        """Hashes of blocks that the chunks of this plan will write."""
        self._taken: set[int] = set()
        """Cached blocks that the admissions of this plan reuse, and that are no longer available."""

    def run(self) -> Plan:
        self._place_decodes()
        self._place_begun()
        if not self.plan.preempted:
            self._place_waiting()
        return self.plan

    def _place_decodes(self) -> None:
        block_size = self.limits.block_size
        decodes, growing = self.plan.decodes, self.plan.growing
        for position, request in enumerate(self.running):
            if position >= self._victims:
                break
            if not request.decoding or not request.wants_token:
                continue
            if request.computed == len(request.blocks) * block_size:
                if not self._find_blocks(1, position):
                    break
                self.blocks_left -= 1
                growing.append(request)
            decodes.append(request)
            self.tokens_left -= 1
        self.bytes_left -= BYTES_PER_INT * (len(decodes) + 2 * len(growing))

    def _place_begun(self) -> None:
        """Further chunks of prompts that have a slot already."""
        for position, request in enumerate(self.running):
            if position >= self._victims:
                break
            if request.decoding:
                continue
            length = min(self.tokens_left, request.total - request.computed, self._fitting_tokens())
            blocks = self._blocks_for(request, request.computed + length)
            if blocks > self.blocks_left and not self._find_blocks(blocks, position):
                break
            if length > 0:
                self._add_chunk(request, request.computed, length, blocks, None)
            self.blocks_promised += self._blocks_for(request, request.total) - blocks

    def _place_waiting(self) -> None:
        spare = len(self.running)
        for request in self.waiting:
            if self.slots_left == 0 or self.tokens_left == 0:
                break
            if not self._admit(request, spare):
                break

    def _admit(self, request: Request, spare: int) -> bool:
        reuse = self._reusable(request)
        start = min(reuse.present, request.total - 1)
        length = min(self.tokens_left, request.total - start)
        covered = len(reuse.blocks) + len(reuse.planned)
        blocks = _ceil_div(start + length, self.limits.block_size) - covered
        rest = _ceil_div(request.total, self.limits.block_size) - covered - blocks
        taken = [b for b in reuse.blocks if self.pool.references[b] == 0 and b not in self._taken]
        entry = BYTES_PER_SEQUENCE + request.sampling_bytes + BYTES_PER_INT * covered
        if request.sampling.needs_history:
            entry += BYTES_PER_INT * start
        size = entry + BYTES_PER_INT * (length + 2 * blocks)
        if blocks + rest + len(taken) + self.blocks_promised + spare > self.blocks_left or size > self.bytes_left:
            return False
        self._taken.update(taken)
        self.blocks_left -= len(taken)
        self.blocks_promised += rest
        self.slots_left -= 1
        self.bytes_left -= entry
        self._add_chunk(request, start, length, blocks, reuse)
        return True

    def _reusable(self, request: Request) -> Reuse:
        """The longest prefix that is in the pool or, behind that, in this plan's own chunks."""
        if not (self.limits.prefix_caching and request.reuses_prefix):
            return Reuse([], [], 0)
        blocks = self.pool.match(request.chain)
        planned: list[tuple[Request, int]] = []
        for block_hash in request.chain[len(blocks) :]:
            source = self._planned.get(block_hash)
            if source is None:
                break
            planned.append(source)
        return Reuse(blocks, planned, (len(blocks) + len(planned)) * self.limits.block_size)

    def _add_chunk(self, request: Request, start: int, length: int, blocks: int, reuse: Reuse | None) -> None:
        end = start + length
        self.blocks_left -= blocks
        self.tokens_left -= length
        self.bytes_left -= BYTES_PER_INT * (length + 2 * blocks)
        self.plan.chunks.append(Chunk(request, start, length, reuse, blocks, samples=end == request.total))
        if self.limits.prefix_caching:
            present = reuse.present if reuse is not None else start
            for index in range(present // self.limits.block_size, end // self.limits.block_size):
                self._planned.setdefault(request.chain[index], (request, index))

    def _find_blocks(self, count: int, position: int) -> bool:
        """Preempts from the lowest rank up until `count` blocks are there; at last the request itself."""
        while self.blocks_left < count:
            self._victims -= 1
            victim = self.running[self._victims]
            self._take_back(victim)
            self.plan.preempted.append(victim)
            self.blocks_left += self._released_by(victim)
            if self._victims == position:
                return False
        return True

    def _take_back(self, victim: Request) -> None:
        """Undoes the decode of a victim that this plan had placed already."""
        if self.plan.decodes and self.plan.decodes[-1] is victim:
            self.plan.decodes.pop()
            self.tokens_left += 1
            if self.plan.growing and self.plan.growing[-1] is victim:
                self.plan.growing.pop()
                self.blocks_left += 1

    def _released_by(self, victim: Request) -> int:
        freed = 0
        for block in victim.blocks:
            given_back = self._released.get(block, 0) + 1
            self._released[block] = given_back
            freed += self.pool.references[block] == given_back
        return freed

    def _blocks_for(self, request: Request, end: int) -> int:
        """Blocks that `request` lacks to hold its tokens up to `end`."""
        return _ceil_div(end, self.limits.block_size) - len(request.blocks)

    def _fitting_tokens(self) -> int:
        """Tokens of a chunk that still fit into the message."""
        return max(0, self.bytes_left // (3 * BYTES_PER_INT))


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)
