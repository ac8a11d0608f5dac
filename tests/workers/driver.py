"""Hand-made plans, run step by step, every row of logits compared with transformers."""

from __future__ import annotations

import random

import torch
from tiny import TinyModel

from atom_async.wire.messages import NewSequence, StepPlan, pack_ints
from atom_async.wire.sampling import SamplingParams
from workers.runner import ModelRunner

TOLERANCE = 1e-4
GREEDY = SamplingParams(max_tokens=100, temperature=0.0)


class Sequence:
    """Tokens whose first `known` are a prompt and whose others are decoded with the outcome given."""

    def __init__(self, slot: int, ids: list[int], known: int, blocks: list[int], present: int = 0) -> None:
        self.slot = slot
        self.ids = ids
        self.known = known
        self.blocks = blocks
        self.present = present
        self.position = min(present, known - 1)
        self.entered = False


class Driver:
    """Runs hand-made plans and compares every row's logits with the reference at its position."""

    def __init__(self, runner: ModelRunner, tiny: TinyModel) -> None:
        self.runner = runner
        self.tiny = tiny
        self.runner._tables = runner._make_tables()
        self.worst = 0.0

    def step(self, decodes: list[Sequence], chunks: list[tuple[Sequence, int]]) -> None:
        """`chunks` are (sequence, tokens to compute)."""
        new = [self.enter(s) for s, _ in chunks if not s.entered]
        starts = [s.position for s, _ in chunks]
        plan = StepPlan(
            step_id=1,
            new=new,
            decode_slots=pack_ints(s.slot for s in decodes),
            chunk_slots=pack_ints(s.slot for s, _ in chunks),
            chunk_starts=pack_ints(starts),
            chunk_lengths=pack_ints(n for _, n in chunks),
            chunk_tokens=pack_ints(t for s, n in chunks for t in s.ids[s.position : s.position + n]),
        )
        with torch.inference_mode():
            batch = self.runner._tables.apply(plan)
            logits = self.runner._decoder.logits(self.runner._decoder.forward(batch, self.runner._attention))
        row = 0
        for sequence, count in [(s, 1) for s in decodes] + chunks:
            end = sequence.position + count
            expected = self.tiny.logits(sequence.ids[:end])[sequence.position :]
            self.worst = max(self.worst, float((logits[row : row + count] - expected).abs().max()))
            row += count
            sequence.position = end
            if end >= sequence.known and end < len(sequence.ids):
                self.feed(sequence)
        assert row == len(logits)
        assert self.worst <= TOLERANCE

    def enter(self, sequence: Sequence) -> NewSequence:
        sequence.entered = True
        return NewSequence(
            sequence.slot,
            sequence.known,
            sequence.known,
            sequence.present,
            pack_ints(sequence.blocks),
            b"",
            GREEDY,
        )

    def feed(self, sequence: Sequence) -> None:
        """The given token instead of a sampled one."""
        token = torch.tensor([sequence.ids[sequence.position]])
        self.runner._tables.remember(torch.tensor([sequence.slot]).int().numpy(), token)


def tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(131) for _ in range(count)]


def blocks(slot: int, count: int = 20) -> list[int]:
    return list(range(slot * count, (slot + 1) * count))


def run_mixed(driver: Driver, rng: random.Random) -> None:
    """Sequences of all lengths, some sharing a prefix, decodes and chunks together."""
    shared = tokens(rng, 12)
    sequences = []
    for slot in range(6):
        ids = (shared if slot % 2 else []) + tokens(rng, rng.randint(2, 50))
        sequences.append(Sequence(slot, ids, rng.randint(max(1, len(ids) - 12), len(ids)), blocks(slot)))
    while any(s.position < len(s.ids) for s in sequences):
        decodes, chunks = [], []
        for sequence in rng.sample(sequences, 6):
            if sequence.position >= len(sequence.ids) or rng.random() < 0.3:
                continue
            if sequence.position >= sequence.known:
                decodes.append(sequence)
            else:
                chunks.append((sequence, rng.randint(1, sequence.known - sequence.position)))
        if decodes or chunks:
            driver.step(decodes, chunks)
