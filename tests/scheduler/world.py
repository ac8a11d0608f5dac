"""A scheduler driving the checking simulated model, step by step, without an event loop."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from atom_async.cache.hashing import hash_chain, root_hash, split_chain
from atom_async.config import EngineConfig
from atom_async.engine.door import sampling_bytes
from atom_async.events.schema import Event, ReleaseOutcome
from atom_async.scheduler.invariants import check, checked_step
from atom_async.scheduler.outcome import Outcome
from atom_async.scheduler.request import Request
from atom_async.scheduler.setup import make_scheduler
from atom_async.scheduler.waits import Boundaries
from atom_async.wire.messages import StepPlan, StepResult
from atom_async.wire.sampling import SamplingParams
from atom_async.wire.simulation import SimulatedModel, SimulationOptions, expected_tokens

E = TypeVar("E", bound=Event)


class World:
    """Every change is followed by a check of all invariants; every token is checked against the oracle.

    `settings` are fields of EngineConfig; `events` keeps all that the scheduler said.
    """

    def __init__(
        self,
        *,
        blocks: int,
        block_size: int = 4,
        max_num_seqs: int = 8,
        budget: int = 16,
        max_model_len: int | None = None,
        prefix_caching: bool = True,
        max_plan_bytes: int = 1 << 20,
        end_token_probability: float = 0.0,
        boundaries: Boundaries | None = None,
        step_s: float = 1.0,
        **settings: Any,
    ) -> None:
        self.options = SimulationOptions(vocab_size=1000, end_token_probability=end_token_probability)
        self.config = EngineConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            block_size=block_size,
            enable_prefix_caching=prefix_caching,
            **{"itl_target_ms": "off"} | settings,
        )
        self.max_model_len = max_model_len or blocks * block_size
        self.events: list[Event] = []
        self.scheduler = make_scheduler(
            self.config,
            num_blocks=blocks,
            max_plan_bytes=max_plan_bytes,
            max_model_len=self.max_model_len if not self.config.enable_chunked_prefill else 0,
            boundaries=boundaries,
            emit=self.events.append,
        )
        self.limits = self.scheduler.limits
        self.model = SimulatedModel(self.options, block_size=block_size, max_num_seqs=max_num_seqs, num_blocks=blocks)
        self.results: deque[StepResult] = deque()
        self.plans: list[StepPlan] = []
        self.outcomes: dict[str, list[Outcome]] = {}
        self.prompts: dict[str, list[int]] = {}
        self.step_s = step_s
        self.now = 0.0

    def add(
        self,
        request_id: str,
        prompt: list[int],
        max_tokens: int = 4,
        *,
        priority: int = 0,
        salt: str = "",
        deadline_s: float | None = None,
        sampling: SamplingParams | None = None,
    ) -> Request:
        sampling = sampling or SamplingParams(max_tokens=max_tokens, temperature=0.0)
        tokens = array("i", prompt)
        chain = hash_chain(tokens.tobytes(), self.limits.block_size, salt)
        request = Request(
            request_id=request_id,
            tokens=tokens,
            prompt_len=len(prompt),
            sampling=sampling,
            end_token_ids=frozenset(sampling.end_token_ids),
            chain=split_chain(chain) if self.limits.prefix_caching else [],
            root=root_hash(salt),
            max_total_len=min(len(prompt) + sampling.max_tokens, self.max_model_len),
            priority=priority,
            arrival_rank=self.scheduler.next_rank(),
            arrived_at=self.now,
            deadline=None if deadline_s is None else self.now + deadline_s,
            sampling_bytes=sampling_bytes(sampling),
        )
        self.prompts[request_id] = prompt
        self.outcomes[request_id] = []
        self.scheduler.add(request, self.now)
        check(self.scheduler)
        return request

    def submit(self) -> StepPlan | None:
        """Plans and submits one step, if there is one."""
        self.expire()
        message = checked_step(self.scheduler, self.now)
        if message is None:
            return None
        assert len(msgspec.msgpack.encode(message)) <= self.limits.max_plan_bytes, "a plan outgrew its message"
        self.plans.append(message)
        self.results.append(self.model.apply(message))
        return message

    def expire(self) -> list[Outcome]:
        """Does what time demands."""
        outcomes = self.scheduler.expire(self.now)
        for outcome in outcomes:
            self.outcomes[outcome.request.request_id].append(outcome)
        check(self.scheduler)
        return outcomes

    def wait(self) -> None:
        """Lets time pass until the next deadline."""
        when = self.scheduler.next_alarm()
        assert when is not None, "nothing runs, nothing can be planned, and no time changes that: stuck"
        self.now = max(self.now, when)

    def complete(self) -> list[Outcome]:
        """Takes the oldest result."""
        self.now += self.step_s
        outcomes = self.scheduler.complete(self.results.popleft(), self.now)
        for outcome in outcomes:
            self.outcomes[outcome.request.request_id].append(outcome)
            self.check_tokens(outcome.request)
        check(self.scheduler)
        return outcomes

    def abort(self, request_id: str) -> None:
        self.scheduler.abort(request_id, self.now)
        self.expire()
        check(self.scheduler)

    def withdraw(self, producer: Request, outcome: ReleaseOutcome) -> None:
        """The model takes back what it promised."""
        self.scheduler.withdraw(producer.request_id, outcome, self.now)
        check(self.scheduler)

    def lose_steps(self) -> None:
        """The workers die with the steps in flight and come back with the KV of all older ones."""
        self.scheduler.lose_steps(self.now)
        self.results.clear()
        check(self.scheduler)

    def run(self, *, depth: int = 2, most_steps: int = 10_000) -> int:
        """Until nothing is left; returns the number of steps."""
        for step in range(most_steps):
            while len(self.results) < depth and self.submit():
                pass
            if self.results:
                self.complete()
            elif self.scheduler.requests:
                self.wait()
            else:
                return step
        raise AssertionError("did not come to an end")

    def run_until(self, happened: Callable[[], bool], *, most_steps: int = 500) -> None:
        """One step at a time."""
        for _ in range(most_steps):
            if happened():
                return
            if self.submit() is None and not self.results:
                self.wait()
            if self.results:
                self.complete()
        raise AssertionError("it did not happen")

    def check_tokens(self, request: Request) -> None:
        """What was sampled is what this prompt alone would have given."""
        output = list(request.tokens[request.prompt_len :])
        expected = expected_tokens(self.prompts[request.request_id], request.sampling, len(output), self.options)
        assert output == expected, f"{request.request_id}: {output} instead of {expected}"

    def output(self, request_id: str) -> list[int]:
        return [o.token_id for o in self.outcomes[request_id] if o.token_id is not None]

    def named(self, kind: type[E]) -> list[E]:
        """The events of one type so far."""
        return [event for event in self.events if isinstance(event, kind)]

    @property
    def computed(self) -> int:
        return self.scheduler.counters.prompt_tokens_computed
