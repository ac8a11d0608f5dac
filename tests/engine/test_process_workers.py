"""Real worker processes (simulated model, no torch), killed, stuck, refused and idle."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import psutil
import pytest

from atom_async.config import EngineConfig
from atom_async.engine.process_workers import ProcessWorkers
from atom_async.engine.workers import WorkerFailure, WorkerStartError
from atom_async.wire.messages import NewSequence, StepPlan, StepResult, pack_ints, unpack_ints
from atom_async.wire.model import ModelSpec, WeightSource
from atom_async.wire.sampling import SamplingParams
from atom_async.wire.simulation import SimulationOptions, expected_tokens

pytestmark = pytest.mark.process

SPEC = ModelSpec(
    architecture="llama",
    hidden_size=8,
    intermediate_size=8,
    num_layers=1,
    num_heads=1,
    num_kv_heads=1,
    head_dim=8,
    vocab_size=32_000,
    max_positions=1024,
    rms_norm_eps=1e-5,
    rope_theta=1e4,
)
GREEDY = SamplingParams(max_tokens=100, temperature=0.0)


def make_workers(*, tp: int = 1, simulation: str = "{}", **settings: int | float) -> ProcessWorkers:
    config = EngineConfig(device="simulated", tp=tp, simulation=simulation, **settings)
    return ProcessWorkers(
        config, SPEC, WeightSource(kind="random"), device="simulated", dtype="float32", max_model_len=1024
    )


class Group:
    """A started group, with what it reported."""

    def __init__(self, workers: ProcessWorkers) -> None:
        self.workers = workers
        self.results: asyncio.Queue[StepResult] = asyncio.Queue()
        self.failures: asyncio.Queue[WorkerFailure] = asyncio.Queue()
        self.step = 0
        workers.on_result = self.results.put_nowait
        workers.on_failure = self.failures.put_nowait

    async def __aenter__(self) -> Group:
        self.fds = len(os.listdir("/proc/self/fd"))
        self.info = await self.workers.start(lambda progress: None)
        return self

    async def __aexit__(self, *error: object) -> None:
        pids = self.info.pids
        await self.workers.stop()
        assert not any(psutil.pid_exists(pid) for pid in pids), "a worker outlived its group"
        assert len(os.listdir("/proc/self/fd")) == self.fds, "descriptors leaked"

    def plan(self, prompt: list[int] | None = None) -> StepPlan:
        """A prompt in slot 0, or one more token of it."""
        self.step += 1
        new, chunk, grown, decode = [], b"", b"", b""
        if prompt is None:
            decode = pack_ints([0])
        else:
            new = [NewSequence(0, len(prompt), len(prompt), 0, pack_ints(range(8)), b"", GREEDY)]
            chunk = pack_ints(prompt)
        return StepPlan(
            step_id=self.step,
            new=new,
            grown_slots=grown,
            grown_blocks=grown,
            decode_slots=decode,
            chunk_slots=pack_ints([0] if prompt else []),
            chunk_starts=pack_ints([0] if prompt else []),
            chunk_lengths=pack_ints([len(prompt)] if prompt else []),
            chunk_tokens=chunk,
        )

    def submit(self, plan: StepPlan, deadline_s: float = 30.0) -> None:
        self.workers.submit(plan, deadline_s=deadline_s)


@pytest.mark.parametrize("tp", [1, 3])
async def test_steps_go_out_and_results_come_back_in_order(tp: int) -> None:
    async with Group(make_workers(tp=tp)) as group:
        assert len(set(group.info.pids)) == tp
        group.submit(group.plan([5, 6, 7]))
        group.submit(group.plan())
        group.submit(group.plan())
        results = [await group.results.get() for _ in range(3)]
        assert [r.step_id for r in results] == [1, 2, 3]
        tokens = [unpack_ints(r.tokens)[0] for r in results]
        assert tokens == expected_tokens([5, 6, 7], GREEDY, 3, SimulationOptions())


@pytest.mark.parametrize("stop_signal", [signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT])
async def test_a_worker_killed_while_idle_is_known_within_a_second(stop_signal: signal.Signals) -> None:
    async with Group(make_workers(tp=2)) as group:
        os.kill(group.info.pids[1], stop_signal)
        async with asyncio.timeout(1):
            failure = await group.failures.get()
        assert (failure.rank, failure.pid, failure.step_id) == (1, group.info.pids[1], -1)
        assert failure.message.endswith(f"was killed by {stop_signal.name} while idle")


async def test_a_worker_killed_in_mid_step_names_the_step_and_takes_the_others_along() -> None:
    async with Group(make_workers(tp=2, simulation='{"prefill_fixed_ms": 60000}')) as group:
        group.submit(group.plan([1]))
        os.kill(group.info.pids[0], signal.SIGKILL)
        async with asyncio.timeout(1):
            failure = await group.failures.get()
        assert failure.step_id == 1
        assert "was killed by SIGKILL during step 1" in failure.message
        assert group.results.empty()
    assert group.failures.empty()


async def test_a_stuck_worker_is_found_by_the_deadline_of_its_step() -> None:
    async with Group(make_workers(simulation='{"prefill_fixed_ms": 60000}')) as group:
        group.submit(group.plan([1]), deadline_s=0.2)
        failure = await group.failures.get()
        assert failure.message.endswith("did not finish step 1 within 0.2 s")


async def test_deadlines_count_from_the_step_before() -> None:
    """Three steps of 0.2 s queued at once, each with 0.35 s: none is late."""
    async with Group(make_workers(simulation='{"prefill_fixed_ms": 200, "decode_fixed_ms": 200}')) as group:
        group.submit(group.plan([1]), deadline_s=0.35)
        group.submit(group.plan(), deadline_s=0.35)
        group.submit(group.plan(), deadline_s=0.35)
        assert [(await group.results.get()).step_id for _ in range(3)] == [1, 2, 3]
        assert group.failures.empty()


async def test_a_step_that_raises_is_reported_in_the_workers_words() -> None:
    async with Group(make_workers()) as group:
        group.submit(group.plan())  # decodes a slot that holds nothing
        failure = await group.failures.get()
        assert failure.step_id == 1
        assert "PlanError: slot 0 holds no sequence" in failure.message


async def test_a_worker_that_cannot_start_says_why_and_leaves_nothing() -> None:
    before = len(os.listdir("/proc/self/fd"))
    workers = make_workers(tp=2, simulation='{"no_such_option": 1}')
    with pytest.raises(WorkerStartError, match="no_such_option"):
        await workers.start(lambda progress: None)
    assert len(os.listdir("/proc/self/fd")) == before
    assert not psutil.Process().children()


async def test_a_start_that_takes_too_long_is_given_up() -> None:
    workers = make_workers(simulation='{"start_delay_ms": 60000}', startup_timeout=1.0)
    with pytest.raises(WorkerStartError, match="not ready within 1 s"):
        await workers.start(lambda progress: None)
    assert not psutil.Process().children()


async def test_a_worker_killed_while_loading_fails_the_start() -> None:
    workers = make_workers(simulation='{"start_delay_ms": 60000}')
    starting = asyncio.create_task(workers.start(lambda progress: None))
    child = await asyncio.to_thread(_first_child)
    child.kill()
    with pytest.raises(WorkerStartError, match="was killed by SIGKILL before it was ready"):
        await starting


def _first_child() -> psutil.Process:
    while not (children := psutil.Process().children()):
        os.sched_yield()
    return children[0]


async def test_a_cancelled_start_leaves_nothing() -> None:
    workers = make_workers(simulation='{"start_delay_ms": 60000}')
    starting = asyncio.create_task(workers.start(lambda progress: None))
    await asyncio.to_thread(_first_child)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert not psutil.Process().children()


async def test_no_room_for_a_block_refuses_to_start() -> None:
    with pytest.raises(WorkerStartError, match="--kv-cache-memory"):
        await make_workers(kv_cache_memory=10).start(lambda progress: None)


def context_switches(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return sum(int(line.split()[1]) for line in status.splitlines() if "ctxt_switches" in line)


async def test_an_idle_worker_is_asleep() -> None:
    async with Group(make_workers()) as group:
        group.submit(group.plan([1]))
        await group.results.get()
        (pid,) = group.info.pids
        await asyncio.sleep(0.2)
        before = context_switches(pid)
        await asyncio.sleep(1.0)
        assert context_switches(pid) == before
