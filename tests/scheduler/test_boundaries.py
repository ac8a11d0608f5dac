"""The reusable-boundary interface with a model of sparse state checkpoints, which may be declined or lost."""

from __future__ import annotations

import random

import pytest
from boundaries import Checkpoints
from world import World

from atom_async.events.schema import RequestParked, RequestReleased, StepSubmitted
from atom_async.scheduler.request import State


def make(**settings: int) -> tuple[World, Checkpoints]:
    boundaries = Checkpoints(every=16, block_size=4)
    world = World(**{"blocks": 256, "budget": 24, "boundaries": boundaries} | settings)
    boundaries.pool = world.scheduler.pool
    return world, boundaries


def test_a_consumer_waits_for_the_last_checkpoint_it_shares() -> None:
    world, _ = make()
    world.add("producer", list(range(100)))
    world.submit()
    consumer = world.add("consumer", [*range(71), 900])
    (parked,) = world.named(RequestParked)
    assert (parked.boundary_tokens, parked.saved_tokens) == (64, 64)
    world.run()
    assert consumer.cached_tokens == 64
    assert world.computed == 100 + 72 - 64


def test_it_is_released_when_the_checkpoint_is_written_and_not_before() -> None:
    world, _ = make(budget=16)
    world.add("producer", list(range(40)))
    world.submit()
    consumer = world.add("consumer", [*range(32), 900, 901])
    assert consumer.state is State.PARKED
    world.submit()
    world.complete()
    assert consumer.state is State.PARKED, "submitted is not written"
    world.complete()
    assert consumer.state is State.READY
    world.run()
    assert consumer.cached_tokens == 32


def test_chunks_end_at_checkpoints() -> None:
    world, _ = make()
    world.add("a", list(range(50)))
    world.run()
    ends = [start + length for e in world.named(StepSubmitted) for _, start, length in e.chunks]
    assert ends == [16, 32, 48, 50]


def test_a_declined_checkpoint_is_counted_and_nobody_waits_for_it() -> None:
    world, boundaries = make()
    boundaries.declines.add("producer")
    world.add("producer", list(range(60)))
    world.submit()
    consumer = world.add("consumer", [*range(48), 900])
    assert consumer.state is State.READY
    assert dict(world.scheduler.counters.declined_waits) == {"checkpoint_declined": 1}
    world.run()


@pytest.mark.parametrize("outcome", ["checkpoint_declined", "evicted"])
def test_a_promise_withdrawn_later_lets_the_waiters_go_with_its_reason(outcome: str) -> None:
    world, boundaries = make()
    producer = world.add("producer", list(range(100)))
    world.submit()
    waiters = [world.add(f"w{n}", [*range(64), 900 + n]) for n in range(3)]
    boundaries.declines.add("producer")
    world.withdraw(producer, outcome)
    assert [e.outcome for e in world.named(RequestReleased)] == [outcome] * 3
    assert waiters[0].state is State.READY
    world.run()
    assert all(world.outcomes[f"w{n}"][-1].finish for n in range(3))


def test_a_lost_checkpoint_is_not_reused() -> None:
    world, boundaries = make()
    first = world.add("first", list(range(40)))
    world.run()
    boundaries.lost.add(first.chain[7])  # of token 32
    again = world.add("again", list(range(40)))
    world.run()
    assert again.cached_tokens == 16


@pytest.mark.parametrize("seed", range(60))
def test_random_lives_with_sparse_boundaries(seed: int) -> None:
    rng = random.Random(seed)
    world, boundaries = make(blocks=rng.randint(40, 120), budget=rng.randint(8, 40), max_num_seqs=rng.randint(2, 8))
    prefixes = [[1000 * n + i for i in range(90)] for n in range(2)]
    for number in range(40):
        name = f"r{number}"
        prompt = [*rng.choice(prefixes)[: rng.randint(1, 90)], 9000 + number]
        world.add(name, prompt[: world.max_model_len - 1], rng.randint(1, 6), priority=rng.choice([0, 0, 1]))
        if rng.random() < 0.2:
            boundaries.declines.add(name)
        if rng.random() < 0.15:
            world.abort(rng.choice(sorted(world.scheduler.requests)))
        if rng.random() < 0.1 and world.scheduler.running:
            world.withdraw(rng.choice(world.scheduler.running), "checkpoint_declined")
        while rng.random() < 0.6:
            if len(world.results) == 2:
                world.complete()
            else:
                world.submit()
    world.run()
    assert world.scheduler.pool.owned == 0
