"""Collects what the workers are told of a step while its plan is executed."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from atom_async.wire.messages import NewSequence, StepPlan, pack_ints

from .plan import Chunk
from .request import Request


def _ints() -> array[int]:
    return array("i")


@dataclass(slots=True)
class PlanBuilder:
    new: list[NewSequence] = field(default_factory=list)
    grown_slots: array[int] = field(default_factory=_ints)
    grown_blocks: array[int] = field(default_factory=_ints)
    decode_slots: array[int] = field(default_factory=_ints)
    chunk_slots: array[int] = field(default_factory=_ints)
    chunk_starts: array[int] = field(default_factory=_ints)
    chunk_lengths: array[int] = field(default_factory=_ints)
    chunk_tokens: array[int] = field(default_factory=_ints)
    sample_slots: array[int] = field(default_factory=_ints)

    def grow(self, slot: int, blocks: list[int]) -> None:
        self.grown_slots.extend([slot] * len(blocks))
        self.grown_blocks.extend(blocks)

    def decode(self, requests: list[Request]) -> None:
        self.decode_slots.extend([request.slot for request in requests])
        self.sample_slots.extend(self.decode_slots)

    def enter(self, request: Request, start: int) -> None:
        """A request that has just got its slot and the blocks it reuses."""
        history = request.tokens[:start].tobytes() if request.sampling.needs_history else b""
        self.new.append(
            NewSequence(
                slot=request.slot,
                prompt_len=request.prompt_len,
                total_len=len(request.tokens),
                present_tokens=request.present,
                blocks=pack_ints(request.blocks),
                history=history,
                sampling=request.sampling,
            )
        )

    def chunk(self, chunk: Chunk) -> None:
        request = chunk.request
        self.chunk_slots.append(request.slot)
        self.chunk_starts.append(chunk.start)
        self.chunk_lengths.append(chunk.length)
        self.chunk_tokens.extend(request.tokens[chunk.start : chunk.start + chunk.length])
        if chunk.samples:
            self.sample_slots.append(request.slot)

    def build(self, step_id: int, finished: list[int]) -> StepPlan:
        return StepPlan(
            step_id=step_id,
            finished=pack_ints(finished),
            new=self.new,
            grown_slots=self.grown_slots.tobytes(),
            grown_blocks=self.grown_blocks.tobytes(),
            decode_slots=self.decode_slots.tobytes(),
            chunk_slots=self.chunk_slots.tobytes(),
            chunk_starts=self.chunk_starts.tobytes(),
            chunk_lengths=self.chunk_lengths.tobytes(),
            chunk_tokens=self.chunk_tokens.tobytes(),
        )
