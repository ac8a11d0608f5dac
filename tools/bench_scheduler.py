"""Cost of scheduling, without workers: C1-C3, C5 and L5 of the requirements, W1 and W2 in tokens, and how flat the
cost of a step stays as the queue grows.

python tools/bench_scheduler.py
"""

from __future__ import annotations

import gc
import statistics
import time
from array import array

from atom_async.cache.hashing import hash_chain
from atom_async.config import EngineConfig
from atom_async.scheduler.core import Scheduler
from atom_async.scheduler.request import Request, State
from atom_async.scheduler.setup import make_scheduler
from atom_async.wire.messages import StepPlan, StepResult, StepTimings, unpack_ints
from atom_async.wire.sampling import SamplingParams

BLOCK_SIZE = 16
TIMINGS = StepTimings(0, 0, 0, 0)


class Bench:
    """A scheduler and a clock that moves 10 ms a step."""

    def __init__(self, *, blocks: int, seqs: int, budget: int = 1 << 20, **settings: object) -> None:
        config = EngineConfig(
            max_num_seqs=seqs,
            max_num_batched_tokens=budget,
            block_size=BLOCK_SIZE,
            **{"itl_target_ms": "off"} | settings,
        )
        self.scheduler: Scheduler = make_scheduler(config, num_blocks=blocks, max_plan_bytes=1 << 30, max_model_len=0)
        self.now = 0.0
        self.adding_s = 0.0

    def add(
        self, name: str, prompt_len: int, *, chain: list[bytes] | None = None, max_tokens: int = 100_000
    ) -> Request:
        number = self.scheduler.next_rank()
        own = [b"%08d%08d" % (number, index) for index in range(prompt_len // BLOCK_SIZE)]
        request = Request(
            request_id=name,
            tokens=array("i", [number]) * prompt_len,
            prompt_len=prompt_len,
            sampling=SamplingParams(max_tokens=max_tokens),
            end_token_ids=frozenset((0,)),
            chain=own if chain is None else (chain + own[len(chain) :])[: prompt_len // BLOCK_SIZE],
            root=b"",
            max_total_len=prompt_len + max_tokens,
            priority=0,
            arrival_rank=number,
            arrived_at=self.now,
        )
        begin = time.perf_counter()
        self.scheduler.add(request, self.now)
        self.adding_s += time.perf_counter() - begin
        return request

    def plan(self) -> StepPlan | None:
        return self.scheduler.next_step(self.now)

    def complete(self, plan: StepPlan) -> None:
        self.now += 0.01
        slots = self.scheduler.in_flight[0].sample_slots
        tokens = array("i", [7]) * len(unpack_ints(slots))
        self.scheduler.complete(StepResult(plan.step_id, slots, tokens.tobytes(), b"", TIMINGS), self.now)

    def step(self) -> bool:
        plan = self.plan()
        if plan is not None:
            self.complete(plan)
        return plan is not None

    def decoding(self, count: int, prompt_len: int) -> Bench:
        for number in range(count):
            self.add(f"d{number}", prompt_len)
        while len(self.scheduler.running) < count or any(not r.decoding for r in self.scheduler.running):
            self.step()
        return self


def timed(bench: Bench, steps: int = 400) -> tuple[float, float]:
    """Median milliseconds of plan + commit, and of complete."""
    planning: list[float] = []
    completing: list[float] = []
    gc.collect()
    for _ in range(steps):
        begin = time.perf_counter()
        plan = bench.plan()
        planned = time.perf_counter()
        assert plan is not None
        bench.complete(plan)
        planning.append(planned - begin)
        completing.append(time.perf_counter() - planned)
    return statistics.median(planning) * 1e3, statistics.median(completing) * 1e3


def c1() -> None:
    print(
        "\nC1: everyone decodes\n\n"
        "| decoding | prompt tokens each | plan + commit, ms | complete, ms |\n|---|---|---|---|"
    )
    for count, prompt_len in ((1, 1024), (64, 1024), (512, 1024), (512, 32_768)):
        bench = Bench(blocks=count * (prompt_len // BLOCK_SIZE + 64), seqs=count).decoding(count, prompt_len)
        planning, completing = timed(bench)
        print(f"| {count} | {prompt_len} | {planning:.3f} | {completing:.3f} |")


def alternating(benches: dict[str, Bench], rounds: int = 12, steps: int = 100) -> dict[str, float]:
    """Median plan + commit of each, in turns, so that a change of the machine's speed meets all of them."""
    samples: dict[str, list[float]] = {name: [] for name in benches}
    for _ in range(rounds):
        for name, bench in benches.items():
            samples[name].append(timed(bench, steps)[0])
    return {name: statistics.median(values) for name, values in samples.items()}


def loaded(kind: str, count: int) -> Bench:
    """64 decoding, and `count` requests parked behind one begun prompt, blocked by memory, or just queued."""
    bench = Bench(blocks=64 * 128 + 2200, seqs=65, budget=4096, max_chunk_tokens=16, max_bypass_ms=1e12)
    bench.decoding(64, 1024)
    if kind == "parked":
        producer = bench.add("producer", 32_000)
        bench.step()
        for number in range(count):
            bench.add(f"p{number}", 32_016, chain=producer.chain[:1990])
        assert bench.scheduler.intake.parked == count
    elif kind == "blocked":
        for number in range(count):
            bench.add(f"b{number}", 100_000)
        bench.step()
        assert len(bench.scheduler.intake.blocked) == count
    elif kind == "blocked head with a hit":
        first = bench.add("first", 16_000, max_tokens=1)
        while first.state is not State.FINISHED:
            bench.step()
        bench.add("head", 128_000, chain=first.chain)
        bench.step()
        assert len(bench.scheduler.intake.blocked) == 1
    return bench


def c2_c3() -> None:
    print(
        "\nC2, C3: one step with 64 decoding while others wait\n\n"
        "| waiting | plan + commit, ms | more than none, ms |\n|---|---|---|"
    )
    cases = {
        "none": loaded("none", 0),
        "5,000 blocked": loaded("blocked", 5000),
        "a blocked head of 128k with a 16k hit": loaded("blocked head with a hit", 1),
    }
    medians = alternating(cases)
    for name, median in medians.items():
        print(f"| {name} | {median:.4f} | {median - medians['none']:+.4f} |")


def flat() -> None:
    print(
        "\nFlat: the same step beside ever more waiting requests\n\n"
        "| kind | waiting | plan + commit, ms | of the first |\n|---|---|---|---|"
    )
    for kind in ("parked", "blocked"):
        # a parked one needs a begun producer, whose chunk is in every step: the first case has one too
        cases = {count: loaded(kind, count) for count in (1, 100, 1000, 10_000)}
        medians = alternating({str(count): bench for count, bench in cases.items()})
        for name, median in medians.items():
            print(f"| {kind} | {int(name):,} | {median:.4f} | {median / medians['1']:.3f} |")


def w1_w2() -> None:
    print(
        "\nW1, W2: tokens computed for one shared prefix\n\n"
        "| case | ideal | computed | ratio | steps | best order's |\n|---|---|---|---|---|---|"
    )
    for name, count, shared, own, budget in (("W1", 8, 4096, 8, 16_384), ("W2", 128, 30_000, 200, 8192)):
        bench = Bench(blocks=1 << 15, seqs=128, budget=budget)
        chain = [b"shared__%08d" % index for index in range(shared // BLOCK_SIZE)]
        for number in range(count):
            bench.add(f"r{number}", shared + own, chain=list(chain), max_tokens=1)
        steps = 0
        while bench.step():
            steps += 1
        ideal, computed = shared + count * own, bench.scheduler.counters.prompt_tokens_computed
        print(f"| {name} | {ideal} | {computed} | {computed / ideal:.4f} | {steps} | {-(-ideal // budget)} |")


def c5() -> None:
    tokens = array("i", range(128_000)).tobytes()
    begin = time.perf_counter()
    hash_chain(tokens, BLOCK_SIZE)
    took = (time.perf_counter() - begin) * 1e3
    print(f"\nC5: hashing a 128k prompt once, on the client's side, off its loop: {took:.1f} ms")


def l5() -> None:
    bench = Bench(blocks=1 << 16, seqs=512, budget=8192, max_bypass_ms=1e12)
    bench.decoding(500, 256)
    for number in range(5000):
        bench.add(f"w{number}", 512)
    bench.plan()
    names = [f"d{number}" for number in range(0, 500, 5)] + [f"w{number}" for number in range(0, 4500, 5)]
    begin = time.perf_counter()
    for name in names:
        bench.scheduler.abort(name, bench.now)
    print(f"\nL5: {len(names)} aborts at 5,500 live: {(time.perf_counter() - begin) * 1e3:.2f} ms (bar 5)")


def arrivals() -> None:
    """What one arrival and one admission cost, with and without a long cached prefix."""
    bench = Bench(blocks=1 << 16, seqs=256, budget=8192)
    first = bench.add("first", 100_000, max_tokens=1)
    while first.state is not State.FINISHED:
        bench.step()
    bench.adding_s = 0.0
    for number in range(64):
        bench.add(f"a{number}", 100_400, chain=first.chain)
    arrived = time.perf_counter()
    bench.plan()
    planned = time.perf_counter()
    print(
        f"\n64 prompts of 100k tokens, all but 400 cached: {bench.adding_s / 64 * 1e3:.2f} ms an arrival, "
        f"{(planned - arrived) * 1e3:.1f} ms for the step that admits what fits ({len(bench.scheduler.running)})"
    )


def main() -> None:
    for part in (c1, c2_c3, flat, w1_w2, c5, l5, arrivals):
        part()


if __name__ == "__main__":
    main()
