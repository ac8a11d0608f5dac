"""The policy interface: our own step bound, and the one that the documentation shows how to write."""

from __future__ import annotations

import re
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import pytest
from world import World

from atom_async.config import EngineConfig
from atom_async.events.schema import PrefillFired, StepSubmitted
from atom_async.scheduler.cost_model import CostModel, StepWork
from atom_async.scheduler.policy import DefaultPolicy, Hold, Pending, Prefill, StepBound
from atom_async.scheduler.request import State
from atom_async.scheduler.setup import describe

ROOT = Path(__file__).parents[2]


@pytest.fixture
def documented() -> Iterator[str]:
    """The example of docs/policies.md as an importable module."""
    (source,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "policies.md").read_text(), flags=re.S)
    module = types.ModuleType("documented_policy")
    exec(source, module.__dict__)
    sys.modules[module.__name__] = module
    yield "documented_policy:Bus"
    del sys.modules[module.__name__]


def test_the_documented_policy_decides(documented: str) -> None:
    world = World(blocks=256, budget=64, step_s=0.02, policy=documented)
    assert "documented_policy:Bus" in describe(world.config)
    world.add("decoding", [1, 2], max_tokens=100)
    world.submit()
    world.complete()
    for number in range(3):
        world.add(f"p{number}", [number] * 9, max_tokens=1)
        world.submit()
        world.complete()
    assert all(world.scheduler.requests[f"p{number}"].state is State.READY for number in range(3))
    world.run()
    assert [e.reason for e in world.named(PrefillFired)][:2] == ["no_decode", "max_hold"]
    assert world.named(PrefillFired)[1].held_ms == pytest.approx(60)
    assert world.named(PrefillFired)[1].admitted_tokens == 27


class Never(DefaultPolicy):
    """Holds for ever."""

    def gate(self, pending: Pending) -> Hold:
        return Hold(None, "none")


def test_a_policy_that_never_fires_loses_nothing_and_does_not_spin() -> None:
    world = World(blocks=64, policy=f"{__name__}:Never")
    for number in range(4):
        world.add(f"r{number}", [*range(20), number])
    for _ in range(3):
        assert world.submit() is None
    assert world.scheduler.num_queued == 4
    world.scheduler.policy = DefaultPolicy(world.config, world.scheduler.costs)
    world.scheduler._planner._policy = world.scheduler.policy
    world.run()
    assert all(world.outcomes[f"r{number}"][-1].finish for number in range(4))


def policy(**settings: object) -> tuple[DefaultPolicy, CostModel]:
    costs = CostModel()
    return DefaultPolicy(EngineConfig(**settings), costs), costs


def test_least_work_goes_first_and_nothing_is_overtaken_for_ever() -> None:
    decides, costs = policy(overtake_factor=2.0)
    long = decides.order(Prefill(arrived_at=10.0, uncached=100_000, start=0))
    own_s = costs.chunk_ms(0, 100_000) / 1e3
    assert decides.order(Prefill(10.0 + 1.9 * own_s, 10, 0)) < long
    assert decides.order(Prefill(10.0 + 2.1 * own_s, 10, 0)) > long
    assert decides.order(Prefill(10.0, 500, 0)) < decides.order(Prefill(10.0, 600, 0))


def test_first_come_first_served_on_request() -> None:
    decides, _ = policy(queue_policy="fcfs")
    assert decides.order(Prefill(1.0, 10, 0)) == decides.order(Prefill(2.0, 5, 0))


def fitted(costs: CostModel, *, decode_ms: float, fixed_ms: float, per_ktoken_ms: float) -> None:
    costs.decode.coefficients = (decode_ms, 0.0, 0.0)
    costs.prefill.coefficients = (fixed_ms, per_ktoken_ms, 0.0)


def test_the_automatic_bound_follows_from_the_costs() -> None:
    """Small chunks where they are free; large ones where each step pays much before its first token."""
    decides, costs = policy()
    work = StepWork(decodes=16, kv_tokens=100_000)
    fitted(costs, decode_ms=30, fixed_ms=30, per_ktoken_ms=40)
    cheap = decides.bound(work, 1000)
    fitted(costs, decode_ms=30, fixed_ms=190, per_ktoken_ms=40)
    dear = decides.bound(work, 1000)
    assert cheap is not None
    assert dear is not None
    assert cheap.unfinished_ms == pytest.approx(90)
    assert dear.unfinished_ms - 190 >= 8 * 160
    assert cheap.finishing_ms > cheap.unfinished_ms


def test_the_automatic_bound_grows_with_what_waits() -> None:
    decides, costs = policy()
    fitted(costs, decode_ms=30, fixed_ms=30, per_ktoken_ms=40)
    bounds = [decides.bound(StepWork(16, 100_000), tokens) for tokens in (0, 40_000, 10_000_000)]
    times = [bound.unfinished_ms for bound in bounds if bound is not None]
    assert times[0] < times[1] < times[2] == pytest.approx(30 / 0.125)


def test_a_target_bounds_every_step_with_decodes_and_nothing_starves() -> None:
    decides, _ = policy(itl_target_ms="25")
    assert decides.bound(StepWork(4, 100), 0) == StepBound(25, 25, 64)
    assert decides.bound(StepWork(0, 0), 0) is None
    world = World(blocks=256, block_size=4, budget=256, itl_target_ms="0.001")
    world.add("decoding", [1, 2], max_tokens=200)
    world.submit()
    world.add("long", list(range(600)), max_tokens=1)
    world.run()
    chunks = [e.prefill_tokens for e in world.named(StepSubmitted) if e.decode_requests and e.prefill_tokens]
    assert set(chunks) == {8}


def test_the_decode_gap_caps_every_bound() -> None:
    decides, _ = policy(itl_target_ms="off", max_decode_gap_ms=70.0)
    assert decides.bound(StepWork(4, 100), 0) == StepBound(70, 70, 64)
    decides, _ = policy(itl_target_ms="500", max_decode_gap_ms=70.0)
    assert decides.bound(StepWork(4, 100), 0) == StepBound(70, 70, 64)
