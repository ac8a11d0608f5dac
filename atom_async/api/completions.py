"""POST /v1/completions."""

from __future__ import annotations

from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from atom_async.api.constraints import accepted, constraints
from atom_async.api.deadline import deadline_of, time_left
from atom_async.api.decode import BodyDecoder
from atom_async.api.errors import bad_request
from atom_async.api.generation import Generation, answer, check_stream_fields, includes_usage
from atom_async.api.logprobs import completion_logprobs, prompt_logprobs
from atom_async.api.params import checked_logprobs, checked_output_tokens, sampling_params, text_rules
from atom_async.api.prompts import Prompt, completion_prompts, truncated
from atom_async.api.replies import SseReply
from atom_async.api.requests import CompletionRequest
from atom_async.api.responses import Completion, CompletionChoice, CompletionLogprobs
from atom_async.api.sequence import Piece, PieceSum, Sequence, SequencePlan, make_sequences, new_id
from atom_async.api.state import Served, ServerState
from atom_async.engine.client import TokenLogprob
from atom_async.text.output import TextAssembler
from atom_async.text.tokenizer import Tokenizer

DEFAULT_MAX_TOKENS = 16
BODY = BodyDecoder(CompletionRequest)


async def completions(request: Request) -> Response | SseReply:
    state: ServerState = request.app.state.server
    arrived_at = state.metrics.clock()
    body = await BODY.read(request)
    deadline_ms = deadline_of(request, body)
    served = state.accepting_for(body.model)
    _check(body)
    plans = await _plans(body, served, state.engine_config.max_logprobs)
    answer_id = new_id("cmpl")
    sequences = make_sequences(
        state,
        served,
        body,
        answer_id,
        plans,
        text_rules(body),
        continues_text=True,
        deadline_ms=time_left(deadline_ms, state.metrics.clock() - arrived_at),
    )
    generation = Generation(served, sequences, answer_id, body.n or 1)
    return await answer(request, body, generation, CompletionShape(body, generation))


def _check(body: CompletionRequest) -> None:
    check_stream_fields(body)
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise bad_request(f"best_of is not supported; accepted: the value of n, {body.n or 1}", "best_of")


async def _plans(body: CompletionRequest, served: Served, max_logprobs: int) -> list[SequencePlan]:
    grammar = await accepted(constraints(body, body.response_format))
    logprobs = checked_logprobs(body.logprobs, max_logprobs, "logprobs")
    of_prompt = checked_logprobs(body.prompt_logprobs, max_logprobs, "prompt_logprobs")
    if body.echo:
        of_prompt = max(of_prompt, logprobs)
    plans = []
    for prompt in await completion_prompts(body, served):
        asked = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
        prompt = truncated(prompt, body.truncate_prompt_tokens, served.max_model_len - asked)
        max_tokens = checked_output_tokens(
            body.max_tokens, DEFAULT_MAX_TOKENS, len(prompt.token_ids), served, "max_tokens"
        )
        sampling = sampling_params(
            body, served, max_tokens=max_tokens, logprobs=logprobs, prompt_logprobs=of_prompt, grammar=grammar
        )
        plans.append(SequencePlan(prompt, sampling))
    return plans


class CompletionShape:
    """OpenAI's `text_completion` objects."""

    def __init__(self, body: CompletionRequest, generation: Generation) -> None:
        self._body = body
        self._generation = generation
        self._tokenizer = generation.served.tokenizer
        self._usage = None if includes_usage(body) else UNSET
        self._echoes = [_echo(self._tokenizer, s.prompt) if body.echo else ("", []) for s in generation.sequences]
        self._begun = [False] * len(generation.sequences)
        self._whole = [PieceSum() for _ in generation.sequences]

    def add(self, sequence: Sequence, piece: Piece) -> list[Completion]:
        if not self._body.stream:
            self._whole[sequence.index].add(piece)
            return []
        first = not self._begun[sequence.index]
        self._begun[sequence.index] = True
        shown = piece.text or piece.finish_reason or piece.token_ids or (self._body.return_token_ids and piece.produced)
        if not shown and not (first and self._body.echo):
            return []
        return [self._object([self._choice(sequence, piece, first=first)])]

    def usage_event(self) -> Completion:
        event = self._object([])
        event.usage = self._generation.usage()
        return event

    def whole(self) -> Completion:
        pairs = zip(self._generation.sequences, self._whole, strict=True)
        answer = self._object([self._choice(sequence, pieces.total(), first=True) for sequence, pieces in pairs])
        answer.usage = self._generation.usage()
        return answer

    def _object(self, choices: list[CompletionChoice]) -> Completion:
        generation = self._generation
        return Completion(generation.id, generation.created, generation.model, choices, usage=self._usage)

    def _choice(self, sequence: Sequence, piece: Piece, *, first: bool) -> CompletionChoice:
        """`first`: the piece with which the sequence begins."""
        body, tokenizer = self._body, self._tokenizer
        echoed = self._echoes[sequence.index][0] if first else ""
        of_prompt = piece.prompt_logprobs if body.prompt_logprobs is not None else None
        return CompletionChoice(
            index=sequence.index,
            text=echoed + piece.text,
            logprobs=None if body.logprobs is None else self._logprobs(sequence, piece, first=first),
            finish_reason=piece.finish_reason,
            stop_reason=piece.stop_reason,
            prompt_logprobs=UNSET if of_prompt is None else prompt_logprobs(tokenizer, of_prompt),
            token_ids=piece.produced if body.return_token_ids else UNSET,
            prompt_token_ids=sequence.prompt.token_ids if body.return_token_ids and first else UNSET,
        )

    def _logprobs(self, sequence: Sequence, piece: Piece, *, first: bool) -> CompletionLogprobs:
        """Of the text in this piece: with `echo`, the prompt's come with the first."""
        text, prompt_offsets = self._echoes[sequence.index]
        entries: list[TokenLogprob | None] = [*piece.logprobs]
        ids = piece.token_ids
        offsets = [len(text) + offset for offset in piece.text_offsets]
        if first and self._body.echo:
            entries = [*(_first(piece.prompt_logprobs, self._body.logprobs)), *entries]
            ids, offsets = sequence.prompt.token_ids + ids, prompt_offsets + offsets
        return completion_logprobs(self._tokenizer, entries, ids, offsets)


def _first(entries: list[TokenLogprob | None] | None, top: int | None) -> list[TokenLogprob | None]:
    """A prompt's entries with so many of the most likely tokens: prompt_logprobs may have asked for more."""
    return [e and TokenLogprob(e.token_id, e.logprob, e.rank, e.top[:top]) for e in entries or ()]


def _echo(tokenizer: Tokenizer, prompt: Prompt) -> tuple[str, list[int]]:
    """The prompt as text, and where in it each of its tokens begins.

    A text comes back as the client sent it, whatever the tokenizer put before it or made of it.
    """
    assembler: TextAssembler[TokenLogprob] = TextAssembler(tokenizer, skip_special_tokens=False)
    deltas = assembler.push(prompt.token_ids), assembler.finish()
    text = "".join(delta.text for delta in deltas)
    offsets = [offset for delta in deltas for offset in delta.text_offsets]
    if prompt.text is None or prompt.text == text:
        return text, offsets
    added = len(text) - len(prompt.text) if text.endswith(prompt.text) else 0
    return prompt.text, [min(max(offset - added, 0), len(prompt.text)) for offset in offsets]
