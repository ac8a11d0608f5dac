"""Every event of the scheduler, schema `atom.sched/1`. Additive changes only.

An event says what was decided and why. It never carries prompt text or token ids. Times named `_ms` are
durations; `deadline` is on the engine's clock, in seconds, like `ts`.
"""

from __future__ import annotations

from typing import Literal

import msgspec

SCHEMA = "atom.sched/1"

ReleaseOutcome = Literal[
    "prefix_ready",
    "deadline",
    "producer_aborted",
    "producer_failed",
    "producer_preempted",
    "producer_waits",
    "evicted",
    "checkpoint_declined",
    "priority",
]
"""`producer_waits`: the producer itself found no memory, or waits for a prefix now."""

FireReason = Literal[
    "fill", "quiet", "max_hold", "queue_age", "partial", "kv_high", "kv_low", "no_decode", "drain", "immediate"
]

PreemptReason = Literal["memory", "priority", "step_failed"]

HoldBound = Literal["quiet", "max_hold", "queue_age", "partial", "none"]
"""The bound that ends a hold at its deadline; `none`: only an event can."""


class Event(msgspec.Struct, kw_only=True, tag_field="type", gc=False):
    """Fields that all events have; whoever publishes stamps the first four."""

    boot_id: str = ""
    seq: int = 0
    ts: float = 0.0
    wall: float = 0.0


class RequestEvent(Event, kw_only=True, gc=False):
    request_id: str


class RequestArrived(RequestEvent, tag="request.arrived", kw_only=True, gc=False):
    prompt_tokens: int
    cached_tokens: int
    """Covered by reusable blocks at this moment."""
    priority: int


class RequestRejected(RequestEvent, tag="request.rejected", kw_only=True, gc=False):
    reason: str
    message: str


class RequestParked(RequestEvent, tag="request.parked", kw_only=True, gc=False):
    producer_id: str
    boundary_tokens: int
    saved_tokens: int
    deadline: float


class RequestReleased(RequestEvent, tag="request.released", kw_only=True, gc=False):
    outcome: ReleaseOutcome
    waited_ms: float
    reused_tokens: int


class RequestBlocked(RequestEvent, tag="request.blocked", kw_only=True, gc=False):
    """Ready, but its KV does not fit beside what runs. Others may pass until `reserved_at`."""

    needed_blocks: int
    available_blocks: int
    reserved_at: float


class RequestReserved(RequestEvent, tag="request.reserved", kw_only=True, gc=False):
    """It was passed for as long as allowed: memory that frees is kept for it from now on."""

    needed_blocks: int
    blocked_ms: float


class RequestAdmitted(RequestEvent, tag="request.admitted", kw_only=True, gc=False):
    cached_tokens: int
    uncached_tokens: int
    queue_ms: float
    """Since it arrived, or since it was preempted."""


class RequestFirstToken(RequestEvent, tag="request.first_token", kw_only=True, gc=False):
    ttft_ms: float


class RequestPreempted(RequestEvent, tag="request.preempted", kw_only=True, gc=False):
    reason: PreemptReason
    freed_blocks: int


class RequestFinished(RequestEvent, tag="request.finished", kw_only=True, gc=False):
    finish_reason: str
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    ttft_ms: float | None
    """None: it ended without a token."""
    e2e_ms: float


class RequestAborted(RequestEvent, tag="request.aborted", kw_only=True, gc=False):
    state: str
    reason: str


class RequestFailed(RequestEvent, tag="request.failed", kw_only=True, gc=False):
    state: str
    reason: str


class PrefixReady(Event, tag="prefix.ready", kw_only=True, gc=False):
    producer_id: str
    boundary_tokens: int
    released: int


class PrefillHeld(Event, tag="prefill.held", kw_only=True, gc=False):
    pending_tokens: int
    requests: int
    deadline: float | None
    bound: HoldBound


class PrefillFired(Event, tag="prefill.fired", kw_only=True, gc=False):
    reason: FireReason
    step_id: int
    pending_tokens: int
    admitted_tokens: int
    requests: int
    held_ms: float


class ProtectionStarted(Event, tag="protection.started", kw_only=True, gc=False):
    steps_left: int


class ProtectionEnded(Event, tag="protection.ended", kw_only=True, gc=False):
    by: str
    """`steps` when all protected steps have run, else the reason of the prefill that ended it."""


class StepSubmitted(Event, tag="step.submitted", kw_only=True, gc=False):
    step_id: int
    prefill_tokens: int
    prefill_requests: int
    chunks: list[tuple[str, int, int]]
    """Request id, start, length."""
    decode_requests: int
    kv_blocks_used: int
    kv_blocks_total: int
    predicted_ms: float
    plan_us: float = 0.0


class StepCompleted(Event, tag="step.completed", kw_only=True, gc=False):
    step_id: int
    elapsed_ms: float
    tokens_out: int
