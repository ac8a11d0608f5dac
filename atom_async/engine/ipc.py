"""Messages between frontend and engine process: msgpack frames over a unix socketpair (`wire.framing`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from atom_async.config import EngineConfig
from atom_async.wire.messages import WorkerProgress
from atom_async.wire.model import ModelSpec, WeightSource

from .client import EngineInfo, EngineOutput, EngineRequest, EngineStats

MAX_UNREAD_BYTES = 256 << 20
"""Outputs that a frontend may leave unread before the engine gives it up for stuck. Its outputs are a few
dozen bytes a token, so this is minutes of a busy engine's tokens, not a hiccup, nor a few of the largest messages."""


class ModelFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What the engine needs of a resolved model."""

    spec: ModelSpec
    weights: WeightSource
    device: str
    dtype: str
    max_model_len: int
    tokenizer_json: str
    end_token_ids: tuple[int, ...]


# Frontend -> engine -------------------------------------------------------------------------------


class Start(msgspec.Struct, frozen=True, tag="start"):
    config: EngineConfig
    model: ModelFacts


class Submit(msgspec.Struct, frozen=True, tag="submit"):
    """The requests of one body. A prompt travels once: where `prompt_of[i]` is not i, that of `requests[i]` is
    that of `requests[prompt_of[i]]`."""

    requests: list[EngineRequest]
    prompt_of: list[int]

    @classmethod
    def of(cls, body: Sequence[EngineRequest]) -> Submit:
        first: dict[tuple[int, int], int] = {}
        prompt_of = [
            first.setdefault((id(request.prompt_token_ids), id(request.block_hashes)), index)
            for index, request in enumerate(body)
        ]
        bare = [
            request
            if prompt_of[index] == index
            else msgspec.structs.replace(request, prompt_token_ids=b"", block_hashes=b"")
            for index, request in enumerate(body)
        ]
        return cls(bare, prompt_of)

    def body(self) -> list[EngineRequest]:
        """Raises IndexError for a message that `of` did not make."""
        return [
            msgspec.structs.replace(
                request,
                prompt_token_ids=self.requests[index].prompt_token_ids,
                block_hashes=self.requests[index].block_hashes,
            )
            for request, index in zip(self.requests, self.prompt_of, strict=True)
        ]


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    request_id: str
    reason: str


class Finish(msgspec.Struct, frozen=True, tag="finish"):
    request_id: str


class Drain(msgspec.Struct, frozen=True, tag="drain"):
    """Answered by `Drained` once nothing runs any more."""


class Ask(msgspec.Struct, frozen=True, tag="ask"):
    """Answered by `Answer` with the same number."""

    number: int
    what: str
    """`stats` or `state`."""


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """End what runs and leave."""


FrontendMessage = Start | Submit | Abort | Finish | Drain | Ask | Stop


# Engine -> frontend -------------------------------------------------------------------------------


class Progress(msgspec.Struct, frozen=True, tag="progress"):
    progress: WorkerProgress


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    info: EngineInfo


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """The engine cannot start; the message is for the operator."""

    message: str


class Outputs(msgspec.Struct, frozen=True, tag="outputs"):
    """All that one turn of the engine has to say."""

    outputs: list[EngineOutput]


class Rejected(msgspec.Struct, frozen=True, tag="rejected"):
    """The body that this request belongs to was not accepted."""

    request_id: str
    kind: Literal["rejected", "full", "draining", "stopped", "dead"]
    message: str
    retry_after_s: float = 0.0


class Drained(msgspec.Struct, frozen=True, tag="drained"):
    """See `Drain`."""


class Answer(msgspec.Struct, frozen=True, tag="answer"):
    number: int
    stats: EngineStats | None = None
    state: dict[str, Any] | None = None


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The engine's last word."""

    cause: str


EngineMessage = Progress | Ready | Refused | Outputs | Rejected | Drained | Answer | Failed
