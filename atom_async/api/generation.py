"""What both generating endpoints do once the sequences of a request are made."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import Protocol

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from atom_async.api.errors import bad_request
from atom_async.api.outputs import Outputs, collect
from atom_async.api.replies import CLIENT_LEFT, ClientLeft, JsonReply, SseReply, sse, until_disconnect
from atom_async.api.requests import SharedFields
from atom_async.api.responses import Usage
from atom_async.api.sequence import Piece, Sequence, usage_of
from atom_async.api.state import Served


@dataclass(frozen=True, slots=True)
class Generation:
    """One answer in the making: its sequences, choices of the first prompt first."""

    served: Served
    sequences: SequenceOf[Sequence]
    id: str
    n: int
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def model(self) -> str:
        return self.served.names[0]

    def usage(self) -> Usage:
        return usage_of(self.sequences, self.n)


class Shape(Protocol):
    """Pieces of sequences in the form of one endpoint. Every piece passes `add`, once, in order."""

    def add(self, sequence: Sequence, piece: Piece) -> SequenceOf[msgspec.Struct]:
        """The events that it becomes in a stream."""
        ...

    def usage_event(self) -> msgspec.Struct: ...

    def whole(self) -> msgspec.Struct:
        """Everything so far in one answer; for requests without `stream`."""
        ...


async def answer(request: Request, body: SharedFields, generation: Generation, shape: Shape) -> Response | SseReply:
    """Submits the request and answers it. Raises ApiError."""
    outputs = Outputs(generation.served.engine, generation.sequences)
    if body.stream:
        return SseReply(outputs, _events_of(shape), _last_events(body, shape))
    try:
        await until_disconnect(request.receive, collect(outputs, shape.add))
    except ClientLeft:
        return Response(status_code=CLIENT_LEFT)
    if any(sequence.request.sampling.prompt_logprobs >= 0 for sequence in generation.sequences):
        # tens of objects a prompt token: seconds for a long prompt
        return await asyncio.to_thread(lambda: JsonReply(shape.whole()))
    return JsonReply(shape.whole())


def _events_of(shape: Shape) -> Callable[[list[tuple[Sequence, Piece]]], bytes]:
    def render(batch: list[tuple[Sequence, Piece]]) -> bytes:
        return b"".join([sse(event) for sequence, piece in batch for event in shape.add(sequence, piece)])

    return render


def _last_events(body: SharedFields, shape: Shape) -> Callable[[], bytes]:
    return lambda: sse(shape.usage_event()) if includes_usage(body) else b""


def includes_usage(body: SharedFields) -> bool:
    return bool(body.stream_options and body.stream_options.include_usage)


def check_stream_fields(body: SharedFields) -> None:
    """Raises ApiError."""
    if body.stream_options is not None and not body.stream:
        raise bad_request("stream_options is allowed only with stream: true", "stream_options")
    if body.stream_options is not None and body.stream_options.include_obfuscation:
        raise bad_request(
            "stream_options.include_obfuscation is not supported; accepted: false", "stream_options.include_obfuscation"
        )
    if body.stream and body.prompt_logprobs is not None:
        raise bad_request("prompt_logprobs is not supported with stream: true", "prompt_logprobs")
