"""From what the scheduler says of a request to what its client is told."""

from __future__ import annotations

from typing import Any

from atom_async.scheduler.outcome import Outcome
from atom_async.scheduler.request import Request
from atom_async.wire.messages import SequenceLogprobs

from .client import EngineOutput, FinishReason, RequestTimings, TokenLogprob


def output_of(outcome: Outcome) -> EngineOutput:
    """One step's news for one client."""
    request = outcome.request
    return EngineOutput(
        request_id=request.request_id,
        token_ids=[] if outcome.token_id is None else [outcome.token_id],
        logprobs=None if outcome.logprobs is None else list(_positions(outcome.logprobs)),
        prompt_logprobs=_whole_prompt(outcome.prompt_logprobs),
        cached_tokens=request.cached_tokens,
        finish_reason=outcome.finish,
        stop_token_id=outcome.stop_token_id,
        error=outcome.error,
        error_kind=outcome.error_kind,
        timings=None if outcome.finish is None else _timings(request),
    )


def end_output(request: Request, reason: FinishReason, error: str) -> EngineOutput:
    """The last word to a client whose request was ended from outside."""
    return EngineOutput(
        request_id=request.request_id,
        cached_tokens=request.cached_tokens,
        finish_reason=reason,
        error=error,
        timings=_timings(request),
    )


def too_large(output: EngineOutput, why: Exception) -> EngineOutput:
    """Instead of an output that no message can carry."""
    return EngineOutput(request_id=output.request_id, finish_reason="error", error=f"the output is too large: {why}")


def _positions(part: SequenceLogprobs) -> list[TokenLogprob]:
    return [
        TokenLogprob(token, logprob, rank, list(zip(top, values, strict=True)))
        for token, logprob, rank, top, values in zip(
            part.ids, part.logprobs, part.ranks, part.top_ids, part.top_logprobs, strict=True
        )
    ]


def _whole_prompt(parts: list[SequenceLogprobs] | None) -> list[TokenLogprob | None] | None:
    """The first prompt token has nothing before it, hence no probability."""
    if parts is None:
        return None
    whole: list[TokenLogprob | None] = [None]
    for part in parts:
        whole += _positions(part)
    return whole


def _timings(request: Request) -> RequestTimings:
    """A stage that the request did not reach took 0 s."""
    admitted, first, last = request.admitted_at, request.first_token_at, request.last_token_at
    return RequestTimings(
        queue_s=admitted - request.arrived_at if admitted >= 0 else 0.0,
        prefill_s=first - admitted if first >= 0 else 0.0,
        decode_s=last - first if first >= 0 else 0.0,
    )


def describe(request: Request, now: float) -> dict[str, Any]:
    """For people. Never prompt text or token ids."""
    return {
        "request_id": request.request_id,
        "state": request.state.value,
        "waits_for": request.wait.producer.request_id if request.wait is not None else None,
        "priority": request.priority,
        "age_s": now - request.arrived_at,
        "prompt_tokens": request.prompt_len,
        "cached_tokens": request.cached_tokens,
        "computed_tokens": request.computed,
        "completion_tokens": request.output_len,
        "kv_blocks": len(request.blocks),
        "preemptions": request.preemptions,
    }
