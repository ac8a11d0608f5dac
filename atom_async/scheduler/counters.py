"""Running totals of the scheduler, in tokens unless the name says otherwise."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True)
class Counters:
    steps: int = 0
    prefill_steps: int = 0
    prompt_tokens: int = 0
    prompt_tokens_computed: int = 0
    generation_tokens: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    preemptions: int = 0
    aborted_requests: int = 0
    expired_requests: int = 0
    blocked: int = 0
    """Times that a request was found not to fit into memory."""
    reserved: int = 0
    """Times that memory was reserved for a request that had been passed for too long."""
    parked: int = 0
    releases: Counter[str] = field(default_factory=Counter)
    """By outcome."""
    declined_waits: Counter[str] = field(default_factory=Counter)
    """Times that a request computed what another one was computing already, by reason."""
    holds: int = 0
    fires: Counter[str] = field(default_factory=Counter)
    """By reason."""
    mean_stay_s: float = 0.0
    """Exponentially weighted, from first admission to the end; 0: nobody has ended yet."""

    def stayed(self, seconds: float) -> None:
        self.mean_stay_s += (seconds - self.mean_stay_s) / 8 if self.mean_stay_s else seconds
