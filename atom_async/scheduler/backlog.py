"""What waits, and for how long it probably will: for those at the door."""

from __future__ import annotations

from .core import Scheduler

LEAST_S = 1.0


def num_waiting(scheduler: Scheduler, more: int = 0) -> int:
    """Queued requests that cannot start as things are: memory keeps them out, or they are more than slots are free.
    `more`: as if so many had come just now."""
    no_memory = len(scheduler.intake.blocked) + len(scheduler.intake.reserved)
    return no_memory + max(scheduler.num_queued - no_memory + more - len(scheduler.free_slots), 0)


def backlog_s(scheduler: Scheduler, now: float) -> float:
    """Predicted seconds until what is queued now has been started and its prompts computed; at least one.

    Slots come free as running requests end: by Little's law one every mean stay / number running.
    """
    running = scheduler.running
    oldest_s = now - running[0].admitted_at if running else 0.0
    stay_s = scheduler.counters.mean_stay_s or oldest_s
    freeing_s = num_waiting(scheduler) * stay_s / max(len(running), 1)
    computing_s = scheduler.costs.tokens_ms(scheduler.intake.queued_tokens, 0.0) / 1e3
    return max(computing_s, freeing_s, LEAST_S)
