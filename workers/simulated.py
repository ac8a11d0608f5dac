"""A worker without torch: checks every plan, samples by hashing, and takes as long as its latency model says."""

from __future__ import annotations

import time

import msgspec

from atom_async.wire.messages import StepPlan, StepResult, StepTimings, WorkerInit, WorkerLoaded
from atom_async.wire.simulation import SimulatedModel, parse_options

from .loop import Progress

BYTES_PER_TOKEN = 1024
"""Pretended, so that a KV memory setting has a meaning here as well."""


class SimulatedRunner:
    """Satisfies `workers.loop.Runner`."""

    capabilities = ("simulated",)

    def __init__(self, init: WorkerInit) -> None:
        self._init = init
        self._options = parse_options(init.simulation)
        self._model: SimulatedModel

    def load(self, progress: Progress) -> WorkerLoaded:
        if self._options.start_delay_ms:
            time.sleep(self._options.start_delay_ms / 1e3)
        progress("load", 1, 1)
        bytes_per_block = BYTES_PER_TOKEN * self._init.block_size
        given = self._init.kv_cache_bytes
        return WorkerLoaded(
            rank=self._init.rank,
            max_kv_blocks=given // bytes_per_block if given else self._options.num_kv_blocks,
            bytes_per_block=bytes_per_block,
            device_name="simulated",
            attention_backend="none",
        )

    def allocate(self, num_blocks: int) -> None:
        self._model = SimulatedModel(
            self._options,
            block_size=self._init.block_size,
            max_num_seqs=self._init.max_num_seqs,
            num_blocks=num_blocks,
        )

    def warmup(self) -> None:
        """Nothing to warm."""

    def execute(self, plan: StepPlan) -> StepResult:
        begin = time.perf_counter()
        duration = self._model.duration_s(plan)
        result = self._model.apply(plan)
        rest = duration - (time.perf_counter() - begin)
        if rest > 0:
            time.sleep(rest)
        forward_us = int((time.perf_counter() - begin) * 1e6)
        return msgspec.structs.replace(result, timings=StepTimings(0, 0, forward_us, 0))
