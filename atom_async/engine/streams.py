"""Outputs on their way to clients: one stream per body, fed synchronously, read by one task.

Delivery is O(1) and never waits. What a slow reader has not taken yet is bounded by its requests' max_tokens;
`__anext__` hands it over merged, so a reader that fell behind catches up in one step.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Sequence

import msgspec

from .client import EngineOutput


async def one_by_one(batches: AsyncGenerator[list[EngineOutput], None]) -> AsyncGenerator[EngineOutput, None]:
    """The outputs of a body by themselves; closing it closes `batches`."""
    async with contextlib.aclosing(batches):
        async for batch in batches:
            for output in batch:
                yield output


def merge(outputs: list[EngineOutput]) -> EngineOutput:
    """Consecutive outputs of one request as one."""
    if len(outputs) == 1:
        return outputs[0]
    last = outputs[-1]
    logprobs = [entry for output in outputs for entry in output.logprobs or ()]
    prompt = next((output.prompt_logprobs for output in outputs if output.prompt_logprobs is not None), None)
    return msgspec.structs.replace(
        last,
        token_ids=[token for output in outputs for token in output.token_ids],
        logprobs=logprobs or None,
        prompt_logprobs=prompt,
    )


class BodyStream:
    """Async iterator over the outputs of the requests of one body: what has come since the last look, one output
    a request. Ends when all of them have had one with a finish_reason."""

    def __init__(self, request_ids: Sequence[str], leave: Callable[[BodyStream], None]) -> None:
        self.open_ids = set(request_ids)
        """Whose last output, or an error, has not been delivered."""
        self._leave = leave
        self._outputs: list[EngineOutput] = []
        self._error: Exception | None = None
        self._news = asyncio.Event()

    def deliver(self, output: EngineOutput) -> None:
        self._outputs.append(output)
        if output.finish_reason is not None:
            self.open_ids.discard(output.request_id)
        self._news.set()

    def fail(self, error: Exception) -> None:
        """Ends the stream with `error`, after what was delivered before it."""
        self._error = error
        self.open_ids.clear()
        self._news.set()

    def __aiter__(self) -> BodyStream:
        return self

    async def __anext__(self) -> list[EngineOutput]:
        """Raises what `fail` was given once everything delivered has been read."""
        while not self._outputs:
            if self._error is not None:
                raise self._error
            if not self.open_ids:
                raise StopAsyncIteration
            self._news.clear()
            await self._news.wait()
        outputs, self._outputs = self._outputs, []
        if len(outputs) == 1:
            return outputs
        by_request: dict[str, list[EngineOutput]] = {}
        for output in outputs:
            by_request.setdefault(output.request_id, []).append(output)
        return [merge(own) for own in by_request.values()]

    async def aclose(self) -> None:
        """The reader is done. What has not ended is abandoned. Idempotent."""
        self._leave(self)


class StreamTable:
    """The open streams by request id. `on_abandoned(request_id)` is called for what a reader left early."""

    def __init__(self, *, on_abandoned: Callable[[str], None]) -> None:
        self._streams: dict[str, BodyStream] = {}
        self._on_abandoned = on_abandoned

    def __len__(self) -> int:
        return len(self._streams)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._streams

    def open(self, request_ids: Sequence[str]) -> BodyStream:
        """Ids are unique among the open streams; the caller has checked."""
        stream = BodyStream(request_ids, self._left)
        for request_id in request_ids:
            assert request_id not in self._streams, request_id
            self._streams[request_id] = stream
        return stream

    def deliver(self, output: EngineOutput) -> None:
        """To the stream's reader; to nobody when it has left."""
        stream = self._streams.get(output.request_id)
        if stream is not None:
            stream.deliver(output)
            if output.finish_reason is not None:
                del self._streams[output.request_id]

    def deliver_all(self, outputs: list[EngineOutput]) -> None:
        for output in outputs:
            self.deliver(output)

    def fail(self, request_id: str, error: Exception) -> None:
        """Ends the whole stream that this request belongs to."""
        stream = self._streams.get(request_id)
        if stream is not None:
            self._remove(stream)
            stream.fail(error)

    def fail_all(self, error: Exception) -> None:
        streams, self._streams = self._streams, {}
        for stream in dict.fromkeys(streams.values()):
            stream.fail(error)

    def _remove(self, stream: BodyStream) -> list[str]:
        left = list(stream.open_ids)
        for request_id in left:
            del self._streams[request_id]
        return left

    def _left(self, stream: BodyStream) -> None:
        left = self._remove(stream)
        stream.open_ids.clear()
        for request_id in left:
            self._on_abandoned(request_id)
