"""Logits against transformers, float32, for every architecture and every way a step can be put together."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from driver import Driver, Sequence, blocks, run_mixed, tokens
from tiny import ARCHITECTURES, TinyModel, worker_init

from workers.parallel import SingleRank
from workers.runner import ModelRunner


@pytest.fixture(scope="module", params=list(ARCHITECTURES))
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return TinyModel(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def loaded(tiny: TinyModel) -> ModelRunner:
    runner = ModelRunner(worker_init(tiny.spec, tiny.weights), SingleRank())
    runner.load(lambda stage, done, total: None)
    runner.allocate(200)
    return runner


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
    run_mixed(Driver(loaded, tiny), random.Random(seed))


@pytest.mark.parametrize("most_tokens", [1, 70])
def test_decodes_split_into_small_gathers(
    tiny: TinyModel, loaded: ModelRunner, most_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loaded._attention, "_most_tokens", most_tokens)
    run_mixed(Driver(loaded, tiny), random.Random(11))


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
