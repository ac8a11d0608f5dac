"""The one admission walk: from the state, without changing it, the tentative plan of the next step.

Decodes come first, then prompts with at most a token to compute, then prefill: begun prompts, ready ones, blocked
ones that may fit now, and waiters whose boundary this very plan reaches, all in one order, up to the limits that
`Limits` names and the policy's bound on the step's time. What the walk looks at it either admits or takes out of
the queue, so its work is bounded by slots and budget, not by how many wait.

Memory rules:

- A request enters only if its whole prompt fits beside what the prompts already begun still need, with one block
  to spare for each running sequence, so that admission does not cause the next preemption. Otherwise it is
  blocked, and blocks only itself; once it was passed for long enough, no newcomer behind it takes memory.
- A running sequence that finds no block takes the blocks of the lowest ranked one (largest priority number, then
  latest arrival), at last its own. A plan that preempts for memory admits nobody.
- A request may take slot and blocks of running ones with a lower priority than its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heappush

from .cost_model import CostModel, chunk_pairs
from .limits import BYTES_PER_INT, BYTES_PER_SEQUENCE, Limits
from .plan import Chunk, Plan, Reuse
from .policy import Policy, Prefill, StepBound
from .prefixes import find_blocks
from .queues import Queues
from .request import Order, Request
from .waits import Boundaries

LOOK_AHEAD = 16
"""So many prefills may be passed over because nothing of them fits into what is left of the step."""


class Walk:
    """One pass. Use once: `Walk(...).run()`."""

    def __init__(
        self, queues: Queues, limits: Limits, policy: Policy, costs: CostModel, boundaries: Boundaries
    ) -> None:
        self.queues = queues
        self.pool = queues.pool
        self.limits = limits
        self.policy = policy
        self.costs = costs
        self.boundaries = boundaries
        self.running = queues.running
        self.plan = Plan()
        self.tokens_left = limits.max_num_batched_tokens
        self.bytes_left = limits.max_plan_bytes
        self.slots_left = queues.slots
        self.blocks_left = self.pool.available
        self.blocks_promised = 0
        """Blocks that prompts already begun will still need after this step."""
        self.bound: StepBound | None = None
        self.ms = 0.0
        """Predicted time of the prefill-carrying step so far."""
        self._spare = len(queues.running)
        self._closed = False
        """No further newcomer is looked at."""
        self._begun_tokens = 0
        """That prompts already begun have left to compute."""
        self._look_ahead = LOOK_AHEAD
        self._victims = len(queues.running)
        """Running requests from this index on are preempted by this plan."""
        self._released: dict[int, int] = {}
        """Block -> references that the preemptions of this plan give back."""
        self._planned: dict[bytes, tuple[Request, int]] = {}
        """Hashes of blocks that the chunks of this plan will write."""
        self._ahead: dict[bytes, Request] = {}
        """Hash of the next block of each prompt that this plan computes in part."""
        self._taken: set[int] = set()
        """Blocks that the admissions of this plan reuse: not available, whoever else gives them back."""
        self._heap: list[tuple[Order, Sequence[Request], int]] = []
        """Sources of candidates by the order of their first: (order, requests, index)."""

    def run(self, *, prefill: bool = True) -> Plan:
        """`prefill` False: only what is never held."""
        self._place_decodes()
        if not self.plan.preempted:
            self._promise_begun()
            self._place_instants()
            if prefill:
                self._place_prefills()
        elif prefill:
            self._closed = True
            self._promise_begun()
            self._place_prefills()
        return self.plan

    # What is never held --------------------------------------------------------------------------

    def _place_decodes(self) -> None:
        block_size = self.limits.block_size
        decodes, growing, work = self.plan.decodes, self.plan.growing, self.plan.work
        for position, request in enumerate(self.running):
            if position >= self._victims:
                break
            if not request.decoding or not request.wants_token:
                continue
            if request.computed == len(request.blocks) * block_size:
                if not self._find_block(position):
                    break
                self.blocks_left -= 1
                growing.append(request)
            decodes.append(request)
            work.kv_tokens += request.computed
        work.decodes = len(decodes)
        self.bytes_left -= BYTES_PER_INT * (len(decodes) + 2 * len(growing))
        self.tokens_left -= len(decodes)

    def _find_block(self, position: int) -> bool:
        """Preempts from the lowest rank up until a block is there; at last the request itself."""
        while self.blocks_left < 1:
            self._preempt_last()
            if self._victims == position:
                return False
        return True

    def _preempt_last(self) -> Request:
        self._victims -= 1
        victim = self.running[self._victims]
        self._take_back(victim)
        self.plan.preempted.append(victim)
        self.blocks_left += self._released_by(victim)
        return victim

    def _take_back(self, victim: Request) -> None:
        """Undoes the decode of a victim that this plan had placed already."""
        decodes, growing = self.plan.decodes, self.plan.growing
        if decodes and decodes[-1] is victim:  # placed before a newcomer of higher priority was looked at
            decodes.pop()
            self.plan.work.kv_tokens -= victim.computed
            self.plan.work.decodes -= 1
            self.tokens_left += not self.limits.separate
            if growing and growing[-1] is victim:
                growing.pop()
                self.blocks_left += 1

    def _released_by(self, victim: Request) -> int:
        freed = 0
        for block in victim.blocks:
            given_back = self._released.get(block, 0) + 1
            self._released[block] = given_back
            freed += self.pool.references[block] == given_back and block not in self._taken
        return freed

    def _promise_begun(self) -> None:
        for request in self.running[: self._victims]:
            if not request.decoding:
                self.blocks_promised += self._blocks_for(request, request.total)
                self._begun_tokens += request.total - request.computed

    def _place_instants(self) -> None:
        reserved = self.queues.reserved
        for request in self.queues.instant:
            if self.slots_left == 0 or self.tokens_left == 0 or self.bytes_left <= 0:
                break
            if reserved and request.priority >= reserved[0].priority:
                break
            if self.slots_left == 1 and self.queues.ready and self.queues.ready[0].order < request.order:
                break  # the last slot is for whose turn it is: a stream of cached prompts must not take all
            reuse, _ = self._reusable(request)
            if request.total - reuse.present > 1:  # evicted since it was placed
                self.plan.deferred.append(request)
                continue
            self._enter(request, reuse, None, instant=True)

    # Prefill -------------------------------------------------------------------------------------

    def _place_prefills(self) -> None:
        work = self.plan.work
        if self.limits.separate:
            self.tokens_left += len(self.plan.decodes)
        self.bound = self.policy.bound(work, self._begun_tokens + self.queues.queued_tokens)
        self.ms = self.costs.base_ms(0, 0) if self.limits.separate else self.costs.base_ms(work.decodes, work.kv_tokens)
        self._open_sources()
        while self._heap and self.tokens_left > 0 and self._look_ahead > 0:
            _, requests, index = heappop(self._heap)
            request = requests[index]
            begun = request.slot >= 0
            if self._closed and not begun:
                continue
            if index + 1 < len(requests):
                heappush(self._heap, (requests[index + 1].order, requests, index + 1))
            if not (self._go_on(request) if begun else self._consider(request)):
                break
        self.plan.full = self.tokens_left <= 0 or not self._ms_left

    def _open_sources(self) -> None:
        heap = self._heap
        for request in self.running[: self._victims]:
            if not request.decoding:
                heap.append((self._order_of_begun(request), (request,), 0))
        if not self._closed:
            sources: list[Sequence[Request]] = [self.queues.ready]
            if self.queues.blocked:
                sources += self.queues.blocked.open_classes(self._headroom)
            heap.extend((source[0].order, source, 0) for source in sources if source)
            if self.queues.reserved:
                first = self.queues.reserved[0]
                heap.append(((first.priority, float("-inf"), first.arrival_rank), (first,), 0))
        heapify(heap)

    def _order_of_begun(self, request: Request) -> Order:
        left = request.total - request.computed
        key = self.policy.order(Prefill(request.arrived_at, left, request.computed))
        own = (request.priority, key, request.arrival_rank)
        urgent = request.waiters.most_urgent() if request.waiters else None
        return own if urgent is None or own < urgent else (urgent[0], urgent[1], request.arrival_rank)

    @property
    def _headroom(self) -> int:
        """Blocks that a newcomer may take."""
        return self.blocks_left - self.blocks_promised - self._spare

    def _go_on(self, request: Request) -> bool:
        """The next chunk of a begun prompt. False: the step is full."""
        tokens = self._chunk_tokens(request, request.computed)
        in_blocks = len(request.blocks) * self.limits.block_size - request.computed
        tokens = min(tokens, in_blocks + max(self.blocks_left, 0) * self.limits.block_size)
        if tokens <= 0:
            return self._skip()
        blocks = self._blocks_for(request, request.computed + tokens)
        self.blocks_promised -= blocks
        self._add_chunk(request, request.computed, tokens, blocks, None)
        return True

    def _skip(self) -> bool:
        """Nothing of it fits into this step; perhaps a smaller one behind it does."""
        self._look_ahead -= 1
        return self._ms_left

    def _consider(self, request: Request) -> bool:
        """A newcomer. False: nobody behind it can have a chunk."""
        reuse, next_hash = self._reusable(request)
        if next_hash is not None and self._is_computed_elsewhere(request, next_hash):
            if request.wait is None:  # else it is placed anyway, once the producer's chunk has released it
                self.plan.deferred.append(request)
            return True
        alone = request.wait is None and not reuse.planned  # it needs no chunk of this plan, which may be held
        instant = alone and request.total - reuse.present <= 1
        return self._enter(request, reuse, next_hash, instant=instant)

    def _is_computed_elsewhere(self, request: Request, next_hash: bytes) -> bool:
        producer = self._ahead.get(next_hash) or self.queues.producers.get(next_hash)
        return (
            producer is not None
            and producer is not request
            and producer is not request.computes_despite
            and (producer.slot >= 0 or next_hash in self._ahead)
            and not request.waits_over
            and request.reuses_prefix
            and producer.priority <= request.priority
        )

    def _enter(self, request: Request, reuse: Reuse, next_hash: bytes | None, *, instant: bool) -> bool:
        """Admits it if slot, memory, message and time allow. False: nobody behind it can be admitted."""
        start = min(reuse.present, request.total - 1)
        length = 1 if instant else self._chunk_tokens(request, start)
        if length <= 0:
            return self._skip()
        covered = len(reuse.blocks) + len(reuse.planned)
        blocks = self._ceil_blocks(start + length) - covered
        rest = self._ceil_blocks(request.total) - covered - blocks
        taken = self._taken_by(reuse.blocks)
        entry = BYTES_PER_SEQUENCE + request.sampling_bytes + BYTES_PER_INT * covered
        if request.sampling.needs_history:
            entry += BYTES_PER_INT * start
        if entry + BYTES_PER_INT * (length + 2 * blocks) > self.bytes_left:
            return False
        need = blocks + rest + len(taken)
        if self.slots_left == 0 or need > self._headroom:
            if not self._make_room(request, need, self._taken.union(reuse.blocks)):
                return self._turn_away(request, need, next_hash)
            taken = self._taken_by(reuse.blocks)
        self._taken.update(reuse.blocks)
        self.blocks_left -= len(taken)
        self.blocks_promised += rest
        self.slots_left -= 1
        self.bytes_left -= entry
        self._add_chunk(request, start, length, blocks, reuse, instant=instant)
        return True

    def _turn_away(self, request: Request, need: int, next_hash: bytes | None) -> bool:
        if self.slots_left == 0:
            self._closed = True  # those behind it have no better claim to a slot
        elif request.reserved:
            self._closed = True  # what is free is kept for it
        elif request.wait is None:
            self.plan.blocked.append((request, need, next_hash))
        return True

    def _taken_by(self, blocks: list[int]) -> list[int]:
        """Those of the blocks that are available now, and are not once they are reused."""
        references, released, taken = self.pool.references, self._released, self._taken
        if released:
            return [b for b in blocks if references[b] == released.get(b, 0) and b not in taken]
        return [b for b in blocks if not references[b] and b not in taken]

    def _make_room(self, request: Request, need: int, reused: set[int]) -> bool:
        """Preempts running requests of lower priority, from the lowest rank up, if that is enough; else nothing.
        `reused`: blocks that this plan needs, which the victims' leaving does not free."""
        victims, freed, released = 0, 0, dict(self._released)
        planned = {chunk.request.arrival_rank for chunk in self.plan.executed}
        while self.slots_left + victims < 1 or need > self._headroom + freed + victims:
            position = self._victims - victims - 1
            if position < 0:
                return False
            victim = self.running[position]
            if victim.priority <= request.priority or victim.arrival_rank in planned:
                return False
            victims += 1
            if not victim.decoding:
                freed += self._blocks_for(victim, victim.total)
            for block in victim.blocks:
                released[block] = released.get(block, 0) + 1
                freed += self.pool.references[block] == released[block] and block not in reused
        for _ in range(victims):
            victim = self._preempt_last()
            self.plan.for_priority.append(victim)
            if not victim.decoding:
                self.blocks_promised -= self._blocks_for(victim, victim.total)
            self.slots_left += 1
            self._spare -= 1
        victims_left = self._victims
        self._heap = [entry for entry in self._heap if not self._is_victim(entry, victims_left)]
        heapify(self._heap)
        return True

    def _is_victim(self, entry: tuple[Order, Sequence[Request], int], victims: int) -> bool:
        request = entry[1][entry[2]]
        return request.slot >= 0 and any(request is victim for victim in self.running[victims:])

    def _reusable(self, request: Request) -> tuple[Reuse, bytes | None]:
        """The longest prefix in the pool or, behind that, in this plan's own chunks; and the hash of its
        first block that nobody has submitted."""
        if not (self.limits.prefix_caching and request.reuses_prefix):
            return Reuse([], [], 0), None
        block_size = self.limits.block_size
        blocks = find_blocks(self.pool, request)
        found = len(blocks)
        del blocks[self.boundaries.reusable(request, found * block_size) // block_size :]
        planned: list[tuple[Request, int]] = []
        if self.boundaries.pending_reusable:
            for block_hash in request.chain[found:]:
                source = self._planned.get(block_hash)
                if source is None:
                    break
                planned.append(source)
        covered = len(blocks) + len(planned)
        known = max(found, covered)
        return Reuse(blocks, planned, covered * block_size), request.chain[known] if known < len(
            request.chain
        ) else None

    # Chunks --------------------------------------------------------------------------------------

    @property
    def _ms_left(self) -> bool:
        return self.bound is None or self.ms < self.bound.unfinished_ms

    def _chunk_tokens(self, request: Request, start: int) -> int:
        """Tokens of the request's next chunk as budget, cap, message and the step's time allow."""
        left = request.total - start
        limit = min(self.tokens_left, left, max(0, self.bytes_left // (3 * BYTES_PER_INT)))
        if not self.limits.chunked:
            return left if limit == left and self._whole_fits(start, left) else 0
        if self.limits.max_chunk_tokens:
            limit = min(limit, self.limits.max_chunk_tokens)
        if self.bound is not None and limit > 0:
            limit = self._within_bound(request, start, left, limit, self.bound)
        end = self.boundaries.cut(request, start, start + limit)
        return end - start

    def _whole_fits(self, start: int, left: int) -> bool:
        """For prompts that are computed whole: the first of a step always fits, or none ever would."""
        bound, first = self.bound, not self.plan.chunks
        return bound is None or first or self.ms + self.costs.chunk_ms(start, left) <= bound.finishing_ms

    def _within_bound(self, request: Request, start: int, left: int, limit: int, bound: StepBound) -> int:
        if limit == left and self.ms + self.costs.chunk_ms(start, left) <= bound.finishing_ms:
            return limit
        tokens = self.costs.tokens_within(bound.unfinished_ms - self.ms, start)
        if not self.plan.chunks:
            tokens = max(tokens, bound.least_tokens, self.limits.block_size)
        if tokens >= limit:
            return limit
        block_size = self.limits.block_size
        return (start + tokens) // block_size * block_size - start  # a whole block can be shared

    def _add_chunk(
        self, request: Request, start: int, length: int, blocks: int, reuse: Reuse | None, *, instant: bool = False
    ) -> None:
        end = start + length
        self.blocks_left -= blocks
        self.tokens_left -= length
        self.bytes_left -= BYTES_PER_INT * (length + 2 * blocks)
        chunk = Chunk(request, start, length, reuse, blocks, samples=end == request.total)
        if instant:
            self.plan.work.decodes += 1
            self.plan.work.kv_tokens += start
            self.plan.instants.append(chunk)
        else:
            self.plan.work.add_chunk(start, length)
            self.plan.chunks.append(chunk)
            self.ms += self.costs.tokens_ms(length, chunk_pairs(start, length))
        if self.limits.prefix_caching:
            block_size = self.limits.block_size
            present = reuse.present if reuse is not None else start
            for index in range(present // block_size, end // block_size):
                self._planned.setdefault(request.chain[index], (request, index))
            if not chunk.samples and end // block_size < len(request.chain):
                self._ahead.setdefault(request.chain[end // block_size], request)
            if request.waiters and self.boundaries.pending_reusable and not self._closed:
                self._let_ride(request, end)

    def _let_ride(self, producer: Request, end: int) -> None:
        """Waiters whose boundary this chunk reaches can run in this very plan."""
        assert producer.waiters is not None
        for boundary in producer.waiters.reached(end):
            group = producer.waiters.group(boundary)
            heappush(self._heap, (group[0].order, group, 0))

    def _blocks_for(self, request: Request, end: int) -> int:
        """Blocks that `request` lacks to hold its tokens up to `end`."""
        return self._ceil_blocks(end) - len(request.blocks)

    def _ceil_blocks(self, tokens: int) -> int:
        return -(-tokens // self.limits.block_size)
