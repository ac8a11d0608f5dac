"""A step plan before it is executed: the result of the one admission walk.

Building it changes nothing, so a plan can be thrown away. Signal, decision and execution all read it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

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
    chunks: list[Chunk] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)

    @property
    def prefill_tokens(self) -> int:
        return sum(chunk.length for chunk in self.chunks)

    @property
    def admitted(self) -> int:
        """Requests that enter with this plan."""
        return sum(chunk.reuse is not None for chunk in self.chunks)

    def __bool__(self) -> bool:
        """Whether there is a step to run. Preemptions alone are none: results in flight free memory first."""
        return bool(self.decodes or self.chunks)
