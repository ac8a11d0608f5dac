"""The fitted cost model: finds the machine behind the measurements, whatever sizes it happens to see."""

from __future__ import annotations

import random

import pytest

from atom_async.scheduler.cost_model import CostModel, StepWork, chunk_pairs

MACHINES = {
    "small fixed cost": (7.1, 0.0233, 6.7, 7.55, 28.97, 533.0),
    "large fixed cost": (15.0, 0.269, 0.624, 161.0, 59.8, 90.6),
    "a CPU": (25.0, 3.5, 400.0, 30.0, 5000.0, 90_000.0),
}


def measured(machine: tuple[float, ...], work: StepWork) -> float:
    d0, d1, d2, p0, p1, p2 = machine
    decode = d1 * work.decodes + d2 * work.kv_tokens / 1e6
    if not work.prefill_tokens:
        return d0 + decode
    return p0 + p1 * work.prefill_tokens / 1e3 + p2 * work.pairs / 1e9 + decode


def work_of(rng: random.Random, *, prefill: bool) -> StepWork:
    decodes = rng.randint(1, 64)
    work = StepWork(decodes, decodes * rng.randint(1000, 120_000))
    if prefill:
        for _ in range(rng.randint(1, 4)):
            work.add_chunk(rng.randint(0, 100_000), rng.randint(16, 4096))
    return work


def trained(machine: tuple[float, ...], rng: random.Random, *, noise: float, steps: int = 400) -> CostModel:
    model = CostModel()
    for _ in range(steps):
        work = work_of(rng, prefill=rng.random() < 0.3)
        ms = measured(machine, work) * (1 + rng.gauss(0, noise))
        if rng.random() < 0.03:
            ms *= 10  # something else had the machine
        model.observe(work, ms, model.step_ms(work))
    return model


@pytest.mark.parametrize("name", MACHINES)
@pytest.mark.parametrize("noise", [0.0, 0.05])
def test_predicts_each_machine(name: str, noise: float) -> None:
    rng = random.Random(name)
    model = trained(MACHINES[name], rng, noise=noise)
    for _ in range(200):
        work = work_of(rng, prefill=rng.random() < 0.5)
        assert model.step_ms(work) == pytest.approx(measured(MACHINES[name], work), rel=0.25)


def test_equal_steps_all_day_do_not_wash_out_the_difference_between_sizes() -> None:
    """Thousands of equal chunks alone cannot tell the fixed cost from the marginal one; a few others can."""
    machine = MACHINES["large fixed cost"]
    model = CostModel()
    for tokens in [8192] * 50 + [256] * 3 + [8192] * 2000:
        work = StepWork()
        work.add_chunk(0, tokens)
        model.observe(work, measured(machine, work), model.step_ms(work))
    assert model.base_ms(0, 0) == pytest.approx(161, rel=0.15)


def test_follows_a_machine_that_changes() -> None:
    model = CostModel()
    for factor in (1.0, 3.0):
        for n in range(400):
            work = StepWork(8 + n % 24, 100_000 + 1000 * (n % 200))
            model.observe(work, factor * measured(MACHINES["large fixed cost"], work), model.step_ms(work))
    work = StepWork(16, 150_000)
    assert model.step_ms(work) == pytest.approx(3 * measured(MACHINES["large fixed cost"], work), rel=0.2)


def test_says_how_wrong_it_is() -> None:
    rng = random.Random(1)
    good = trained(MACHINES["small fixed cost"], rng, noise=0.0)
    assert 0 < good.error < 0.5
    fresh = CostModel()
    work = StepWork(4, 1000)
    fresh.observe(work, 100.0, 10.0)
    assert fresh.error == pytest.approx(0.9)


def test_nothing_sensible_can_be_learnt_from_no_time() -> None:
    model = CostModel()
    model.observe(StepWork(1, 1), 0.0, 1.0)
    assert model.decode.observations == 0


@pytest.mark.parametrize("seed", range(40))
def test_never_predicts_negative_times_and_more_work_never_takes_less(seed: int) -> None:
    rng = random.Random(seed)
    model = CostModel()
    for _ in range(60):
        work = work_of(rng, prefill=rng.random() < 0.5)
        model.observe(work, rng.uniform(0.1, 500), model.step_ms(work))
        small = work_of(rng, prefill=True)
        large = StepWork(small.decodes + 1, small.kv_tokens + 1000, small.prefill_tokens + 100, small.pairs + 1e6)
        assert 0 <= model.step_ms(small) <= model.step_ms(large) + 1e-9


@pytest.mark.parametrize("start", [0, 5000, 120_000])
def test_tokens_within_is_the_inverse_of_the_prediction(start: int) -> None:
    model = trained(MACHINES["small fixed cost"], random.Random(2), noise=0.02)
    for ms in (1.0, 20.0, 300.0):
        tokens = model.tokens_within(ms, start)
        assert model.chunk_ms(start, tokens) <= ms + 1e-6
        assert model.chunk_ms(start, tokens + 1) > ms - 1e-6
    assert model.tokens_within(0, start) == model.tokens_within(-5, start) == 0
    assert chunk_pairs(start, 10) == 10 * start + 50
