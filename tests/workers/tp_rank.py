"""One rank of a tensor-parallel group, as a process of its own; light, since every rank imports it."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

import msgspec
import torch

from atom_async.wire.messages import NewSequence, StepPlan, StepResult, WorkerInit, pack_ints
from atom_async.wire.sampling import SamplingParams
from workers.parallel import ParallelGroup, join_group
from workers.runner import ModelRunner

BLOCKS = 20
"""Blocks of each sequence, given to it from the start."""
DECODES = 8
FIRST = {0: 23, 1: 9}
"""Prompt tokens of slots 0 and 1 that the first step computes; what remains comes in the second."""


def sampling(slot: int) -> SamplingParams:
    """Greedy, but for slot 2: that one draws at random and has penalties."""
    if slot == 2:
        return SamplingParams(max_tokens=99, seed=5, logprobs=3, repetition_penalty=1.2, top_p=0.9)
    return SamplingParams(max_tokens=99, temperature=0.0, logprobs=8, prompt_logprobs=2)


def script(prompts: Sequence[list[int]]) -> list[StepPlan]:
    """Two prompts in two chunks each, the third one joining the second step, then decodes of all."""
    rest = [(slot, FIRST[slot], prompts[slot][FIRST[slot] :]) for slot in FIRST]
    plans = [
        step(new=prompts[:2], chunks=[(slot, 0, prompts[slot][:count]) for slot, count in FIRST.items()]),
        step(new=[None, None, prompts[2]], chunks=[*rest, (2, 0, prompts[2])]),
    ]
    return plans + [step(decodes=[2, 0, 1]) for _ in range(DECODES)]


def step(
    *,
    new: Sequence[list[int] | None] = (),
    chunks: Sequence[tuple[int, int, list[int]]] = (),
    decodes: Sequence[int] = (),
) -> StepPlan:
    entering = [
        NewSequence(
            slot=slot,
            prompt_len=len(prompt),
            total_len=len(prompt),
            present_tokens=0,
            blocks=pack_ints(range(slot * BLOCKS, (slot + 1) * BLOCKS)),
            history=b"",
            sampling=sampling(slot),
        )
        for slot, prompt in enumerate(new)
        if prompt is not None
    ]
    return StepPlan(
        step_id=1,
        new=entering,
        decode_slots=pack_ints(decodes),
        chunk_slots=pack_ints(slot for slot, _, _ in chunks),
        chunk_starts=pack_ints(start for _, start, _ in chunks),
        chunk_lengths=pack_ints(len(ids) for _, _, ids in chunks),
        chunk_tokens=pack_ints(token for _, _, ids in chunks for token in ids),
    )


def run_script(init: WorkerInit, group: ParallelGroup, plans: Sequence[StepPlan]) -> list[StepResult]:
    runner = ModelRunner(init, group)
    runner.load(lambda stage, done, total: None)
    runner.allocate(4 * BLOCKS)
    runner.warmup()
    return [runner.execute(plan) for plan in plans]


def run_rank(
    rank: int, inits: list[WorkerInit], plans: list[StepPlan], listener: socket.socket | None, answer: Connection
) -> None:
    """Every model in turn, in one group. Sends the results of each as msgpack."""
    torch.set_num_threads(1)
    inits = [msgspec.structs.replace(init, rank=rank) for init in inits]
    group = join_group(inits[0], listener.detach() if listener is not None else -1)
    results: list[list[Any]] = [run_script(init, group, plans) for init in inits]
    answer.send_bytes(msgspec.msgpack.encode(results))
