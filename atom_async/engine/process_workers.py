"""Real worker processes, one per tensor-parallel rank, driven over rings and eventfds."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

import msgspec

from atom_async.config import EngineConfig
from atom_async.wire.messages import (
    PROTOCOL_VERSION,
    AllocateKv,
    StepPlan,
    StepResult,
    WorkerInit,
    WorkerProgress,
)
from atom_async.wire.model import ModelSpec, WeightSource

from .deadlines import StepDeadlines
from .worker_link import WorkerLink
from .workers import WorkerFailure, WorkersInfo, WorkerStartError

log = logging.getLogger(__name__)

STOP_GRACE_S = 5.0
LARGEST_GRAMMAR = 2 << 20
"""Bytes for one request's grammar beside everything else in a plan."""
LOGPROB_BYTES = 20
"""Encoded size of one token id with its log-probability, and some more."""

T = TypeVar("T")


class ProcessWorkers:
    """Satisfies `Workers`.

    Args:
        device: resolved, `cpu`, `cuda` or `simulated`.
        dtype: resolved, `float32`, `bfloat16` or `float16`.
        max_model_len: an upper bound, tokens.
        tokenizer_json: path, for grammars; may be empty.
    """

    on_result: Callable[[StepResult], None]
    on_failure: Callable[[WorkerFailure], None]

    def __init__(
        self,
        config: EngineConfig,
        spec: ModelSpec,
        weights: WeightSource,
        *,
        device: str,
        dtype: str,
        max_model_len: int,
        tokenizer_json: str = "",
        end_token_ids: tuple[int, ...] = (),
    ) -> None:
        self._config = config
        self._init = WorkerInit(
            protocol_version=PROTOCOL_VERSION,
            rank=0,
            tp_size=config.tp,
            model=spec,
            weights=weights,
            device=device,  # type: ignore[arg-type]
            dtype=dtype,
            seed=config.seed,
            block_size=config.block_size,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=max_model_len,
            kv_cache_bytes=config.kv_cache_memory or 0,
            gpu_memory_utilization=config.gpu_memory_utilization,
            threads=config.threads or max(1, (os.cpu_count() or 1) // config.tp),
            store_port=0,
            tokenizer_json=tokenizer_json,
            end_token_ids=end_token_ids,
            simulation=config.simulation,
        )
        self._encoder = msgspec.msgpack.Encoder()
        self._links: list[WorkerLink] = []
        self._deadlines = StepDeadlines(on_expired=self._on_expired)
        self._results: dict[int, StepResult] = {}
        """Rank 0's results that other ranks have not confirmed yet."""
        self._confirmed: list[int] = []
        """Per rank, the last step it has finished."""
        self._next_step = 1
        self._failed = False
        self._ready = False

    async def start(self, on_progress: Callable[[WorkerProgress], None]) -> WorkersInfo:
        """See `Workers.start`. Whatever goes wrong, no process or descriptor is left."""
        try:
            async with asyncio.timeout(self._config.startup_timeout):
                return await self._start(on_progress)
        except TimeoutError:
            await self._end(grace_s=0)
            raise WorkerStartError(
                f"the workers were not ready within {self._config.startup_timeout:g} s (--startup-timeout)"
            ) from None
        except BaseException:
            await self._end(grace_s=0)
            raise

    async def _start(self, on_progress: Callable[[WorkerProgress], None]) -> WorkersInfo:
        with contextlib.ExitStack() as stack:
            store = _store_socket() if self._config.tp > 1 else None
            if store is not None:
                stack.enter_context(store)
            port = store.getsockname()[1] if store is not None else 0
            for rank in range(self._config.tp):
                init = msgspec.structs.replace(self._init, rank=rank, store_port=port)
                fd = store.fileno() if store is not None and rank == 0 else -1
                link = WorkerLink(
                    init,
                    plan_ring_bytes=self._plan_ring_bytes(),
                    result_ring_bytes=self._result_ring_bytes(),
                    on_exit=self._on_exit,
                    on_message=self._on_message,
                )
                self._links.append(link)
                self._confirmed.append(0)
                await link.spawn(store_fd=fd)
        loaded = await self._together([link.load(on_progress) for link in self._links])
        num_blocks = min(answer.max_kv_blocks for answer in loaded)
        if num_blocks < 1:
            raise WorkerStartError(
                f"no room for a single KV block of {loaded[0].bytes_per_block} bytes; raise --kv-cache-memory"
            )
        await self._together([link.allocate(AllocateKv(num_blocks=num_blocks), on_progress) for link in self._links])
        for link in self._links:
            link.serve(self._on_results)
        self._ready = True
        return WorkersInfo(
            num_kv_blocks=num_blocks,
            max_plan_bytes=self._links[0].plans.max_message,
            device_name=loaded[0].device_name,
            attention_backend=loaded[0].attention_backend,
            pids=tuple(link.pid for link in self._links),
        )

    @staticmethod
    async def _together(steps: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
        """All ranks at once; the first failure ends the wait for the others."""
        tasks = [asyncio.ensure_future(step) for step in steps]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _plan_ring_bytes(self) -> int:
        """Room for four of the largest plans, so that two in flight always fit, each with a grammar of some size."""
        config = self._config
        ints = 2 * self._init.max_model_len + 3 * (config.max_num_batched_tokens + config.max_num_seqs)
        largest = LARGEST_GRAMMAR + 4 * ints
        return max(1 << 20, 4 * largest)

    def _result_ring_bytes(self) -> int:
        """The same for results, whose largest have log-probabilities of every token of a step."""
        per_token = LOGPROB_BYTES * (self._config.max_logprobs + 2)
        return max(1 << 20, 4 * (4096 + per_token * self._config.max_num_batched_tokens))

    def submit(self, plan: StepPlan, *, deadline_s: float) -> None:
        """See `Workers.submit`. Raises ring.RingFull or ValueError for a plan beyond max_plan_bytes."""
        if self._failed:
            return
        payload = self._encoder.encode(plan)
        for link in self._links:
            link.plans.write(payload)
            link.plan_bell.ring()
        self._deadlines.submitted(plan.step_id, deadline_s)

    def _on_results(self, link: WorkerLink, result: StepResult) -> None:
        self._confirmed[link.rank] = result.step_id
        if link.rank == 0:
            self._results[result.step_id] = result
        while not self._failed and self._next_step <= min(self._confirmed):
            step, self._next_step = self._next_step, self._next_step + 1
            self._deadlines.completed(step)
            self.on_result(self._results.pop(step))

    def _on_message(self, link: WorkerLink, message: object) -> None:
        """Hello, progress and the answers of the handshake are read by the link itself."""
        log.warning("worker %d sent %s out of turn", link.rank, type(message).__name__)

    def _on_exit(self, link: WorkerLink, cause: str, step_id: int) -> None:
        if not self._ready:
            return  # the handshake that waits for this worker reports it
        at = step_id if step_id >= 0 else self._confirmed[link.rank] + 1 if self._deadlines.waiting else -1
        during = f" during step {at}" if at >= 0 else " while idle"
        self._fail(link, at, f"worker {link.rank} (pid {link.pid}) {cause}{during}")

    def _on_expired(self, step_id: int, deadline_s: float) -> None:
        rank = self._confirmed.index(min(self._confirmed))
        link = self._links[rank]
        self._fail(
            link, step_id, f"worker {rank} (pid {link.pid}) did not finish step {step_id} within {deadline_s:g} s"
        )

    def _fail(self, link: WorkerLink, step_id: int, message: str) -> None:
        """Once. The other ranks hang in a collective that will never end, so they go too."""
        if self._failed:
            return
        self._failed = True
        self._deadlines.stop()
        for other in self._links:
            other.kill()
        self.on_failure(WorkerFailure(rank=link.rank, pid=link.pid, step_id=step_id, message=message))

    async def stop(self) -> None:
        """See `Workers.stop`."""
        await self._end(grace_s=STOP_GRACE_S)

    async def _end(self, *, grace_s: float) -> None:
        self._failed = True
        self._deadlines.stop()
        links, self._links = self._links, []
        await asyncio.gather(*(link.end(grace_s) for link in links))


def _store_socket() -> socket.socket:
    """Where rank 0 will meet the others: listening before any worker exists, so nobody can be too early."""
    sock = socket.create_server(("127.0.0.1", 0))
    sock.set_inheritable(True)
    return sock
