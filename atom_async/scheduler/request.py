"""One request as the scheduler sees it, and the table of what may become of it."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from atom_async.cache.hashing import next_hash
from atom_async.wire.messages import SequenceLogprobs
from atom_async.wire.sampling import SamplingParams

if TYPE_CHECKING:
    from .queues import OrderedQueue
    from .waits import Wait, Waiters

Order = tuple[int, float, int]
"""(priority, the policy's key, arrival rank): smaller goes first."""


class State(Enum):
    READY = "ready"
    """In the queue, holding nothing; a walk may admit it: new, released or preempted."""
    PARKED = "parked"
    """Waits for a prefix that another request will compute; holds nothing."""
    BLOCKED = "blocked"
    """Was found not to fit into memory; holds nothing; looked at again when enough may be free."""
    RUNNING = "running"
    """Has a slot and blocks; its prompt is being computed or it decodes."""
    FINISHED = "finished"
    ABORTED = "aborted"
    FAILED = "failed"

    __hash__ = object.__hash__
    """Members are single; Enum's own hash goes through the name, in Python."""


_END = frozenset({State.FINISHED, State.ABORTED, State.FAILED})

TRANSITIONS: dict[State, frozenset[State]] = {
    State.READY: frozenset({State.PARKED, State.BLOCKED, State.RUNNING}) | _END,
    State.PARKED: frozenset({State.READY}) | _END,
    State.BLOCKED: frozenset({State.READY}) | _END,
    State.RUNNING: frozenset({State.READY}) | _END,
    State.FINISHED: frozenset(),
    State.ABORTED: frozenset(),
    State.FAILED: frozenset(),
}
"""A queued request can be FINISHED: its client had enough while it was preempted."""


@dataclass(slots=True, eq=False)
class Group:
    """The requests of one body: their deadline is over once one of them was started."""

    started: bool = False


@dataclass(slots=True, eq=False)
class Request:
    """Positions of a running request, in tokens:

    0 .. present .. computed .. total
    |  reused  | submitted  | not yet planned

    `tokens` holds what is known; samples in flight follow it, so total = len(tokens) + samples_in_flight.
    """

    request_id: str
    tokens: array[int]
    """Prompt, then output as far as it is known."""
    prompt_len: int
    sampling: SamplingParams
    end_token_ids: frozenset[int]
    chain: list[bytes]
    """Hashes of the full blocks of `tokens`, as far as computed: all of the prompt's at arrival."""
    root: bytes
    """Parent of the first block's hash: from the cache salt."""
    max_total_len: int
    """Prompt plus the most output allowed by max_tokens and the model's length."""
    priority: int
    arrival_rank: int
    arrived_at: float
    deadline: float | None = None
    """It fails if none of its group has been started by then."""
    group: Group = field(default_factory=Group)
    sampling_bytes: int = 0
    """Size of `sampling` in a message, as far as it may be large (grammar, logit_bias)."""
    state: State = State.READY

    # In the queue
    order: Order = (0, 0.0, 0)
    """Its place, fixed when it was placed."""
    uncached: int = 0
    """Tokens to compute, as known when it was placed; 0 outside the queue."""
    home: OrderedQueue | None = None
    """The queue it stands in, when that is a plain one."""
    leads: bytes | None = None
    """The hash of the next block it will compute, under which those who need it too find it."""
    waiters: Waiters | None = None
    """Who waits for blocks of this request."""
    wait: Wait | None = None
    """While PARKED."""
    wait_deadline: float | None = None
    """Set once, when it first parks: afterwards it computes for itself whatever others promise."""
    waits_over: bool = False
    computes_despite: Request | None = None
    """A producer for which it was decided that waiting does not pay."""
    blocked_since: float = -1.0
    """When it was first found not to fit; kept until it is admitted."""
    needed_blocks: int = 0
    """While BLOCKED."""
    needs: bytes | None = None
    """While BLOCKED: the hash of the block that it would compute next."""
    reserved: bool = False
    """It was passed for long enough: no other newcomer takes memory before it."""
    found: list[int] = field(default_factory=list)
    """Blocks of the last look into the pool, and the state of the pool it is true for."""
    found_as_of: int = -1

    # Running
    slot: int = -1
    blocks: list[int] = field(default_factory=list)
    present: int = 0
    computed: int = 0
    """Tokens whose KV is present or will be written by a submitted step."""
    decoding: bool = False
    """The chunk that reaches the known end was submitted: from here the worker feeds itself."""
    samples_in_flight: int = 0
    void_upto: int = 0
    """Results of steps up to this one are void: they were submitted before the last preemption."""
    held_s: float = 0.0
    """How long its half-done prefill was held back, all holds together."""

    cached_tokens: int = 0
    queued_at: float = -1.0
    """When it arrived or was last preempted."""
    admitted_at: float = -1.0
    first_token_at: float = -1.0
    last_token_at: float = -1.0
    preemptions: int = 0
    prompt_logprobs: list[SequenceLogprobs] = field(default_factory=list)
    """Parts that came with chunks and await the first token."""

    @property
    def total(self) -> int:
        return len(self.tokens) + self.samples_in_flight

    @property
    def output_len(self) -> int:
        return len(self.tokens) - self.prompt_len

    @property
    def rank(self) -> tuple[int, int]:
        """Who is preempted last; never changes, so a preempted or released request keeps its place."""
        return (self.priority, self.arrival_rank)

    @property
    def queued(self) -> bool:
        return self.state in (State.READY, State.PARKED, State.BLOCKED)

    @property
    def reuses_prefix(self) -> bool:
        """Prompt log-probabilities need every prompt position computed."""
        return self.sampling.prompt_logprobs < 0

    @property
    def wants_token(self) -> bool:
        """Whether sampling one more token is within its limit."""
        return len(self.tokens) + self.samples_in_flight < self.max_total_len

    def become(self, state: State) -> None:
        """Raises AssertionError for a step that the transition table does not have."""
        assert state in TRANSITIONS[self.state], f"{self.request_id}: {self.state.value} -> {state.value}"
        self.state = state

    def extend_chain(self, block_size: int, upto: int) -> None:
        """Hashes the full blocks of the first `upto` known tokens that have no hash yet."""
        view = memoryview(self.tokens).cast("B")
        width = block_size * self.tokens.itemsize
        for index in range(len(self.chain), upto // block_size):
            parent = self.chain[-1] if self.chain else self.root
            self.chain.append(next_hash(parent, bytes(view[index * width : (index + 1) * width])))
        view.release()
