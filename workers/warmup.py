"""Plans made up by the worker itself, to run the model before anybody asks."""

from __future__ import annotations

from collections.abc import Sequence

from atom_async.wire.messages import NewSequence, StepPlan, pack_ints
from atom_async.wire.sampling import SamplingParams


def largest_lengths(tokens: int, *, max_model_len: int, max_num_seqs: int) -> list[int]:
    """As few prompts as carry `tokens` tokens in one step, or as many as may run."""
    whole, rest = divmod(tokens, max_model_len)
    return ([max_model_len] * whole + [rest] * (rest > 0))[:max_num_seqs]


def prompts_plan(lengths: Sequence[int], block_size: int) -> StepPlan:
    """Prompts of zeros, from slot and block 0 on; each has room for one more token where its blocks do."""
    new, first_block = [], 0
    for slot, length in enumerate(lengths):
        blocks = range(first_block, first_block - (-length // block_size))
        first_block = blocks.stop
        params = SamplingParams(max_tokens=1)
        new.append(NewSequence(slot, length, length, 0, pack_ints(blocks), b"", params))
    return StepPlan(
        step_id=0,
        new=new,
        chunk_slots=pack_ints(range(len(lengths))),
        chunk_starts=pack_ints([0] * len(lengths)),
        chunk_lengths=pack_ints(lengths),
        chunk_tokens=pack_ints([0] * sum(lengths)),
    )


def decode_plan() -> StepPlan:
    """The next token of slot 0."""
    return StepPlan(step_id=0, decode_slots=pack_ints([0]))
