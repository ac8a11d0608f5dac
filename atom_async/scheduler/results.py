"""What a step's result does to single requests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from atom_async.cache.pool import BlockPool
from atom_async.events.schema import Event, RequestFirstToken
from atom_async.wire.messages import SequenceLogprobs

from .cost_model import StepWork
from .counters import Counters
from .limits import Limits
from .outcome import Finish, Outcome
from .plan import Chunk
from .request import Request, State


@dataclass(slots=True)
class StepInFlight:
    """What a submitted step will do, to be matched with its result."""

    step_id: int
    decodes: list[Request]
    chunks: list[Chunk]
    sample_slots: bytes
    submitted_at: float
    work: StepWork
    predicted_ms: float

    @property
    def rows(self) -> list[Request]:
        """Those that sample, in the order of `sample_slots`."""
        return self.decodes + [chunk.request for chunk in self.chunks if chunk.samples]

    def is_void(self, request: Request) -> bool:
        """Whether its result concerns a request that has ended or was preempted since."""
        return request.state is not State.RUNNING or self.step_id <= request.void_upto

    def keep_prompt_logprobs(self, parts: list[SequenceLogprobs]) -> None:
        by_slot: dict[int, list[SequenceLogprobs]] = {}
        for part in parts:
            by_slot.setdefault(part.slot, []).append(part)
        for chunk in self.chunks:
            if not self.is_void(chunk.request):
                chunk.request.prompt_logprobs += by_slot.get(chunk.request.slot, ())


class TokenTaker:
    """Appends sampled tokens to their requests."""

    def __init__(self, pool: BlockPool, limits: Limits, counters: Counters, emit: Callable[[Event], None]) -> None:
        self._pool = pool
        self._limits = limits
        self._counters = counters
        self._emit = emit

    def take(self, request: Request, token_id: int, now: float, *, grammar_ended: bool) -> Outcome:
        request.samples_in_flight -= 1
        known = len(request.tokens)
        if known >= request.max_total_len:  # max_tokens 0: only the prompt was wanted
            return Outcome(request, None, "length", prompt_logprobs=_take_prompt_logprobs(request))
        if self._limits.prefix_caching and known % self._limits.block_size == 0:
            self._name_output_block(request, known)
        request.tokens.append(token_id)
        request.last_token_at = now
        self._counters.generation_tokens += 1
        outcome = Outcome(request, token_id)
        if request.first_token_at < 0:
            request.first_token_at = now
            outcome.prompt_logprobs = _take_prompt_logprobs(request)
            self._emit(RequestFirstToken(request_id=request.request_id, ttft_ms=(now - request.arrived_at) * 1e3))
        outcome.finish = _finish_of(request, token_id, grammar_ended=grammar_ended)
        if token_id in request.end_token_ids and outcome.finish == "stop":
            outcome.stop_token_id = token_id
        return outcome

    def _name_output_block(self, request: Request, known: int) -> None:
        """The step that just ended wrote position known - 1, and with it filled a block."""
        index = known // self._limits.block_size - 1
        block = request.blocks[index]
        if index >= 0 and self._pool.hashes[block] is None:
            request.extend_chain(self._limits.block_size, known)
            self._pool.register(block, request.chain[index])


def _finish_of(request: Request, token_id: int, *, grammar_ended: bool) -> Finish | None:
    """Whether the token just appended is the last one, and why."""
    if grammar_ended:
        return "stop"
    if token_id in request.end_token_ids and request.output_len >= request.sampling.min_tokens:
        return "stop"
    if len(request.tokens) >= request.max_total_len:
        return "length"
    return None


def _take_prompt_logprobs(request: Request) -> list[SequenceLogprobs] | None:
    if request.sampling.prompt_logprobs < 0:
        return None
    parts, request.prompt_logprobs = request.prompt_logprobs, []
    return parts
