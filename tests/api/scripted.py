"""An EngineClient that plays outputs from a script, for tests of what the API makes of them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import msgspec

from atom_async.engine.client import (
    EngineInfo,
    EngineOutput,
    EngineRequest,
    EngineStats,
    RequestTimings,
    TokenLogprob,
)
from atom_async.wire.messages import unpack_ints

Script = Callable[[EngineRequest], list[EngineOutput | Exception]]

INFO = EngineInfo(
    boot_id="boot",
    max_model_len=256,
    block_size=16,
    num_kv_blocks=100,
    vocab_size=49152,
    max_num_seqs=8,
    max_num_batched_tokens=64,
    device_name="none",
    attention_backend="none",
    dtype="float32",
    tp_size=1,
)
TIMINGS = RequestTimings(queue_s=0.1, prefill_s=0.2, decode_s=0.3)


class ScriptedEngine:
    """`script` gives each request's outputs. With `gate`, each output waits for a permit."""

    info = INFO

    def __init__(self) -> None:
        self.script: Script = lambda request: outputs_for(request, [1])
        self.requests: list[EngineRequest] = []
        self.running: set[str] = set()
        self.left_early: list[str] = []
        self.finished: list[str] = []
        self.gate: asyncio.Semaphore | None = None
        self._gate_arrivals = 0
        self._arrived = asyncio.Event()
        self.current_stats = EngineStats(kv_blocks_total=100, kv_blocks_used=25, running=2, waiting=1, steps=7)
        self.stats_error: Exception | None = None
        self.cause: str | None = None

    async def generate(self, request: EngineRequest) -> AsyncIterator[EngineOutput]:
        self.requests.append(request)
        self.running.add(request.request_id)
        over = False
        try:
            for item in self.script(request):
                if self.gate is not None:
                    self._gate_arrivals += 1
                    self._arrived.set()
                    await self.gate.acquire()
                if isinstance(item, Exception):
                    over = True
                    raise item
                if request.request_id in self.finished and item.finish_reason is None:
                    continue
                over = item.finish_reason is not None
                yield item
        finally:
            self.running.discard(request.request_id)
            if not over:
                self.left_early.append(request.request_id)

    async def generate_all(self, body: Sequence[EngineRequest]) -> AsyncIterator[list[EngineOutput]]:
        """The scripts side by side; the first that raises ends all."""
        inbox: asyncio.Queue[EngineOutput | Exception | None] = asyncio.Queue()

        async def play(request: EngineRequest) -> None:
            try:
                async with contextlib.aclosing(self.generate(request)) as outputs:
                    async for output in outputs:
                        inbox.put_nowait(msgspec.structs.replace(output, request_id=request.request_id))
                inbox.put_nowait(None)
            except Exception as error:
                inbox.put_nowait(error)

        playing = [asyncio.create_task(play(request)) for request in body]
        left = len(playing)
        try:
            while left:
                item = await inbox.get()
                if isinstance(item, Exception):
                    raise item
                left -= item is None
                if item is not None:
                    yield [item]
        finally:
            for task in playing:
                task.cancel()
            await asyncio.gather(*playing, return_exceptions=True)

    async def gate_reached(self, times: int) -> None:
        """Until requests have come to the gate so many times in all."""
        async with asyncio.timeout(10):
            while self._gate_arrivals < times:
                self._arrived.clear()
                await self._arrived.wait()

    def abort(self, request_id: str, *, reason: str = "") -> None:
        raise AssertionError("the API leaves streams instead")

    def finish(self, request_id: str) -> None:
        self.finished.append(request_id)

    async def stats(self) -> EngineStats:
        if self.stats_error is not None:
            raise self.stats_error
        return self.current_stats

    async def state(self) -> dict[str, Any]:
        return {}

    @property
    def failure(self) -> str | None:
        return self.cause

    async def wait_failed(self) -> str:
        raise NotImplementedError

    async def drain(self) -> None:
        raise NotImplementedError


def outputs_for(
    request: EngineRequest,
    token_ids: list[int],
    *,
    sizes: list[int] | None = None,
    end: int | None = None,
    cached: int = 0,
) -> list[EngineOutput | Exception]:
    """Outputs that produce these tokens, cut into runs of these `sizes` (default: one each), with made-up
    logprobs where asked for. `end`: the token id that stops; without it the reason is `length`."""
    ids = [*token_ids, end] if end is not None else token_ids
    cuts = iter(sizes or ())
    outputs: list[EngineOutput | Exception] = []
    position = 0
    while position < len(ids):
        run = ids[position : position + next(cuts, 1)]
        position += len(run)
        outputs.append(_output(request, run, position - len(run), cached, first=not outputs))
    outputs.append(
        EngineOutput(
            request_id=request.request_id,
            cached_tokens=cached,
            finish_reason="length" if end is None else "stop",
            stop_token_id=None,
            timings=TIMINGS,
        )
    )
    if end is not None:  # as the engine does: the stopping token comes with the reason
        stopping = outputs[-2]
        assert isinstance(stopping, EngineOutput)
        outputs[-2:] = [
            EngineOutput(
                request_id=request.request_id,
                token_ids=stopping.token_ids,
                logprobs=stopping.logprobs,
                prompt_logprobs=stopping.prompt_logprobs,
                cached_tokens=cached,
                finish_reason="stop",
                stop_token_id=end,
                timings=TIMINGS,
            )
        ]
    return outputs


def logprob_of(token_id: int, position: int, top: int) -> TokenLogprob:
    value = -0.5 - position
    best = [(token_id, value), *((other, value - 1 - other) for other in range(100, 100 + top))]
    return TokenLogprob(token_id, value, 1, best[:top])


def _output(request: EngineRequest, run: list[int], start: int, cached: int, *, first: bool) -> EngineOutput:
    sampling = request.sampling
    logprobs = prompt = None
    if sampling.logprobs >= 0:
        logprobs = [logprob_of(token, start + i, sampling.logprobs) for i, token in enumerate(run)]
    if sampling.prompt_logprobs >= 0 and first:
        ids = unpack_ints(request.prompt_token_ids)
        prompt = [None, *(logprob_of(token, i, sampling.prompt_logprobs) for i, token in enumerate(ids[1:], 1))]
    return EngineOutput(
        request_id=request.request_id, token_ids=run, logprobs=logprobs, prompt_logprobs=prompt, cached_tokens=cached
    )
