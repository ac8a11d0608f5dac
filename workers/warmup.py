"""A plan made up by the worker itself, to run the model once before anybody asks."""

from __future__ import annotations

from atom_async.wire.messages import NewSequence, StepPlan, pack_ints
from atom_async.wire.sampling import SamplingParams


def prompt_plan(tokens: int, block_size: int) -> StepPlan:
    """One prompt of `tokens` zeros in slot 0 and the first blocks."""
    blocks = range(-(-tokens // block_size))
    new = NewSequence(
        slot=0,
        prompt_len=tokens,
        total_len=tokens,
        present_tokens=0,
        blocks=pack_ints(blocks),
        history=b"",
        sampling=SamplingParams(max_tokens=1),
    )
    return StepPlan(
        step_id=0,
        finished=b"",
        new=[new],
        grown_slots=b"",
        grown_blocks=b"",
        decode_slots=b"",
        chunk_slots=pack_ints([0]),
        chunk_starts=pack_ints([0]),
        chunk_lengths=pack_ints([tokens]),
        chunk_tokens=pack_ints([0] * tokens),
    )
