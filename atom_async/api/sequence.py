"""One sequence of a request: what the engine says of it, and what its client sees."""

from __future__ import annotations

import secrets
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import Literal

from atom_async.api.errors import ended_badly
from atom_async.api.params import TextRules, with_seed
from atom_async.api.prompts import Prompt
from atom_async.api.requests import SharedFields
from atom_async.api.responses import PromptTokensDetails, Usage
from atom_async.api.state import Served, ServerState
from atom_async.engine.client import EngineClient, EngineOutput, EngineRequest, TokenLogprob
from atom_async.telemetry.metrics import RequestMeter
from atom_async.text.output import TextAssembler, TextDelta
from atom_async.wire.messages import pack_ints
from atom_async.wire.sampling import SamplingParams


@dataclass(slots=True)
class Piece:
    """What one output adds to a sequence, in client's terms."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    """Those whose text is now shown in full."""
    text_offsets: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    """One a token id when asked for, else empty."""
    produced: list[int] = field(default_factory=list)
    """What the engine produced, up to the stop and with the token that stops."""
    prompt_logprobs: list[TokenLogprob | None] | None = None
    finish_reason: Literal["stop", "length"] | None = None
    stop_reason: int | str | None = None


class PieceSum:
    """All pieces of one sequence as one; adding costs what the piece is long."""

    def __init__(self) -> None:
        self._texts: list[str] = []
        self._sum = Piece()

    def add(self, piece: Piece) -> None:
        self._texts.append(piece.text)
        whole = self._sum
        whole.token_ids += piece.token_ids
        whole.text_offsets += piece.text_offsets
        whole.logprobs += piece.logprobs
        whole.produced += piece.produced
        whole.prompt_logprobs = whole.prompt_logprobs or piece.prompt_logprobs
        whole.finish_reason, whole.stop_reason = piece.finish_reason, piece.stop_reason

    def total(self) -> Piece:
        self._sum.text = "".join(self._texts)
        return self._sum


class Sequence:
    """`index` is the choice's; `prompt` may be shared with others."""

    def __init__(
        self,
        index: int,
        request: EngineRequest,
        prompt: Prompt,
        assembler: TextAssembler[TokenLogprob],
        meter: RequestMeter,
        eos_ids: SequenceOf[int],
    ) -> None:
        self.index = index
        self.request = request
        self.prompt = prompt
        self.completion_tokens = 0
        """Produced up to the stop, the token that stops included."""
        self.cached_tokens = 0
        self._cut = False
        self._assembler = assembler
        self._meter = meter
        self._eos_ids = eos_ids

    def take(self, output: EngineOutput, engine: EngineClient) -> Piece:
        """Raises ApiError when the output ends the request without a result."""
        self._meter.output(output)
        self.cached_tokens = output.cached_tokens
        stopped = self._cut or self._assembler.stopped_by is not None
        if not stopped and (error := ended_badly(output)) is not None:
            raise error
        piece = Piece(prompt_logprobs=output.prompt_logprobs)
        if not stopped:
            self._push(piece, output)
            if self._assembler.stopped_by is not None and output.finish_reason is None:
                engine.finish(self.request.request_id)
        if output.finish_reason is not None:
            self._finish(piece, output)
        return piece

    def cut(self, engine: EngineClient) -> None:
        """The client gets no more of it: what still comes was in flight, and is neither shown nor counted."""
        self._cut = True
        engine.finish(self.request.request_id)

    def stream_failed(self) -> None:
        self._meter.failed()

    def reader_left(self) -> None:
        self._meter.left()

    def _push(self, piece: Piece, output: EngineOutput) -> None:
        delta = self._assembler.push(output.token_ids, output.logprobs, stop_token_id=output.stop_token_id)
        piece.produced = output.token_ids[: delta.produced]
        self.completion_tokens += len(piece.produced)
        _extend(piece, delta)

    def _finish(self, piece: Piece, output: EngineOutput) -> None:
        _extend(piece, self._assembler.finish())
        if self._assembler.stopped_by is not None:
            piece.finish_reason, piece.stop_reason = "stop", self._assembler.stopped_by
            return
        piece.finish_reason = "length" if output.finish_reason == "length" else "stop"
        if output.stop_token_id is not None and output.stop_token_id not in self._eos_ids:
            piece.stop_reason = output.stop_token_id


def _extend(piece: Piece, delta: TextDelta[TokenLogprob]) -> None:
    piece.text += delta.text
    piece.token_ids += delta.token_ids
    piece.text_offsets += delta.text_offsets
    piece.logprobs += delta.logprobs or ()


@dataclass(frozen=True, slots=True)
class SequencePlan:
    """One prompt and how to go on from it: n sequences come of it."""

    prompt: Prompt
    sampling: SamplingParams


def make_sequences(
    state: ServerState,
    served: Served,
    body: SharedFields,
    answer_id: str,
    plans: SequenceOf[SequencePlan],
    rules: TextRules,
    *,
    continues_text: bool,
    deadline_ms: float | None = None,
) -> list[Sequence]:
    """All choices in OpenAI's order: those of the first prompt first. Nothing is submitted yet."""
    sequences: list[Sequence] = []
    state.metrics.observe("vllm:request_params_n", body.n or 1)
    for plan in plans:
        packed = pack_ints(plan.prompt.token_ids)
        for choice in range(body.n or 1):
            index = len(sequences)
            seed = state.seeds.getrandbits(64) if body.seed is None else body.seed + choice
            request = EngineRequest(
                request_id=f"{answer_id}-{index}",
                prompt_token_ids=packed,
                sampling=with_seed(plan.sampling, seed),
                cache_salt=body.cache_salt or "",
                priority=body.priority or 0,
                deadline_ms=deadline_ms,
            )
            assembler: TextAssembler[TokenLogprob] = TextAssembler(
                served.tokenizer,
                stop=rules.stop,
                include_stop=rules.include_stop,
                skip_special_tokens=rules.skip_special_tokens,
                continues_text=continues_text,
                min_tokens=rules.min_tokens,
            )
            meter = state.metrics.begin(prompt_tokens=len(plan.prompt.token_ids), max_tokens=plan.sampling.max_tokens)
            sequences.append(Sequence(index, request, plan.prompt, assembler, meter, served.tokenizer.eos_ids))
    return sequences


def new_id(prefix: str) -> str:
    return f"{prefix}-{secrets.token_hex(16)}"


def usage_of(sequences: SequenceOf[Sequence], n: int) -> Usage:
    """A prompt counts once, whatever n; of its choices, the one that found least in the cache tells what
    was there before the request."""
    prompt_tokens = cached = 0
    for first in range(0, len(sequences), n):
        choices = sequences[first : first + n]
        prompt_tokens += len(choices[0].prompt.token_ids)
        cached += min(choice.cached_tokens for choice in choices)
    completion_tokens = sum(sequence.completion_tokens for sequence in sequences)
    return Usage(prompt_tokens, completion_tokens, prompt_tokens + completion_tokens, PromptTokensDetails(cached))
