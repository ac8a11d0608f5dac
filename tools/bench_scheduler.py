"""Cost of scheduling one step (C1 of the requirements): plan, commit and complete, without workers.

python tools/bench_scheduler.py
"""

from __future__ import annotations

import statistics
import time
from array import array

from atom_async.cache.pool import BlockPool
from atom_async.scheduler.admission import Limits
from atom_async.scheduler.core import Scheduler
from atom_async.scheduler.request import Request
from atom_async.wire.messages import StepPlan, StepResult, StepTimings, unpack_ints
from atom_async.wire.sampling import SamplingParams

BLOCK_SIZE = 16
TIMINGS = StepTimings(0, 0, 0, 0)


def make_scheduler(decoding: int, prompt_len: int) -> Scheduler:
    blocks = decoding * (prompt_len // BLOCK_SIZE + 64)
    limits = Limits(
        max_num_seqs=decoding,
        max_num_batched_tokens=1 << 20,
        max_plan_bytes=1 << 30,
        block_size=BLOCK_SIZE,
        prefix_caching=True,
    )
    return Scheduler(pool=BlockPool(blocks), limits=limits)


def add(scheduler: Scheduler, number: int, prompt_len: int) -> None:
    scheduler.add(
        Request(
            request_id=f"r{number}",
            tokens=array("i", [number]) * prompt_len,
            prompt_len=prompt_len,
            sampling=SamplingParams(max_tokens=100_000),
            end_token_ids=frozenset((0,)),
            chain=[b"%08d%08d" % (number, index) for index in range(prompt_len // BLOCK_SIZE)],
            root=b"",
            max_total_len=1 << 30,
            priority=0,
            arrival_rank=scheduler.next_rank(),
            arrived_at=0.0,
        )
    )


def result_of(scheduler: Scheduler, plan: StepPlan) -> StepResult:
    slots = scheduler.in_flight[-1].sample_slots
    tokens = array("i", [7]) * len(unpack_ints(slots))
    return StepResult(plan.step_id, slots, tokens.tobytes(), b"", TIMINGS)


def measure(decoding: int, prompt_len: int, steps: int = 200) -> tuple[float, float]:
    """Median milliseconds of plan + commit, and of complete, while everyone decodes."""
    scheduler = make_scheduler(decoding, prompt_len)
    for number in range(decoding):
        add(scheduler, number, prompt_len)
    while len(scheduler.running) < decoding or any(not r.decoding for r in scheduler.running):
        scheduler.complete(result_of(scheduler, scheduler.commit(scheduler.plan(), 0.0)), 0.0)
    planning: list[float] = []
    completing: list[float] = []
    for _ in range(steps):
        begin = time.perf_counter()
        plan = scheduler.commit(scheduler.plan(), 0.0)
        planned = time.perf_counter()
        result = result_of(scheduler, plan)
        received = time.perf_counter()
        scheduler.complete(result, 0.0)
        planning.append(planned - begin)
        completing.append(time.perf_counter() - received)
    return statistics.median(planning) * 1e3, statistics.median(completing) * 1e3


def main() -> None:
    print("| decoding | prompt tokens each | plan + commit, ms | complete, ms |")
    print("|---|---|---|---|")
    for decoding, prompt_len in ((1, 1024), (64, 1024), (512, 1024), (512, 32_768)):
        planning, completing = measure(decoding, prompt_len)
        print(f"| {decoding} | {prompt_len} | {planning:.3f} | {completing:.3f} |")


if __name__ == "__main__":
    main()
