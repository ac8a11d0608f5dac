"""Since when prefill is held back, and how much decoding happened since it last ran.

The clocks that the policy's gate reads. They change only when a plan is executed, never when one is made.
"""

from __future__ import annotations

from collections.abc import Callable

from atom_async.events.schema import Event, PrefillFired, PrefillHeld, ProtectionEnded, ProtectionStarted

from .counters import Counters
from .plan import Plan
from .policy import Fire, Hold, Pending

LONG_AGO = 1 << 30


class HoldClock:
    """`interval`: decode-only steps that follow a prefill-carrying one, for the events that say so."""

    def __init__(self, *, interval: int, counters: Counters, emit: Callable[[Event], None]) -> None:
        self._interval = interval
        self._counters = counters
        self._emit = emit
        self.held_since: float | None = None
        self.until: float | None = None
        """When the gate must be asked again, while something is held."""
        self._tokens = 0
        self._grown_at = 0.0
        self._decode_steps = LONG_AGO
        self._ms_since_decode = 0.0

    def pending(
        self,
        plan: Plan,
        now: float,
        *,
        budget: int,
        kv_usage: float,
        draining: bool,
        predicted_ms: float,
        decode_ms: float,
    ) -> Pending:
        """The facts for the gate."""
        begun = [chunk.request.held_s for chunk in plan.chunks if chunk.reuse is None]
        grows = plan.pending_tokens > self._tokens
        return Pending(
            now=now,
            tokens=plan.pending_tokens,
            requests=plan.pending_requests,
            budget=budget,
            full=plan.full,
            decoding=len(plan.decodes),
            kv_usage=kv_usage,
            oldest_arrival=min(chunk.request.arrived_at for chunk in plan.chunks),
            held_since=self.held_since,
            grown_at=now if grows else self._grown_at,
            partial_held_s=max(begun, default=None),
            decode_steps=self._decode_steps,
            draining=draining,
            predicted_ms=predicted_ms,
            decode_ms=decode_ms,
            ms_since_decode=self._ms_since_decode,
        )

    def note(self, plan: Plan, now: float) -> None:
        """The verdict of a plan that is being executed, before its step is."""
        if isinstance(plan.verdict, Hold):
            self._hold(plan, plan.verdict, now)
        elif plan.verdict is None:  # nothing to hold, or no room for it: the next hold starts anew
            self._reset()

    def _hold(self, plan: Plan, verdict: Hold, now: float) -> None:
        if self.held_since is None:
            self.held_since = now
            self._tokens = 0
            self._counters.holds += 1
            self._emit(
                PrefillHeld(
                    pending_tokens=plan.pending_tokens,
                    requests=plan.pending_requests,
                    deadline=verdict.until,
                    bound=verdict.bound,
                )
            )
        if plan.pending_tokens > self._tokens:
            self._grown_at = now
        self._tokens = plan.pending_tokens
        self.until = verdict.until

    def stepped(self, plan: Plan, step_id: int, now: float) -> None:
        """The plan's step was submitted."""
        if isinstance(plan.verdict, Fire):
            self._fire(plan, plan.verdict, step_id, now)
        elif plan.decodes:
            self._decode_steps += 1
            if self._decode_steps == self._interval:
                self._emit(ProtectionEnded(by="steps"))
        self._ms_since_decode = 0.0 if plan.decodes else self._ms_since_decode + plan.predicted_ms

    def _fire(self, plan: Plan, verdict: Fire, step_id: int, now: float) -> None:
        held_s = 0.0 if self.held_since is None else now - self.held_since
        self._counters.fires[verdict.reason] += 1
        self._emit(
            PrefillFired(
                reason=verdict.reason,
                step_id=step_id,
                pending_tokens=plan.pending_tokens,
                admitted_tokens=plan.prefill_tokens,
                requests=plan.pending_requests,
                held_ms=held_s * 1e3,
            )
        )
        for chunk in plan.chunks:
            if chunk.reuse is None:
                chunk.request.held_s += held_s
        if self._decode_steps < self._interval:
            self._emit(ProtectionEnded(by=verdict.reason))
        self._decode_steps = 0
        if self._interval:
            self._emit(ProtectionStarted(steps_left=self._interval))
        self._reset()

    def _reset(self) -> None:
        self.held_since = None
        self.until = None
        self._tokens = 0
