"""Long random lives by seed. A failure prints the seed: `pytest -k "seeded and 17"` runs it again."""

import random

import pytest
from world import World

from atom_async.wire.sampling import SamplingParams


def live(seed: int) -> World:
    rng = random.Random(seed)
    world = World(
        blocks=rng.randint(6, 40),
        block_size=rng.choice([1, 2, 4, 8]),
        budget=rng.randint(8, 40),
        max_num_seqs=rng.randint(1, 8),
        prefix_caching=rng.random() < 0.85,
    )
    prefixes = [[1000 * n + i for i in range(60)] for n in range(3)]
    depth = rng.choice([1, 2, 2])
    arrivals = rng.randint(5, 40)
    longest = world.max_model_len - 1
    number = 0
    while number < arrivals or world.scheduler.requests:
        if number < arrivals and rng.random() < 0.3:
            number += 1
            shared = rng.choice(prefixes)[: rng.randint(0, longest)]
            own = [rng.randrange(50_000, 60_000) for _ in range(rng.randint(0, 12))]
            prompt = (shared + own)[:longest] or [7]
            sampling = SamplingParams(max_tokens=rng.randint(0, 20), temperature=0.0, repetition_penalty=1.0)
            world.add(f"r{number}", prompt, priority=rng.choice([0, 0, 1]), sampling=sampling)
        elif world.scheduler.requests and rng.random() < 0.03:
            world.abort(rng.choice(sorted(world.scheduler.requests)))
        elif len(world.results) < depth and rng.random() < 0.7:
            world.submit()
        elif world.results:
            world.complete()
    world.run()
    return world


@pytest.mark.parametrize("seed", range(150))
def test_seeded(seed: int) -> None:
    world = live(seed)
    assert world.scheduler.pool.owned == 0
    assert not world.scheduler.requests


def test_the_seeds_reach_what_matters() -> None:
    """Preemption, sharing inside a step and eviction all happen, or the runs above prove little."""
    worlds = [live(seed) for seed in range(40)]
    assert sum(world.scheduler.counters.preemptions for world in worlds) > 20
    assert sum(world.scheduler.pool.evicted_blocks for world in worlds) > 100
    assert sum(world.scheduler.counters.prefix_hits for world in worlds) > 100
