"""The one interface to an engine, in tokens: in this process (`LocalEngine`) or in its own (`RemoteEngine`).

Text (tokenizer, templates, stop strings, detokenizing) stays on the client's side of it.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Any, Literal, Protocol

import msgspec

from atom_async.wire.sampling import SamplingParams

FinishReason = Literal["stop", "length", "abort", "error"]


class EngineRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One sequence to generate. `n` choices are n requests with one prompt."""

    request_id: str
    prompt_token_ids: bytes
    """int32, little-endian (`wire.messages.pack_ints`)."""
    sampling: SamplingParams
    block_hashes: bytes = b""
    """16 bytes per full prompt block: the hash chain, computed once on the client's side
    (`cache.hashing.hash_chain`), so that a long prompt never delays a step. Filled in by the client
    implementation's `generate_all`; callers leave it empty."""
    cache_salt: str = ""
    priority: int = 0
    """Lower runs first, as in vLLM."""
    deadline_ms: float | None = None
    """From submission: a body of which nothing has been started by then fails with error_kind `deadline`."""


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True, gc=False):
    token_id: int
    logprob: float
    rank: int
    top: list[tuple[int, float]]
    """Most likely tokens at this position, most likely first."""


class RequestTimings(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Seconds, measured by the engine."""

    queue_s: float
    """Arrival to first admission."""
    prefill_s: float
    """First admission to first token."""
    decode_s: float
    """First token to last."""


class EngineOutput(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """New tokens of one request. The last one has finish_reason; after it the stream ends."""

    request_id: str
    token_ids: list[int] = []
    logprobs: list[TokenLogprob] | None = None
    """One per token id when asked for."""
    prompt_logprobs: list[TokenLogprob | None] | None = None
    """Whole prompt, first entry None; comes once, with the first token (or the end), when asked for."""
    cached_tokens: int = 0
    """Prompt tokens whose KV was reused at first admission."""
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    """The id that ended the output when finish_reason is `stop` (it is the last of token_ids)."""
    error: str = ""
    """Why, when finish_reason is `error` or `abort`."""
    error_kind: Literal["", "worker", "deadline"] = ""
    """With finish_reason `error`: the workers could not go on with it, or its deadline passed in the queue."""
    timings: RequestTimings | None = None
    """With the last output."""


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Facts fixed at start."""

    boot_id: str
    max_model_len: int
    block_size: int
    num_kv_blocks: int
    vocab_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    device_name: str
    attention_backend: str
    dtype: str
    tp_size: int
    worker_pids: tuple[int, ...] = ()
    engine_pid: int = 0


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """Gauges and running totals at one moment."""

    waiting: int = 0
    """Queued: ready, parked or blocked."""
    parked: int = 0
    """Waiting for a prefix that another request computes."""
    blocked: int = 0
    """Waiting for memory."""
    queued_tokens: int = 0
    """Prompt tokens to compute, of all that wait."""
    running: int = 0
    kv_blocks_used: int = 0
    """Held by live requests."""
    kv_blocks_cached: int = 0
    """Committed, unreferenced, reusable."""
    kv_blocks_total: int = 0
    steps: int = 0
    prompt_tokens: int = 0
    """Admitted prompt tokens, cached ones included."""
    prompt_tokens_computed: int = 0
    generation_tokens: int = 0
    prefix_cache_queries: int = 0
    """Prompt tokens looked up."""
    prefix_cache_hits: int = 0
    """Prompt tokens found."""
    preemptions: int = 0
    aborted: int = 0
    expired: int = 0
    """Failed because their deadline passed in the queue."""
    prefix_waits: int = 0
    """Times that a request was parked behind another's prefix."""
    prefix_wait_outcomes: dict[str, int] = {}
    """How they ended: see the outcomes of `request.released`."""
    prefix_waits_declined: dict[str, int] = {}
    """Times that a request computed what another one was computing already, by reason."""
    prefill_holds: int = 0
    prefill_fires: dict[str, int] = {}
    """Prefill-carrying steps by what let them go."""
    prediction_error: float = 0.0
    """Running mean of |predicted - measured| / measured step time."""
    steps_in_flight: int = 0
    step_age_s: float = 0.0
    """How long the oldest step in flight has been running: since it was submitted or the step before it
    ended, whichever came later. 0 when nothing is in flight."""
    draining: bool = False


class EngineError(Exception):
    """Something on the engine's side ended a request."""


class EngineDead(EngineError):
    """The engine or a worker of it is gone; the message names which and why."""


class EngineStopped(EngineDead):
    """It was stopped in order, before the request had ended."""

    def __init__(self, message: str = "the engine was stopped") -> None:
        super().__init__(message)


class EngineDraining(EngineError):
    """The engine takes no new requests."""


class QueueFull(EngineError):
    """Too much waits already. `retry_after_s`: when what waits now is predicted to have been computed."""

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class RequestRejected(EngineError):
    """The request can never run (too long for the model or for all of KV), or its id is in use."""


class EngineClient(Protocol):
    """What the API, the CLI and embedders use."""

    info: EngineInfo

    def generate(self, request: EngineRequest) -> AsyncGenerator[EngineOutput, None]:
        """`generate_all` of one request, an output at a time."""
        ...

    def generate_all(self, body: Sequence[EngineRequest]) -> AsyncGenerator[list[EngineOutput], None]:
        """All sequences of one client's request, taken or refused together, and under one deadline.

        Submits at the first `anext`. Yields what has come since the last time, one output a sequence, and ends when
        each has had one with a finish_reason; closing the generator early (`contextlib.aclosing`) aborts the rest.

        Raises RequestRejected, QueueFull, EngineDraining, or EngineDead (also in mid-stream; EngineStopped after
        `stop`).
        """
        ...

    def abort(self, request_id: str, *, reason: str = "aborted by the client") -> None:
        """Idempotent. The request's stream ends with finish_reason `abort`."""
        ...

    def finish(self, request_id: str) -> None:
        """The client has what it wants (a stop string was found): free the request's memory without
        calling it aborted. Idempotent. Its stream ends with finish_reason `stop`; tokens that were in
        flight may still come before that and mean nothing."""
        ...

    async def stats(self) -> EngineStats:
        """Raises EngineError when dead, or when it does not answer within seconds."""
        ...

    async def state(self) -> dict[str, Any]:
        """For people: queue, running requests, pool, steps in flight. Raises as `stats`."""
        ...

    @property
    def failure(self) -> str | None:
        """None while alive; afterwards the cause."""
        ...

    async def wait_failed(self) -> str:
        """Returns the cause once the engine has failed."""
        ...

    async def drain(self) -> None:
        """Refuses new requests and returns when the running ones have ended."""
        ...
