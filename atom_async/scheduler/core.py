"""The scheduler's state and the few transitions it has.

`plan` decides and changes nothing; `commit` executes exactly that plan; `complete` takes a step's result.
Every method runs to completion, and whoever calls passes the time.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, insort
from collections import deque
from dataclasses import dataclass, field

from atom_async.cache.pool import BlockPool
from atom_async.wire.messages import (
    NewSequence,
    SequenceLogprobs,
    StepPlan,
    StepResult,
    pack_ints,
    unpack_ints,
)

from .admission import Limits, Walk
from .outcome import Finish, Outcome
from .plan import Chunk, Plan
from .request import Request, State


@dataclass(slots=True)
class StepInFlight:
    """What a submitted step will do, to be matched with its result."""

    step_id: int
    decodes: list[Request]
    chunks: list[Chunk]
    sample_slots: bytes
    submitted_at: float


@dataclass(slots=True)
class Counters:
    """Running totals, in tokens unless the name says otherwise."""

    steps: int = 0
    prompt_tokens: int = 0
    prompt_tokens_computed: int = 0
    generation_tokens: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    preemptions: int = 0
    aborted_requests: int = 0


@dataclass(slots=True)
class PlanBuilder:
    """Collects a StepPlan's parts while a plan is executed."""

    new: list[NewSequence] = field(default_factory=list)
    grown_slots: array[int] = field(default_factory=lambda: array("i"))
    grown_blocks: array[int] = field(default_factory=lambda: array("i"))
    chunk_slots: array[int] = field(default_factory=lambda: array("i"))
    chunk_starts: array[int] = field(default_factory=lambda: array("i"))
    chunk_lengths: array[int] = field(default_factory=lambda: array("i"))
    chunk_tokens: array[int] = field(default_factory=lambda: array("i"))
    sample_slots: array[int] = field(default_factory=lambda: array("i"))

    def grow(self, slot: int, blocks: list[int]) -> None:
        self.grown_slots.extend([slot] * len(blocks))
        self.grown_blocks.extend(blocks)


class Scheduler:
    """Owns every request, the block pool and the worker slots."""

    def __init__(self, *, pool: BlockPool, limits: Limits) -> None:
        if limits.max_num_batched_tokens < limits.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens ({limits.max_num_batched_tokens}) must be at least max_num_seqs "
                f"({limits.max_num_seqs}): a step carries one token for each decoding sequence"
            )
        self.pool = pool
        self.limits = limits
        self.counters = Counters()
        self.requests: dict[str, Request] = {}
        """Everything alive, by id."""
        self.running: list[Request] = []
        """In rank order."""
        self.waiting: list[Request] = []
        """In rank order."""
        self.in_flight: deque[StepInFlight] = deque()
        self.free_slots = list(range(limits.max_num_seqs - 1, -1, -1))
        self._vacated: list[int] = []
        """Slots whose sequence left since the last plan: the workers do not know yet."""
        self._last_step_id = 0
        self._arrivals = 0

    def __contains__(self, request_id: str) -> bool:
        return request_id in self.requests

    def next_rank(self) -> int:
        """Arrival rank for the next request; the order of calls is the order of arrival."""
        self._arrivals += 1
        return self._arrivals

    def add(self, request: Request) -> None:
        """Queues a request that can run some day: its limit fits the model and all of KV."""
        assert request.request_id not in self.requests, request.request_id
        self.requests[request.request_id] = request
        insort(self.waiting, request, key=_rank)

    # Deciding and doing --------------------------------------------------------------------------

    def plan(self) -> Plan:
        """The next step, as the state allows it now. No side effects."""
        walk = Walk(
            pool=self.pool,
            limits=self.limits,
            running=self.running,
            waiting=self.waiting,
            slots=len(self.free_slots),
        )
        return walk.run()

    def commit(self, plan: Plan, now: float) -> StepPlan:
        """Executes a plan made by `plan` on the present state; returns what the workers are told."""
        assert plan, "an empty plan is not a step"
        for victim in plan.preempted:
            self._preempt(victim)
        self._last_step_id += 1
        step_id = self._last_step_id
        builder = PlanBuilder()
        for chunk in plan.chunks:
            if chunk.reuse is not None:  # before anything is allocated, which might evict what is reused
                self.pool.acquire(chunk.reuse.blocks)
        for request in plan.growing:
            blocks = self.pool.allocate(1)
            request.blocks += blocks
            builder.grow(request.slot, blocks)
        decode_slots = array("i", [request.slot for request in plan.decodes])
        builder.sample_slots.extend(decode_slots)
        for request in plan.decodes:
            request.computed += 1
            request.samples_in_flight += 1
        for chunk in plan.chunks:
            self._execute(chunk, step_id, now, builder)
        finished = pack_ints(self._vacated)
        self._vacated.clear()
        self.counters.steps += 1
        sample_slots = builder.sample_slots.tobytes()
        self.in_flight.append(StepInFlight(step_id, plan.decodes, plan.chunks, sample_slots, now))
        return StepPlan(
            step_id=step_id,
            finished=finished,
            new=builder.new,
            grown_slots=builder.grown_slots.tobytes(),
            grown_blocks=builder.grown_blocks.tobytes(),
            decode_slots=decode_slots.tobytes(),
            chunk_slots=builder.chunk_slots.tobytes(),
            chunk_starts=builder.chunk_starts.tobytes(),
            chunk_lengths=builder.chunk_lengths.tobytes(),
            chunk_tokens=builder.chunk_tokens.tobytes(),
        )

    def _execute(self, chunk: Chunk, step_id: int, now: float, builder: PlanBuilder) -> None:
        request, end = chunk.request, chunk.start + chunk.length
        assert end <= request.total and request.samples_in_flight == 0
        if chunk.reuse is not None:
            self._enter(chunk, now, builder)
        blocks = self.pool.allocate(chunk.new_blocks)
        request.blocks += blocks
        builder.grow(request.slot, blocks)
        builder.chunk_slots.append(request.slot)
        builder.chunk_starts.append(chunk.start)
        builder.chunk_lengths.append(chunk.length)
        builder.chunk_tokens.extend(request.tokens[chunk.start : end])
        self.counters.prompt_tokens_computed += chunk.length
        request.computed = end
        if self.limits.prefix_caching:
            self._name_blocks(request, max(request.present, chunk.start), end, step_id)
        if chunk.samples:
            request.decoding = True
            request.samples_in_flight = 1
            builder.sample_slots.append(request.slot)

    def _enter(self, chunk: Chunk, now: float, builder: PlanBuilder) -> None:
        """Takes a request from the queue into a slot, with the prefix it reuses."""
        request, reuse = chunk.request, chunk.reuse
        assert reuse is not None
        self._remove(self.waiting, request)
        insort(self.running, request, key=_rank)
        request.become(State.RUNNING)
        request.slot = self.free_slots.pop()
        planned = [source.blocks[index] for source, index in reuse.planned]
        self.pool.acquire(planned)
        request.blocks = reuse.blocks + planned
        request.present = reuse.present
        if request.admitted_at < 0:
            request.admitted_at = now
            request.cached_tokens = min(chunk.start, request.prompt_len)
            self.counters.prompt_tokens += request.prompt_len
            self.counters.prefix_queries += request.prompt_len
            self.counters.prefix_hits += request.cached_tokens
        history = request.tokens[: chunk.start].tobytes() if request.sampling.needs_history else b""
        builder.new.append(
            NewSequence(
                slot=request.slot,
                prompt_len=request.prompt_len,
                total_len=len(request.tokens),
                present_tokens=reuse.present,
                blocks=pack_ints(request.blocks),
                history=history,
                sampling=request.sampling,
            )
        )

    def _name_blocks(self, request: Request, start: int, end: int, step_id: int) -> None:
        """Makes the full blocks of [start, end) findable; `step_id` writes them."""
        block_size = self.limits.block_size
        for index in range(start // block_size, end // block_size):
            self.pool.register(request.blocks[index], request.chain[index], step_id=step_id)

    # Results -------------------------------------------------------------------------------------

    def complete(self, result: StepResult, now: float) -> list[Outcome]:
        """The oldest step in flight has run. Returns what its requests have to tell their clients.

        A request that ends here has left the scheduler when this returns.
        """
        step = self.in_flight.popleft()
        assert step.step_id == result.step_id, f"step {step.step_id} expected, result of {result.step_id}"
        self.pool.commit_step(step.step_id)
        if result.prompt_logprobs:
            self._keep_prompt_logprobs(step, result.prompt_logprobs)
        rows = step.decodes + [chunk.request for chunk in step.chunks if chunk.samples]
        if result.failed:
            slots = unpack_ints(step.sample_slots)
            rows, outcomes = self._fail_rows(rows, slots, step.step_id, dict(result.failed))
        else:
            assert result.slots == step.sample_slots, "the rows of the result are not those of the plan"
            outcomes = []
        ended = frozenset(unpack_ints(result.ended)) if result.ended else frozenset[int]()
        described = {entry.slot: entry for entry in result.logprobs}
        for request, token_id in zip(rows, unpack_ints(result.tokens), strict=True):
            if self._is_void(request, step.step_id):
                continue
            outcome = self._take_token(request, token_id, now, grammar_ended=request.slot in ended)
            if described:
                outcome.logprobs = described.get(request.slot)
            outcomes.append(outcome)
            if outcome.finish is not None:
                self._end(request, State.FINISHED)
        return outcomes

    def _take_token(self, request: Request, token_id: int, now: float, *, grammar_ended: bool) -> Outcome:
        request.samples_in_flight -= 1
        known = len(request.tokens)
        if known >= request.max_total_len:  # max_tokens 0: only the prompt was wanted
            return Outcome(request, None, "length", prompt_logprobs=self._prompt_logprobs_of(request))
        if self.limits.prefix_caching and known % self.limits.block_size == 0:
            self._name_output_block(request, known)
        request.tokens.append(token_id)
        request.last_token_at = now
        self.counters.generation_tokens += 1
        outcome = Outcome(request, token_id)
        if request.first_token_at < 0:
            request.first_token_at = now
            outcome.prompt_logprobs = self._prompt_logprobs_of(request)
        outcome.finish = self._finish_of(request, token_id, grammar_ended=grammar_ended)
        if token_id in request.end_token_ids and outcome.finish == "stop":
            outcome.stop_token_id = token_id
        return outcome

    @staticmethod
    def _finish_of(request: Request, token_id: int, *, grammar_ended: bool) -> Finish | None:
        if grammar_ended:
            return "stop"
        if token_id in request.end_token_ids and request.output_len >= request.sampling.min_tokens:
            return "stop"
        if len(request.tokens) >= request.max_total_len:
            return "length"
        return None

    def _name_output_block(self, request: Request, known: int) -> None:
        """The step that just ended wrote position known - 1, and with it filled a block."""
        index = known // self.limits.block_size - 1
        block = request.blocks[index]
        if index >= 0 and self.pool.hashes[block] is None:
            request.extend_chain(self.limits.block_size, known)
            self.pool.register(block, request.chain[index])

    def _is_void(self, request: Request, step_id: int) -> bool:
        """Whether the result concerns a request that has ended or was preempted since."""
        return request.state is not State.RUNNING or step_id <= request.void_upto

    def _keep_prompt_logprobs(self, step: StepInFlight, parts: list[SequenceLogprobs]) -> None:
        by_slot: dict[int, list[SequenceLogprobs]] = {}
        for part in parts:
            by_slot.setdefault(part.slot, []).append(part)
        for chunk in step.chunks:
            request = chunk.request
            if not self._is_void(request, step.step_id):
                request.prompt_logprobs += by_slot.get(request.slot, ())

    @staticmethod
    def _prompt_logprobs_of(request: Request) -> list[SequenceLogprobs] | None:
        if request.sampling.prompt_logprobs < 0:
            return None
        parts, request.prompt_logprobs = request.prompt_logprobs, []
        return parts

    def _fail_rows(
        self, rows: list[Request], slots: array[int], step_id: int, failed: dict[int, str]
    ) -> tuple[list[Request], list[Outcome]]:
        """Ends the requests that the workers could not go on with; returns the other rows."""
        outcomes: list[Outcome] = []
        for request, slot in zip(rows, slots, strict=True):
            if slot in failed and not self._is_void(request, step_id):
                self._end(request, State.FAILED)
                outcomes.append(Outcome(request, None, "error", error=failed[slot]))
        return [r for r, slot in zip(rows, slots, strict=True) if slot not in failed], outcomes

    # Leaving -------------------------------------------------------------------------------------

    def abort(self, request_id: str) -> Request | None:
        """Ends a request in whatever state it is; its memory is free when this returns. None: not alive."""
        return self._leave_early(request_id, State.ABORTED)

    def finish(self, request_id: str) -> Request | None:
        """Like `abort`, for a client that has all it wants."""
        return self._leave_early(request_id, State.FINISHED)

    def _leave_early(self, request_id: str, state: State) -> Request | None:
        request = self.requests.get(request_id)
        if request is not None:
            self._end(request, state)
            self.counters.aborted_requests += state is State.ABORTED
        return request

    def _end(self, request: Request, state: State) -> None:
        if request.state is State.RUNNING:
            self._leave(request)
        else:
            self._remove(self.waiting, request)
        request.become(state)
        del self.requests[request.request_id]

    def _preempt(self, request: Request) -> None:
        """Back into the queue at its old rank; what it computed stays cached as long as it may."""
        self._leave(request)
        request.become(State.WAITING)
        request.void_upto = self._last_step_id
        request.preemptions += 1
        request.prompt_logprobs.clear()
        if self.limits.prefix_caching:
            request.extend_chain(self.limits.block_size, len(request.tokens))
        insort(self.waiting, request, key=_rank)
        self.counters.preemptions += 1

    def _leave(self, request: Request) -> None:
        """Gives back slot and blocks, in this very turn."""
        self._remove(self.running, request)
        self.pool.release(request.blocks)
        self.free_slots.append(request.slot)
        self._vacated.append(request.slot)
        request.blocks = []
        request.slot = -1
        request.present = request.computed = request.samples_in_flight = 0
        request.decoding = False

    @staticmethod
    def _remove(ranked: list[Request], request: Request) -> None:
        position = bisect_left(ranked, request.rank, key=_rank)
        assert ranked[position] is request
        del ranked[position]


def _rank(request: Request) -> tuple[int, int]:
    return request.rank
