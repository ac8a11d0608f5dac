"""Who may come in: what can never run is rejected, and so is what there is no room for now."""

from __future__ import annotations

from collections.abc import Sequence

from atom_async.cache.hashing import root_hash, split_chain
from atom_async.config import EngineConfig
from atom_async.scheduler.backlog import backlog_s, num_waiting
from atom_async.scheduler.core import Scheduler
from atom_async.scheduler.limits import BYTES_PER_INT
from atom_async.scheduler.request import Group, Request
from atom_async.wire.messages import unpack_ints
from atom_async.wire.sampling import SamplingParams

from .client import EngineRequest, QueueFull, RequestRejected

MOST_PROMPT_LOGPROBS = 1 << 20
"""Entries, positions times alternatives, that one request may ask for: about 20 MB of messages."""


class Door:
    """Takes a body's requests together or not at all.

    Args:
        sampling_room: bytes that grammar, logit_bias and end tokens of a request may take in a step's message.
    """

    def __init__(self, config: EngineConfig, scheduler: Scheduler, *, max_model_len: int, sampling_room: int) -> None:
        self._config = config
        self._scheduler = scheduler
        self._max_model_len = max_model_len
        self._sampling_room = sampling_room

    def admit(self, body: Sequence[EngineRequest], now: float) -> list[Request]:
        """The scheduler's requests. Raises RequestRejected or QueueFull."""
        for asked in body:
            self._check(asked)
        if len({asked.request_id for asked in body}) < len(body):
            raise RequestRejected("two requests of one body have the same id")
        group = Group()
        requests = [self._make(asked, group, now) for asked in body]
        self._check_room(requests, now)
        return requests

    def _check(self, asked: EngineRequest) -> None:
        sampling, most_logprobs = asked.sampling, self._config.max_logprobs
        prompt_len = len(asked.prompt_token_ids) // BYTES_PER_INT
        if asked.request_id in self._scheduler:
            raise RequestRejected(f"a request with id {asked.request_id} is running already")
        if max(sampling.logprobs, sampling.prompt_logprobs) > most_logprobs:
            raise RequestRejected(f"at most {most_logprobs} logprobs per token are given (--max-logprobs)")
        if (entries := prompt_len * (1 + sampling.prompt_logprobs)) > MOST_PROMPT_LOGPROBS:
            raise RequestRejected(
                f"the prompt's logprobs would be {entries} entries; at most {MOST_PROMPT_LOGPROBS} are given at once"
            )
        if sampling_bytes(sampling) > self._sampling_room:
            raise RequestRejected(f"grammar and logit_bias together may take {self._sampling_room} bytes of a message")
        if prompt_len == 0:
            raise RequestRejected("the prompt is empty; it needs at least one token")
        if prompt_len >= self._max_model_len + (sampling.max_tokens == 0):
            raise RequestRejected(
                f"the prompt has {prompt_len} tokens; the maximum context length is "
                f"{self._max_model_len} tokens, prompt and output together"
            )

    def _make(self, asked: EngineRequest, group: Group, now: float) -> Request:
        tokens = unpack_ints(asked.prompt_token_ids)
        sampling = asked.sampling
        return Request(
            request_id=asked.request_id,
            tokens=tokens,
            prompt_len=len(tokens),
            sampling=sampling,
            end_token_ids=frozenset(sampling.end_token_ids),
            chain=split_chain(asked.block_hashes),
            root=root_hash(asked.cache_salt),
            max_total_len=min(len(tokens) + sampling.max_tokens, self._max_model_len),
            priority=asked.priority,
            arrival_rank=self._scheduler.next_rank(),
            arrived_at=now,
            deadline=None if asked.deadline_ms is None else now + asked.deadline_ms / 1e3,
            group=group,
            sampling_bytes=sampling_bytes(sampling),
        )

    # Room ----------------------------------------------------------------------------------------

    def _check_room(self, requests: list[Request], now: float) -> None:
        full = self._too_many(requests) or self._too_long(requests)
        if full:
            for request in requests:
                self._scheduler.reject("queue_full", full, request.request_id)
            raise QueueFull(f"the queue is full: {full}", retry_after_s=backlog_s(self._scheduler, now))

    def _too_many(self, requests: list[Request]) -> str:
        """A request waits when it has to: for memory, or because more are queued than slots are free."""
        most, slots = self._config.max_queued_requests, self._config.max_num_seqs
        if most is None:
            return ""
        if len(requests) > slots + most:
            raise RequestRejected(
                f"the body asks for {len(requests)} sequences at once; {slots} can run (--max-num-seqs) and {most} "
                "wait (--max-queued-requests)"
            )
        if num_waiting(self._scheduler, len(requests)) <= most:
            return ""
        waiting = num_waiting(self._scheduler)
        more = f"and the body has {len(requests)}" if len(requests) > 1 else "already"
        return f"{waiting} requests wait {more}; at most {most} may (--max-queued-requests)"

    def _too_long(self, requests: list[Request]) -> str:
        """Whatever its length, a body is taken while nobody is queued."""
        most, intake = self._config.max_queued_tokens, self._scheduler.intake
        if most is None or self._scheduler.num_queued == 0:
            return ""
        adds, seen = 0, set[bytes]()
        for request in requests:
            known = request.chain[-1] if request.chain and self._config.enable_prefix_caching else None
            adds += 1 if known in seen else max(request.total - intake.present_tokens(request), 1)
            if known is not None:
                seen.add(known)
        if intake.queued_tokens + adds <= most:
            return ""
        return (
            f"{intake.queued_tokens} prompt tokens wait already and the request adds {adds}; at most {most} may "
            "(--max-queued-tokens)"
        )


def sampling_bytes(sampling: SamplingParams) -> int:
    """Upper bound of what grammar, logit_bias and end tokens take in a message."""
    grammar = 0 if sampling.grammar is None else len(sampling.grammar.source.encode())
    return grammar + 16 * len(sampling.logit_bias) + 8 * len(sampling.end_token_ids)
