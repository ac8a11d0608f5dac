"""One request as the scheduler sees it, and the table of what may become of it."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from enum import Enum

from atom_async.cache.hashing import next_hash
from atom_async.wire.messages import SequenceLogprobs
from atom_async.wire.sampling import SamplingParams


class State(Enum):
    WAITING = "waiting"
    """In the queue, holding nothing: new, or preempted."""
    RUNNING = "running"
    """Has a slot and blocks; its prompt is being computed or it decodes."""
    FINISHED = "finished"
    ABORTED = "aborted"
    FAILED = "failed"


TRANSITIONS: dict[State, frozenset[State]] = {
    State.WAITING: frozenset({State.RUNNING, State.FINISHED, State.ABORTED, State.FAILED}),
    State.RUNNING: frozenset({State.WAITING, State.FINISHED, State.ABORTED, State.FAILED}),
    State.FINISHED: frozenset(),
    State.ABORTED: frozenset(),
    State.FAILED: frozenset(),
}
"""WAITING -> FINISHED: the client had enough while its request was preempted."""


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
    sampling_bytes: int = 0
    """Size of `sampling` in a message, as far as it may be large (grammar, logit_bias)."""
    state: State = State.WAITING
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
    cached_tokens: int = 0
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
        """Smaller goes first; never changes, so a preempted or released request keeps its place."""
        return (self.priority, self.arrival_rank)

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
