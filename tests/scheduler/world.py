"""A scheduler driving the checking simulated model, step by step, without an event loop."""

from __future__ import annotations

from array import array
from collections import deque

import msgspec

from atom_async.cache.hashing import hash_chain, root_hash, split_chain
from atom_async.cache.pool import BlockPool
from atom_async.engine.local import sampling_bytes
from atom_async.scheduler.admission import Limits
from atom_async.scheduler.core import Scheduler
from atom_async.scheduler.invariants import check, check_realised
from atom_async.scheduler.outcome import Outcome
from atom_async.scheduler.request import Request
from atom_async.wire.messages import StepPlan, StepResult
from atom_async.wire.sampling import SamplingParams
from atom_async.wire.simulation import SimulatedModel, SimulationOptions, expected_tokens


class World:
    """Every change is followed by a check of all invariants; every token is checked against the oracle."""

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
    ) -> None:
        self.options = SimulationOptions(vocab_size=1000, end_token_probability=end_token_probability)
        self.limits = Limits(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            max_plan_bytes=max_plan_bytes,
            block_size=block_size,
            prefix_caching=prefix_caching,
        )
        self.max_model_len = max_model_len or blocks * block_size
        self.scheduler = Scheduler(pool=BlockPool(blocks), limits=self.limits)
        self.model = SimulatedModel(self.options, block_size=block_size, max_num_seqs=max_num_seqs, num_blocks=blocks)
        self.results: deque[StepResult] = deque()
        self.plans: list[StepPlan] = []
        self.outcomes: dict[str, list[Outcome]] = {}
        self.prompts: dict[str, list[int]] = {}
        self.now = 0.0

    def add(
        self,
        request_id: str,
        prompt: list[int],
        max_tokens: int = 4,
        *,
        priority: int = 0,
        salt: str = "",
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
            sampling_bytes=sampling_bytes(sampling),
        )
        self.prompts[request_id] = prompt
        self.outcomes[request_id] = []
        self.scheduler.add(request)
        check(self.scheduler)
        return request

    def submit(self) -> StepPlan | None:
        """Plans and submits one step, if there is one."""
        plan = self.scheduler.plan()
        if not plan:
            return None
        tokens, running = self.scheduler.counters.prompt_tokens_computed, len(self.scheduler.running)
        message = self.scheduler.commit(plan, self.now)
        check_realised(plan, self.scheduler, tokens, running)
        check(self.scheduler)
        assert len(msgspec.msgpack.encode(message)) <= self.limits.max_plan_bytes, "a plan outgrew its message"
        self.plans.append(message)
        self.results.append(self.model.apply(message))
        return message

    def complete(self) -> list[Outcome]:
        """Takes the oldest result."""
        self.now += 1.0
        outcomes = self.scheduler.complete(self.results.popleft(), self.now)
        for outcome in outcomes:
            self.outcomes[outcome.request.request_id].append(outcome)
            self.check_tokens(outcome.request)
        check(self.scheduler)
        return outcomes

    def abort(self, request_id: str) -> None:
        self.scheduler.abort(request_id)
        check(self.scheduler)

    def run(self, *, depth: int = 2, most_steps: int = 10_000) -> int:
        """Until nothing is left; returns the number of steps."""
        for step in range(most_steps):
            while len(self.results) < depth and self.submit():
                pass
            if not self.results:
                assert not self.scheduler.requests, "nothing runs and nothing can be planned: stuck"
                return step
            self.complete()
        raise AssertionError("did not come to an end")

    def check_tokens(self, request: Request) -> None:
        """What was sampled is what this prompt alone would have given."""
        output = list(request.tokens[request.prompt_len :])
        expected = expected_tokens(self.prompts[request.request_id], request.sampling, len(output), self.options)
        assert output == expected, f"{request.request_id}: {output} instead of {expected}"

    def output(self, request_id: str) -> list[int]:
        return [o.token_id for o in self.outcomes[request_id] if o.token_id is not None]

    @property
    def computed(self) -> int:
        return self.scheduler.counters.prompt_tokens_computed
