"""Logits against transformers, float32, for every architecture and every way a step can be put together."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from tiny import ARCHITECTURES, TinyModel, worker_init

from atom_async.wire.messages import NewSequence, StepPlan, pack_ints
from atom_async.wire.sampling import SamplingParams
from workers.parallel import SingleRank
from workers.runner import ModelRunner

TOLERANCE = 1e-4
BLOCK_SIZE = 4
GREEDY = SamplingParams(max_tokens=100, temperature=0.0)


@pytest.fixture(scope="module", params=list(ARCHITECTURES))
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return TinyModel(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def loaded(tiny: TinyModel) -> ModelRunner:
    runner = ModelRunner(worker_init(tiny.spec, tiny.weights), SingleRank())
    runner.load(lambda stage, done, total: None)
    runner.allocate(200)
    return runner


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
            finished=b"",
            new=new,
            grown_slots=b"",
            grown_blocks=b"",
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


def test_a_whole_prompt_and_its_decodes(tiny: TinyModel, loaded: ModelRunner) -> None:
    driver, ids = Driver(loaded, tiny), tokens(random.Random(1), 40)
    sequence = Sequence(0, ids, 30, blocks(0))
    driver.step([], [(sequence, 30)])
    for _ in range(10):
        driver.step([sequence], [])


@pytest.mark.parametrize("seed", range(3))
def test_a_prompt_in_chunks(tiny: TinyModel, loaded: ModelRunner, seed: int) -> None:
    rng = random.Random(seed)
    driver, ids = Driver(loaded, tiny), tokens(rng, 60)
    sequence = Sequence(1, ids, 60, blocks(1))
    while sequence.position < 60:
        driver.step([], [(sequence, rng.randint(1, min(17, 60 - sequence.position)))])


def test_a_cached_prefix(tiny: TinyModel, loaded: ModelRunner) -> None:
    rng = random.Random(2)
    driver, shared = Driver(loaded, tiny), tokens(rng, 16)
    first = Sequence(0, shared + tokens(rng, 5), 21, blocks(0))
    driver.step([], [(first, 21)])
    second = Sequence(1, shared + tokens(rng, 9), 25, blocks(0)[:4] + blocks(1), present=16)
    driver.step([], [(second, 9)])


def test_a_prefix_computed_in_the_very_step(tiny: TinyModel, loaded: ModelRunner) -> None:
    rng = random.Random(3)
    driver, shared = Driver(loaded, tiny), tokens(rng, 16)
    first = Sequence(0, shared + tokens(rng, 5), 21, blocks(0))
    others = [
        Sequence(n, shared + tokens(rng, 2 + n), 18 + n, blocks(0)[:4] + blocks(n), present=16) for n in (1, 2, 3)
    ]
    driver.step([], [(first, 21), *((s, len(s.ids) - 16) for s in others)])


def test_a_prompt_that_is_all_there_computes_its_last_token_and_writes_nothing(
    tiny: TinyModel, loaded: ModelRunner
) -> None:
    driver, ids = Driver(loaded, tiny), tokens(random.Random(4), 16)
    driver.step([], [(Sequence(0, ids, 16, blocks(0)), 16)])
    before = [t.clone() for t in (*loaded._pool.keys_BKHD, *loaded._pool.values_BKHD)]
    again = Sequence(1, ids, 16, blocks(0)[:4], present=16)
    driver.step([], [(again, 1)])
    after = (*loaded._pool.keys_BKHD, *loaded._pool.values_BKHD)
    assert all(torch.equal(old, new) for old, new in zip(before, after, strict=True))


@pytest.mark.parametrize("seed", range(4))
def test_random_mixed_batches(tiny: TinyModel, loaded: ModelRunner, seed: int) -> None:
    """Sequences of all lengths, some sharing a prefix, decodes and chunks together."""
    rng = random.Random(seed)
    driver, shared = Driver(loaded, tiny), tokens(rng, 12)
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


def test_weights_that_are_not_this_models_are_refused(tmp_path: Path) -> None:
    small = TinyModel("llama", tmp_path / "a")
    other = TinyModel("qwen2", tmp_path / "b")

    def load(spec, weights) -> None:
        ModelRunner(worker_init(spec, weights), SingleRank()).load(lambda stage, done, total: None)

    with pytest.raises(ValueError, match=r"tensor model\.layers\.0\.self_attn\.q_proj\.bias is not in model\.safe"):
        load(other.spec, small.weights)
    with pytest.raises(ValueError, match="hold tensors that this model does not have"):
        load(small.spec, other.weights)
    wide = TinyModel("llama", tmp_path / "c", intermediate_size=128)
    with pytest.raises(ValueError, match=r"shape \[64, 128\], the model's configuration says \[64, 96\]"):
        load(small.spec, wide.weights)
