"""The worker's life after it was spawned: load as told, then run one step after another."""

from __future__ import annotations

import contextlib
import gc
import os
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import msgspec

from atom_async.wire.doorbell import BlockingWait, Doorbell
from atom_async.wire.framing import BlockingChannel
from atom_async.wire.messages import (
    PROTOCOL_VERSION,
    AllocateKv,
    Shutdown,
    StepPlan,
    StepResult,
    WorkerFault,
    WorkerHello,
    WorkerInit,
    WorkerLoaded,
    WorkerProgress,
    WorkerReady,
)
from atom_async.wire.ring import Ring

Stage = Literal["import", "load", "kv", "warmup"]
Progress = Callable[[Stage, int, int], None]


class Runner(Protocol):
    """What computes the steps: the model on torch, or the simulated one."""

    @property
    def capabilities(self) -> tuple[str, ...]: ...

    def load(self, progress: Progress) -> WorkerLoaded: ...

    def allocate(self, num_blocks: int) -> None: ...

    def warmup(self) -> None: ...

    def execute(self, plan: StepPlan) -> StepResult: ...


@dataclass
class Endpoint:
    """The worker's ends of everything it was handed."""

    rank: int
    channel: BlockingChannel[Any, Any]
    plans: Ring
    results: Ring
    plan_bell: Doorbell
    result_bell: Doorbell


def serve(endpoint: Endpoint, make_runner: Callable[[WorkerInit], Runner]) -> int:
    """From the first message to the last. Returns the exit code; faults are told to the engine first."""
    try:
        runner = _prepare(endpoint, make_runner)
        if runner is not None:
            gc.collect()
            gc.freeze()
            _run_steps(endpoint, runner)
    except Exception as error:
        _report(endpoint, error)
        return 1
    return 0


def _report(endpoint: Endpoint, error: Exception) -> None:
    step_id, cause = (error.step_id, error.cause) if isinstance(error, StepError) else (-1, error)
    fault = WorkerFault(
        rank=endpoint.rank,
        step_id=step_id,
        message=f"{type(cause).__name__}: {cause}",
        traceback="".join(traceback.format_exception(cause)),
    )
    with contextlib.suppress(OSError):  # the engine is gone: nobody is left to tell
        endpoint.channel.send(fault)


def _prepare(endpoint: Endpoint, make_runner: Callable[[WorkerInit], Runner]) -> Runner | None:
    """The handshake. None when the engine ends it early."""
    channel, rank = endpoint.channel, endpoint.rank
    init = channel.receive()
    if not isinstance(init, WorkerInit):
        return None
    if init.protocol_version != PROTOCOL_VERSION:
        raise RuntimeError(f"the engine speaks protocol {init.protocol_version}, this worker {PROTOCOL_VERSION}")

    def progress(stage: Stage, done: int, total: int) -> None:
        channel.send(WorkerProgress(rank=rank, stage=stage, done=done, total=total))

    progress("import", 0, 1)
    runner = make_runner(init)
    channel.send(
        WorkerHello(protocol_version=PROTOCOL_VERSION, rank=rank, pid=os.getpid(), capabilities=runner.capabilities)
    )
    channel.send(runner.load(progress))
    allocate = channel.receive()
    if not isinstance(allocate, AllocateKv):
        return None
    progress("kv", 0, 1)
    runner.allocate(allocate.num_blocks)
    progress("warmup", 0, 1)
    runner.warmup()
    channel.send(WorkerReady(rank=rank))
    return runner


class StepError(Exception):
    """A step failed; carries its id."""

    def __init__(self, step_id: int, cause: Exception) -> None:
        super().__init__(str(cause))
        self.step_id = step_id
        self.cause = cause


def _run_steps(endpoint: Endpoint, runner: Runner) -> None:
    """Runs steps until the engine says stop or is gone."""
    decode = msgspec.msgpack.Decoder(StepPlan).decode
    encoder = msgspec.msgpack.Encoder()
    wait = BlockingWait(endpoint.plan_bell.fd, endpoint.channel.fd)
    idle_since = time.perf_counter()
    while True:
        plan = endpoint.plans.take(decode)
        if plan is None:
            ready = wait()
            if endpoint.channel.fd in ready:
                message = endpoint.channel.receive()
                if message is None or isinstance(message, Shutdown):
                    return
            endpoint.plan_bell.hear()
            continue
        waited_us = int((time.perf_counter() - idle_since) * 1e6)
        try:
            result = runner.execute(plan)
        except Exception as error:
            raise StepError(plan.step_id, error) from error
        timings = msgspec.structs.replace(result.timings, wait_us=waited_us)
        endpoint.results.write(encoder.encode(msgspec.structs.replace(result, timings=timings)))
        endpoint.result_bell.ring()
        idle_since = time.perf_counter()
