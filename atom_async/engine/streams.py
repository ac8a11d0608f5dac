"""Outputs on their way to clients: one stream per request, fed synchronously, read by one task.

Delivery is O(1) and never waits. What a slow reader has not taken yet is bounded by its request's max_tokens;
`__anext__` hands it over merged, so a reader that fell behind catches up in one step.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec

from .client import EngineOutput


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


class RequestStream:
    """Async iterator over the outputs of one request; ends after the one with a finish_reason."""

    def __init__(self, request_id: str, leave: Callable[[RequestStream], None]) -> None:
        self.request_id = request_id
        self.ended = False
        """The last output, or an error, has been delivered."""
        self._leave = leave
        self._outputs: list[EngineOutput] = []
        self._error: Exception | None = None
        self._news = asyncio.Event()

    def deliver(self, output: EngineOutput) -> None:
        self._outputs.append(output)
        self.ended = output.finish_reason is not None
        self._news.set()

    def fail(self, error: Exception) -> None:
        """Ends the stream with `error`, after what was delivered before it."""
        self._error = error
        self.ended = True
        self._news.set()

    def __aiter__(self) -> RequestStream:
        return self

    async def __anext__(self) -> EngineOutput:
        """Raises what `fail` was given once everything delivered has been read."""
        while not self._outputs:
            if self._error is not None:
                raise self._error
            if self.ended:
                raise StopAsyncIteration
            self._news.clear()
            await self._news.wait()
        outputs, self._outputs = self._outputs, []
        return merge(outputs)

    async def aclose(self) -> None:
        """The reader is done. Before the end this abandons the request. Idempotent."""
        self._leave(self)


class StreamTable:
    """The open streams by request id. `on_abandoned(request_id)` is called for a reader that left early."""

    def __init__(self, *, on_abandoned: Callable[[str], None]) -> None:
        self._streams: dict[str, RequestStream] = {}
        self._on_abandoned = on_abandoned

    def __len__(self) -> int:
        return len(self._streams)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._streams

    def open(self, request_id: str) -> RequestStream:
        """Ids are unique among the open streams; the caller has checked."""
        assert request_id not in self._streams, request_id
        stream = self._streams[request_id] = RequestStream(request_id, self._left)
        return stream

    def deliver(self, output: EngineOutput) -> None:
        """To the stream's reader; to nobody when it has left."""
        stream = self._streams.get(output.request_id)
        if stream is not None:
            stream.deliver(output)
            if stream.ended:
                del self._streams[output.request_id]

    def deliver_all(self, outputs: list[EngineOutput]) -> None:
        for output in outputs:
            self.deliver(output)

    def fail(self, request_id: str, error: Exception) -> None:
        stream = self._streams.pop(request_id, None)
        if stream is not None:
            stream.fail(error)

    def fail_all(self, error: Exception) -> None:
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream.fail(error)

    def _left(self, stream: RequestStream) -> None:
        if not stream.ended:
            stream.ended = True
            del self._streams[stream.request_id]
            self._on_abandoned(stream.request_id)
