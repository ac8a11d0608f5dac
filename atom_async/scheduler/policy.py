"""What can be decided in more than one way: the order of prefills, when they run, how much of them a step holds.

`Policy` is the interface and `DefaultPolicy` our implementation; `--policy package:Class` loads another one. A
policy gets facts and returns a decision: it changes nothing, asks no clock, and is called with the same facts
again when a plan is thrown away.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from atom_async.config import EngineConfig
from atom_async.events.schema import FireReason, HoldBound

from .cost_model import CostModel, StepWork


@dataclass(frozen=True, slots=True)
class Prefill:
    """A prompt that wants to be computed."""

    arrived_at: float
    uncached: int
    """Tokens to compute, from `start` on."""
    start: int


@dataclass(frozen=True, slots=True)
class Pending:
    """What the tentative plan would compute of prompts, and since when it has been held back."""

    now: float
    tokens: int
    """Prompt tokens of the plan. The fill signal: exactly what will run if it is fired."""
    requests: int
    budget: int
    """Most prompt tokens that the token budget allowed."""
    full: bool
    """The step can take no more, for tokens or for time."""
    decoding: int
    """Sequences that wait for their next token and can have one."""
    kv_usage: float
    """Share of blocks that live requests hold, 0 to 1."""
    oldest_arrival: float
    held_since: float | None
    """When this hold began; None: nothing is held yet."""
    grown_at: float
    """When `tokens` last grew in this hold."""
    partial_held_s: float | None
    """Longest time that a half-done prefill of the plan was held back, all its holds before this one together;
    None: there is no half-done one."""
    decode_steps: int
    """Decode-only steps since the last prefill-carrying one."""
    draining: bool
    predicted_ms: float
    """Of the plan's step, if fired."""
    decode_ms: float
    """Predicted, of a step with the plan's decodes alone."""
    ms_since_decode: float
    """Predicted, of the steps without decodes submitted since the last one with; 0 if there was none."""


@dataclass(frozen=True, slots=True)
class Fire:
    reason: FireReason


@dataclass(frozen=True, slots=True)
class Hold:
    until: float | None
    """When this must be asked again even if nothing happens; None: only an event can change it."""
    bound: HoldBound
    """Which bound `until` is."""


@dataclass(frozen=True, slots=True)
class StepBound:
    """How long a prefill-carrying step may take, in predicted milliseconds."""

    finishing_ms: float
    """With a chunk that completes its prompt."""
    unfinished_ms: float
    """With one that does not."""
    least_tokens: int
    """The first chunk of a step gets this many tokens however long they take: nothing starves."""


class Policy(Protocol):
    """`Class(config, costs)` makes one. Every method is pure."""

    def order(self, prefill: Prefill) -> float:
        """Smaller goes first among requests of one priority. Asked once, when a request is queued, and again
        for every further chunk."""
        ...

    def gate(self, pending: Pending) -> Fire | Hold:
        """Whether the plan's prefill runs now. Asked only when pending.tokens > 0."""
        ...

    def bound(self, work: StepWork, backlog_tokens: int) -> StepBound | None:
        """For a step with these decodes and no prompt tokens yet, while `backlog_tokens` of prompts are begun or
        queued; None: the token budget alone bounds it."""
        ...


Bound = Literal["quiet", "max_hold", "queue_age", "partial"]


class DefaultPolicy:
    """See `EngineConfig` for the settings."""

    def __init__(self, config: EngineConfig, costs: CostModel) -> None:
        self._config = config
        self._costs = costs
        self.coalescing = config.coalesce_target_fill > 0
        self.protecting = config.prefill_decode_interval > 0
        self.separate = config.step_policy == "separate"
        self._gap_s = None if config.max_decode_gap_ms is None else config.max_decode_gap_ms / 1e3

    def order(self, prefill: Prefill) -> float:
        """A time: arrival, plus so many times the predicted time of its own prefill. A later and smaller one
        passes until then and not longer, so nothing starves and everyone waits in proportion to its size."""
        if self._config.queue_policy == "fcfs":
            return 0.0
        own_ms = self._costs.chunk_ms(prefill.start, prefill.uncached)
        return prefill.arrived_at + self._config.overtake_factor * own_ms / 1e3

    def gate(self, pending: Pending) -> Fire | Hold:
        if self._gap_is_used_up(pending):
            return Hold(None, "none")
        if not self.coalescing and not self.protecting:
            return Fire("immediate")
        if (reason := self._without_hold(pending)) is not None:
            return Fire(reason)
        protected = self.protecting and pending.decode_steps < self._config.prefill_decode_interval
        if not protected:
            if not self.coalescing:
                return Fire("immediate")
            if pending.full or pending.tokens >= self._config.coalesce_target_fill * pending.budget:
                return Fire("fill")
        when, bound = min(self._deadlines(pending, protected=protected))
        return Fire(bound) if when <= pending.now else Hold(when, bound)

    def _gap_is_used_up(self, pending: Pending) -> bool:
        """With separate steps, prefill in a row may keep decodes waiting only so long; then one of theirs runs.
        The step after a decode step is free, so that both sides get on."""
        if self._gap_s is None or not self.separate or not pending.decoding or pending.ms_since_decode == 0:
            return False
        return pending.ms_since_decode + pending.predicted_ms + pending.decode_ms > self._gap_s * 1e3

    def _without_hold(self, pending: Pending) -> FireReason | None:
        """Reasons why holding back would help nobody."""
        if pending.draining:
            return "drain"
        if not pending.decoding:
            return "no_decode"
        if pending.kv_usage >= self._config.kv_high_watermark:
            return "kv_high"
        if pending.kv_usage < self._config.kv_low_watermark:
            return "kv_low"
        return None

    def _deadlines(self, pending: Pending, *, protected: bool) -> list[tuple[float, Bound]]:
        """When each bound ends the hold. Quiet is no bound: it does not end protection."""
        config = self._config
        since = pending.now if pending.held_since is None else pending.held_since
        deadlines: list[tuple[float, Bound]] = [
            (pending.oldest_arrival + config.prefill_max_queue_ms / 1e3, "queue_age"),
            (since + config.coalesce_max_hold_ms / 1e3, "max_hold"),
        ]
        if pending.partial_held_s is not None:
            left_s = config.partial_max_hold_ms / 1e3 - pending.partial_held_s
            deadlines.append((since + left_s, "partial"))
        if self.coalescing and not protected:
            grown_at = pending.now if pending.held_since is None else pending.grown_at
            deadlines.append((grown_at + config.coalesce_quiet_ms / 1e3, "quiet"))
        return deadlines

    def bound(self, work: StepWork, backlog_tokens: int) -> StepBound | None:
        config, costs = self._config, self._costs
        least = max(config.block_size, config.max_num_batched_tokens // 32)
        if not work.decodes:
            return None
        if self.separate:
            if self._gap_s is None:
                return None
            room = self._gap_s * 1e3 - costs.decode_ms(work.decodes, work.kv_tokens)
            return StepBound(room, room, least)
        target = config.itl_target_ms
        if target == "off":
            bound = None
        elif target == "auto":
            bound = self._auto_bound(work, backlog_tokens, least)
        else:
            bound = StepBound(float(target), float(target), least)
        if self._gap_s is None:
            return bound
        gap_ms = self._gap_s * 1e3
        if bound is None:
            return StepBound(gap_ms, gap_ms, least)
        return StepBound(min(bound.finishing_ms, gap_ms), min(bound.unfinished_ms, gap_ms), least)

    def _auto_bound(self, work: StepWork, backlog_tokens: int, least: int) -> StepBound:
        """From the fit. A chunk may stretch a step by a multiple of a decode-only step, the larger the more
        prefill waits, so that it gets the share of time it needs to clear within HORIZON_MS; or by a multiple of
        what a prefill costs before its first token, if that is more: the larger that fixed cost, the fewer and
        larger the chunks must be to pay for it. A chunk that ends its prompt may stretch it further."""
        decode_ms = self._costs.decode_ms(work.decodes, work.kv_tokens)
        base_ms = self._costs.base_ms(work.decodes, work.kv_tokens)
        fixed_ms = max(base_ms - decode_ms, 0.0)
        share = min(self._costs.tokens_ms(backlog_tokens, 0.0) / HORIZON_MS, MOST_SHARE)
        stretch = max(LEAST_STRETCH, 1 / (1 - share))
        unfinished_ms = max(stretch * decode_ms, base_ms + PAYING * fixed_ms)
        return StepBound(max(FINISHING_STRETCH * decode_ms, unfinished_ms), unfinished_ms, least)


HORIZON_MS = 2000.0
MOST_SHARE = 0.875
LEAST_STRETCH = 3.0
FINISHING_STRETCH = 12.0
PAYING = 8.0
"""Of the automatic step bound; docs/decisions/0009 has the measurements they come from."""
