"""From the walk's tentative plan to the plan of the next step: the gate says whether its prefill runs now."""

from __future__ import annotations

from .admission import Walk
from .cost_model import CostModel
from .hold_clock import HoldClock
from .limits import Limits
from .plan import Plan
from .policy import Fire, Hold, Policy
from .queues import Queues
from .waits import Boundaries


class Planner:
    """Keeps nothing between two plans."""

    def __init__(self, limits: Limits, policy: Policy, costs: CostModel, boundaries: Boundaries) -> None:
        self._limits = limits
        self._policy = policy
        self._costs = costs
        self._boundaries = boundaries

    def plan(self, queues: Queues, clock: HoldClock, now: float, *, draining: bool) -> Plan:
        plan = self._walk(queues).run()
        if self._limits.separate and plan.decodes and len(plan.preempted) > len(plan.for_priority):
            plan.drop_prefill()  # decodes that need the memory of others come first
        plan.pending_tokens = plan.prefill_tokens
        plan.pending_requests = len(plan.chunks)
        if plan.chunks:
            separate = self._limits.separate
            pending = clock.pending(
                plan,
                now,
                budget=self._limits.max_num_batched_tokens - (0 if separate else len(plan.decodes)),
                kv_usage=queues.pool.owned / queues.pool.num_blocks,
                draining=draining,
                predicted_ms=self._predicted_ms(plan),
                decode_ms=self._costs.decode_ms(plan.work.decodes, plan.work.kv_tokens),
            )
            plan.verdict = _in_time(self._policy.gate(pending), now)
            if isinstance(plan.verdict, Hold):
                plan = self._without_prefill(plan, queues)
            elif separate:
                plan.drop_decodes()
        plan.predicted_ms = self._costs.step_ms(plan.work)
        return plan

    def _predicted_ms(self, plan: Plan) -> float:
        """Of the plan, if fired."""
        if not self._limits.separate:
            return self._costs.step_ms(plan.work)
        return self._costs.base_ms(0, 0) + self._costs.tokens_ms(plan.work.prefill_tokens, plan.work.pairs)

    def _walk(self, queues: Queues) -> Walk:
        return Walk(queues, self._limits, self._policy, self._costs, self._boundaries)

    def _without_prefill(self, tentative: Plan, queues: Queues) -> Plan:
        """What runs while prefill is held: the tentative plan without its chunks and what they brought about."""
        if not tentative.for_priority:
            tentative.drop_prefill()
            return tentative
        plan = self._walk(queues).run(prefill=False)
        plan.pending_tokens, plan.pending_requests = tentative.pending_tokens, tentative.pending_requests
        plan.verdict = tentative.verdict
        plan.blocked, plan.deferred = tentative.blocked, tentative.deferred
        return plan


def _in_time(verdict: Fire | Hold, now: float) -> Fire | Hold:
    """A hold whose time has come is over, whatever the policy says to being asked again."""
    if isinstance(verdict, Hold) and verdict.until is not None and verdict.until <= now:
        return Fire("immediate" if verdict.bound == "none" else verdict.bound)
    return verdict
