"""Random lives: arrivals, aborts, steps in flight, shared prefixes and a cache that is too small.

After every rule the ledger, the ranks, predicted == realised and every token are checked (see `World`).
"""

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from world import World

from atom_async.wire.sampling import SamplingParams

PREFIXES = [list(range(n, n + 23)) for n in (0, 100, 200)]


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(
        blocks=st.integers(6, 24),
        budget=st.integers(4, 24),
        seqs=st.integers(1, 4),
        caching=st.sampled_from([True, True, True, False]),
        steps=st.sampled_from(["mixed", "mixed", "separate"]),
        order=st.sampled_from(["least-work", "fcfs"]),
        fill=st.sampled_from([0.0, 0.0, 0.5, 1.0]),
        interval=st.sampled_from([0, 0, 2]),
        chunk=st.sampled_from([0, 0, 3]),
        itl=st.sampled_from(["off", "auto", "5"]),
    )
    def begin(
        self,
        blocks: int,
        budget: int,
        seqs: int,
        caching: bool,
        steps: str,
        order: str,
        fill: float,
        interval: int,
        chunk: int,
        itl: str,
    ) -> None:
        self.world = World(
            blocks=blocks,
            budget=budget,
            max_num_seqs=seqs,
            prefix_caching=caching,
            step_policy=steps,
            queue_policy=order,
            coalesce_target_fill=fill,
            coalesce_max_hold_ms=3000.0,
            prefill_decode_interval=interval,
            max_chunk_tokens=chunk,
            itl_target_ms="auto" if steps == "separate" else itl,
            max_bypass_ms=2000.0,
        )
        self.count = 0

    @rule(
        prefix=st.integers(0, 2),
        shared=st.integers(0, 23),
        own=st.integers(1, 9),
        max_tokens=st.integers(0, 9),
        priority=st.integers(0, 1),
        salt=st.sampled_from(["", "", "", "s"]),
        echo=st.sampled_from([-1, -1, -1, 0]),
    )
    def arrive(self, prefix: int, shared: int, own: int, max_tokens: int, priority: int, salt: str, echo: int) -> None:
        world = self.world
        self.count += 1
        prompt = PREFIXES[prefix][:shared] + [900 + (self.count * 7 + i) % 90 for i in range(own)]
        prompt = prompt[: world.max_model_len - 1]
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, prompt_logprobs=echo)
        world.add(f"r{self.count}", prompt, priority=priority, salt=salt, sampling=sampling)

    @precondition(lambda self: len(self.world.results) < 2)
    @rule()
    def submit(self) -> None:
        self.world.submit()

    @precondition(lambda self: self.world.results)
    @rule()
    def complete(self) -> None:
        self.world.complete()

    @precondition(lambda self: self.world.scheduler.requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.world.abort(data.draw(st.sampled_from(sorted(self.world.scheduler.requests))))

    @precondition(lambda self: self.world.results)
    @rule()
    def lose_steps(self) -> None:
        self.world.lose_steps()

    @precondition(lambda self: self.world.scheduler.next_alarm() is not None)
    @rule()
    def wait(self) -> None:
        self.world.wait()
        self.world.expire()

    @rule()
    def clear_cache(self) -> None:
        self.world.scheduler.pool.clear_cached()

    @invariant()
    def budget_holds(self) -> None:
        if getattr(self, "world", None) is not None and self.world.plans:
            plan = self.world.plans[-1]
            tokens = len(plan.decode_slots) // 4 + len(plan.chunk_tokens) // 4
            assert tokens <= self.world.limits.max_num_batched_tokens

    def teardown(self) -> None:
        if getattr(self, "world", None) is None:
            return
        aborted = set(self.world.prompts) - set(self.world.scheduler.requests)
        ended = {name for name, outcomes in self.world.outcomes.items() if outcomes and outcomes[-1].finish}
        self.world.run()
        for name, outcomes in self.world.outcomes.items():
            if name not in aborted or name in ended:
                assert outcomes[-1].finish, f"{name} never ended"
        assert self.world.scheduler.pool.owned == 0


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=120, stateful_step_count=50, deadline=None)


@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.integers(0, 23), st.integers(1, 9), st.integers(1, 6)), min_size=1, max_size=6
    ),
    st.integers(4, 24),
    st.integers(1, 2),
)
@settings(max_examples=80, deadline=None)
def test_concurrency_chunking_and_preemption_change_no_token(
    requests: list[tuple[int, int, int, int]], budget: int, depth: int
) -> None:
    """`World.check_tokens` compares with the oracle; here all of them also run to their full length."""
    world = World(blocks=10, budget=budget, max_num_seqs=4)
    for number, (prefix, shared, own, max_tokens) in enumerate(requests):
        world.add(f"r{number}", PREFIXES[prefix][:shared] + [900 + number * 10 + i for i in range(own)], max_tokens)
    world.run(depth=depth)
    for number, (_, shared, own, max_tokens) in enumerate(requests):
        expected = min(max_tokens, world.max_model_len - shared - own)
        assert len(world.output(f"r{number}")) == expected
