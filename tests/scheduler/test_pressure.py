"""Priorities, shared prefixes and memory that is too small, all at once and under random settings.

A failure prints the seed: `pytest -k "pressure and 17"` runs its block again.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
from world import World

from atom_async.events.schema import RequestPreempted
from atom_async.scheduler.request import State


def settings_of(rng: random.Random) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "step_policy": rng.choice(["mixed", "mixed", "separate"]),
        "queue_policy": rng.choice(["least-work", "fcfs"]),
        "itl_target_ms": rng.choice(["off", "auto"]),
        "prefill_decode_interval": rng.choice([0, 0, 1, 3]),
        "coalesce_target_fill": rng.choice([0.0, 0.0, 0.7]),
        "max_chunk_tokens": rng.choice([0, 0, 3, 8]),
        "prefix_wait_ms": rng.choice([None, 0.0, 2000.0]),
        "max_bypass_ms": rng.choice([0.0, 1000.0, 5000.0]),
    }
    if rng.random() < 0.3:
        settings["max_decode_gap_ms"] = rng.choice([500.0, 3000.0])
    return settings


def live(seed: int) -> World:
    rng = random.Random(seed)
    world = World(
        blocks=rng.choice([12, 20, 30]),
        max_num_seqs=rng.choice([2, 4, 6, 8]),
        budget=rng.choice([8, 16, 64, 400]),
        step_s=rng.choice([0.01, 1.0]),
        **settings_of(rng),
    )
    priorities = rng.choice([2, 3, 6])
    prefixes = [list(range(first, first + 70)) for first in (1, 100, 200)]
    for number in range(40):
        for _ in range(rng.choice([1, 1, 3])):
            shared = rng.choice(prefixes)[: rng.randrange(0, 66)]
            own = [rng.randrange(300, 900) for _ in range(rng.randrange(1, 60 if rng.random() < 0.2 else 9))]
            prompt = (shared + own)[: world.max_model_len - 4]
            name = f"r{number}-{len(world.prompts)}"
            deadline = rng.choice([None, None, 5.0])
            world.add(name, prompt, rng.randrange(1, 40), priority=rng.randrange(priorities), deadline_s=deadline)
        if rng.random() < 0.1 and world.scheduler.requests:
            world.abort(rng.choice(sorted(world.scheduler.requests)))
        for _ in range(rng.randrange(0, 6)):
            if rng.random() < 0.5 and len(world.results) < 2:
                world.submit()
            elif world.results:
                world.complete()
    world.run()
    return world


@pytest.mark.parametrize("block", range(20))
def test_pressure(block: int) -> None:
    for seed in range(block * 6, block * 6 + 6):
        try:
            world = live(seed)
        except BaseException as error:
            raise AssertionError(f"live({seed}): {error!r}") from error
        assert world.scheduler.pool.owned == 0
        assert not world.scheduler.requests


def test_the_pressure_is_real() -> None:
    preempted = [event.reason for seed in range(30) for event in live(seed).named(RequestPreempted)]
    assert preempted.count("priority") > 30
    assert preempted.count("memory") > 5


def test_blocks_that_an_admission_of_the_plan_reuses_are_not_freed_by_its_preemptions() -> None:
    """`a` reuses the prefix of `v`; `b`, in the same plan, preempts `v`."""
    world = World(blocks=30, max_num_seqs=8, budget=400)
    shared = list(range(1, 65))
    world.add("v", [*shared, 900, 901], 40, priority=5)
    world.submit()
    world.complete()
    world.add("a", [*shared, 800, 801, 802], 2)
    b = world.add("b", list(range(500, 556)), 2)
    world.submit()
    assert b.state is not State.RUNNING
    world.run()
    assert all(world.outcomes[name][-1].finish for name in "vab")
