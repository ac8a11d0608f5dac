"""Cost of the wire: C4 and C6 of the requirements.

    python tools/bench_wire.py

The floor beside C6 is two processes that only ring each other's eventfd, both blocking, in the same run.

C4: size, and encode + decode time, of the plan of a step in which 512 sequences of 32k tokens decode and a
    sixteenth of them grows by a block. C6: engine -> worker -> engine for an empty step of a real worker process
    on the simulated model, back to back and after an idle gap.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import subprocess
import sys
import time

import msgspec
import uvloop

from atom_async.config import EngineConfig
from atom_async.engine.process_workers import ProcessWorkers
from atom_async.wire.messages import StepPlan, StepResult, StepTimings, pack_ints
from atom_async.wire.model import ModelSpec, WeightSource

SEQUENCES = 512
ROUNDS = 3000
IDLE_ROUNDS = 40
IDLE_S = 0.05

SPEC = ModelSpec(
    architecture="llama",
    hidden_size=8,
    intermediate_size=8,
    num_layers=1,
    num_heads=1,
    num_kv_heads=1,
    head_dim=8,
    vocab_size=32_000,
    max_positions=32_768,
    rms_norm_eps=1e-5,
    rope_theta=1e4,
)


def decode_plan(step_id: int) -> StepPlan:
    growing = range(0, SEQUENCES, 16)
    return StepPlan(
        step_id=step_id,
        grown_slots=pack_ints(growing),
        grown_blocks=pack_ints(100_000 + slot for slot in growing),
        decode_slots=pack_ints(range(SEQUENCES)),
    )


def median_us(function, rounds: int = 2000) -> float:
    times = []
    for _ in range(rounds):
        begin = time.perf_counter()
        function()
        times.append(time.perf_counter() - begin)
    return statistics.median(times) * 1e6


def codec() -> None:
    encoder = msgspec.msgpack.Encoder()
    plan = decode_plan(1)
    result = StepResult(1, pack_ints(range(SEQUENCES)), pack_ints(range(SEQUENCES)), b"", StepTimings(1, 2, 3, 4))
    print("| message | bytes | encode, µs | decode, µs |")
    print("|---|---|---|---|")
    for name, message in ((f"plan, {SEQUENCES} decoding", plan), (f"result, {SEQUENCES} tokens", result)):
        payload = encoder.encode(message)
        decoder = msgspec.msgpack.Decoder(type(message))
        encode_us = median_us(lambda message=message: encoder.encode(message))
        decode_us = median_us(lambda decoder=decoder, payload=payload: decoder.decode(payload))
        print(f"| {name} | {len(payload)} | {encode_us:.1f} | {decode_us:.1f} |")
    building_us = median_us(lambda: decode_plan(1))
    print(f"\nbuilding the plan's int lists from Python ints: {building_us:.1f} µs")


async def round_trips(tp: int) -> None:
    config = EngineConfig(device="simulated", tp=tp)
    workers = ProcessWorkers(
        config, SPEC, WeightSource(kind="random"), device="simulated", dtype="float32", max_model_len=1024
    )
    loop = asyncio.get_running_loop()
    arrived: asyncio.Future[None] = loop.create_future()
    workers.on_result = lambda result: arrived.set_result(None)
    workers.on_failure = lambda failure: print(failure)
    await workers.start(lambda progress: None)
    step = 0
    samples: dict[str, list[float]] = {"back to back": [], f"after {IDLE_S * 1e3:.0f} ms idle": []}
    for name, rounds in zip(samples, (ROUNDS, IDLE_ROUNDS), strict=True):
        for _ in range(rounds):
            if rounds == IDLE_ROUNDS:
                await asyncio.sleep(IDLE_S)
            step += 1
            arrived = loop.create_future()
            begin = time.perf_counter()
            workers.submit(StepPlan(step_id=step), deadline_s=10)
            await arrived
            samples[name].append(time.perf_counter() - begin)
    await workers.stop()
    for name, times in samples.items():
        ranked = sorted(times)
        print(f"| {tp} | {name} | {ranked[len(ranked) // 2] * 1e6:.0f} | {ranked[int(len(ranked) * 0.99)] * 1e6:.0f} |")


ECHO = """
import os, sys
heard, answered = int(sys.argv[1]), int(sys.argv[2])
while True:
    if os.eventfd_read(heard) > 1: break
    os.eventfd_write(answered, 1)
"""


def floor() -> None:
    """Wake-ups alone: a process that answers every ring with one."""
    out, back = os.eventfd(0), os.eventfd(0)
    child = subprocess.Popen([sys.executable, "-c", ECHO, str(out), str(back)], pass_fds=(out, back))
    for name, rounds, gap in (
        ("back to back", ROUNDS, 0.0),
        (f"after {IDLE_S * 1e3:.0f} ms idle", IDLE_ROUNDS, IDLE_S),
    ):
        times = []
        for _ in range(rounds):
            if gap:
                time.sleep(gap)
            begin = time.perf_counter()
            os.eventfd_write(out, 1)
            os.eventfd_read(back)
            times.append(time.perf_counter() - begin)
        times.sort()
        print(f"| floor | {name} | {times[len(times) // 2] * 1e6:.0f} | {times[int(len(times) * 0.99)] * 1e6:.0f} |")
    os.eventfd_write(out, 2)
    child.wait()


def main() -> None:
    codec()
    print("\n| ranks | empty step | median, µs | p99, µs |")
    print("|---|---|---|---|")
    floor()
    for tp in (1, 2):
        uvloop.run(round_trips(tp))


if __name__ == "__main__":
    main()
