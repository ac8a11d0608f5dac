"""What a completed step, or time, means for one request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from atom_async.wire.messages import SequenceLogprobs

from .request import Request

Finish = Literal["stop", "length", "error"]
ErrorKind = Literal["", "worker", "deadline"]


@dataclass(slots=True)
class Outcome:
    request: Request
    token_id: int | None
    """None when the request ends without a further token."""
    finish: Finish | None = None
    stop_token_id: int | None = None
    error: str = ""
    error_kind: ErrorKind = ""
    logprobs: SequenceLogprobs | None = None
    prompt_logprobs: list[SequenceLogprobs] | None = None
    """All parts, in prompt order, with the first token of a request that asked for them."""
