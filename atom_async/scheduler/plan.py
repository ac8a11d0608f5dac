"""A step plan before it is executed: the result of the one admission walk.

Building it changes nothing, so a plan can be thrown away. Signal, decision and execution all read it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from .cost_model import StepWork
from .policy import Fire, Hold
from .request import Request


@dataclass(slots=True)
class Reuse:
    """The prefix that an admitted request does not compute."""

    blocks: list[int]
    """Blocks found in the pool."""
    planned: list[tuple[Request, int]]
    """Behind them, blocks that an earlier chunk of this same plan will write: (request, block index)."""
    present: int
    """Tokens covered by both."""


@dataclass(slots=True)
class Chunk:
    """A run of one request's tokens to compute."""

    request: Request
    start: int
    length: int
    reuse: Reuse | None
    """Set when this chunk admits the request."""
    new_blocks: int
    samples: bool
    """Reaches the end of what is known, so a token is sampled."""


@dataclass(slots=True)
class Plan:
    decodes: list[Request] = field(default_factory=list)
    growing: list[Request] = field(default_factory=list)
    """Those of `decodes` that need one more block."""
    instants: list[Chunk] = field(default_factory=list)
    """Prompts with at most one token to compute: they run like decodes and are never held."""
    chunks: list[Chunk] = field(default_factory=list)
    """Prefill. Empty when it is held."""
    preempted: list[Request] = field(default_factory=list)
    for_priority: list[Request] = field(default_factory=list)
    """Those of `preempted` that leave for a request of higher priority."""
    work: StepWork = field(default_factory=StepWork)
    predicted_ms: float = 0.0

    blocked: list[tuple[Request, int, bytes | None]] = field(default_factory=list)
    """Requests that were looked at and do not fit: blocks needed, hash of the next block they would compute."""
    deferred: list[Request] = field(default_factory=list)
    """Ready requests whose next block somebody computes now: they are placed anew."""

    pending_tokens: int = 0
    """Prompt tokens of the tentative plan, whether they run now or are held."""
    pending_requests: int = 0
    full: bool = False
    """The step can take no more prompt tokens: budget or predicted time is used up."""
    verdict: Fire | Hold | None = None
    """None: there is nothing to fire or hold."""

    @property
    def prefill_tokens(self) -> int:
        return sum(chunk.length for chunk in self.chunks)

    @property
    def admitted(self) -> int:
        """Requests that enter with this plan."""
        return sum(chunk.reuse is not None for chunk in self.executed)

    @property
    def executed(self) -> list[Chunk]:
        return self.instants + self.chunks

    @property
    def held(self) -> bool:
        return isinstance(self.verdict, Hold)

    def drop_prefill(self) -> None:
        """Leaves what runs while prefill is held."""
        self.chunks = []
        self.work.prefill_tokens, self.work.pairs = 0, 0.0

    def drop_decodes(self) -> None:
        """Leaves what runs in a step of prefill alone."""
        self.decodes, self.growing = [], []
        self.work.decodes = len(self.instants)
        self.work.kv_tokens = sum(chunk.start for chunk in self.instants)

    def __bool__(self) -> bool:
        """Whether there is a step to run. Preemptions alone are none: results in flight free memory first."""
        return bool(self.decodes or self.instants or self.chunks)
