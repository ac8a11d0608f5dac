"""POST /v1/chat/completions."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field

from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from atom_async.api.constraints import accepted, constraints
from atom_async.api.deadline import deadline_of, time_left
from atom_async.api.decode import BodyDecoder
from atom_async.api.errors import bad_request
from atom_async.api.generation import Generation, answer, check_stream_fields, includes_usage
from atom_async.api.logprobs import chat_logprobs, prompt_logprobs
from atom_async.api.params import checked_logprobs, checked_output_tokens, sampling_params, text_rules
from atom_async.api.prompts import chat_prompt, truncated
from atom_async.api.replies import SseReply
from atom_async.api.requests import ChatRequest
from atom_async.api.responses import (
    AnswerMessage,
    CalledFunction,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatLogprobs,
    ChatToolCall,
    FinishReason,
    FunctionPiece,
    MessagePiece,
    ToolCallPiece,
)
from atom_async.api.sequence import Piece, PieceSum, Sequence, SequencePlan, make_sequences, new_id
from atom_async.api.state import Served, ServerState
from atom_async.api.tools import ToolPlan, tool_plan
from atom_async.text.tool_calls import ParsedDelta, ToolCallDelta, ToolCallParser, join_deltas

BODY = BodyDecoder(ChatRequest)


async def chat_completions(request: Request) -> Response | SseReply:
    state: ServerState = request.app.state.server
    arrived_at = state.metrics.clock()
    body = await BODY.read(request)
    deadline_ms = deadline_of(request, body)
    served = state.accepting_for(body.model)
    _check(body)
    tools = tool_plan(body, served.text.tool_call_parser, constraints(body, body.response_format))
    plan = await _plan(body, served, tools, state.engine_config.max_logprobs)
    answer_id = new_id("chatcmpl")
    sequences = make_sequences(
        state,
        served,
        body,
        answer_id,
        [plan],
        text_rules(body),
        continues_text=bool(body.continue_final_message),
        deadline_ms=time_left(deadline_ms, state.metrics.clock() - arrived_at),
    )
    generation = Generation(served, sequences, answer_id, body.n or 1)
    return await answer(request, body, generation, ChatShape(body, generation, tools))


def _check(body: ChatRequest) -> None:
    check_stream_fields(body)
    if body.top_logprobs is not None and not body.logprobs:
        raise bad_request("top_logprobs is allowed only with logprobs: true", "top_logprobs")
    if None not in (body.max_tokens, body.max_completion_tokens) and body.max_tokens != body.max_completion_tokens:
        raise bad_request(
            f"max_tokens is {body.max_tokens} and max_completion_tokens {body.max_completion_tokens}; give one of them",
            "max_tokens",
        )


async def _plan(body: ChatRequest, served: Served, tools: ToolPlan, max_logprobs: int) -> SequencePlan:
    grammar = await accepted(tools.constraints)
    top = checked_logprobs(body.top_logprobs, max_logprobs, "top_logprobs")
    prompt = await chat_prompt(
        served,
        body.messages,
        tools.shown,
        add_generation_prompt=_adds_prompt(body),
        continue_final_message=bool(body.continue_final_message),
        add_special_tokens=bool(body.add_special_tokens),
        template_kwargs=body.chat_template_kwargs,
    )
    param = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    asked: int | None = getattr(body, param)
    prompt = truncated(prompt, body.truncate_prompt_tokens, served.max_model_len - (asked or 1))
    max_tokens = checked_output_tokens(asked, served.max_model_len, len(prompt.token_ids), served, param)
    sampling = sampling_params(
        body,
        served,
        max_tokens=max_tokens,
        logprobs=max(top, 0) if body.logprobs else -1,
        prompt_logprobs=checked_logprobs(body.prompt_logprobs, max_logprobs, "prompt_logprobs"),
        grammar=grammar,
    )
    return SequencePlan(prompt, sampling)


def _adds_prompt(body: ChatRequest) -> bool:
    """By default, unless the last message is to be continued."""
    return not body.continue_final_message if body.add_generation_prompt is None else body.add_generation_prompt


@dataclass(slots=True)
class _Message:
    """One choice in the making."""

    parser: ToolCallParser
    parsed: list[ParsedDelta] = field(default_factory=list)
    """For an answer in one piece."""
    pieces: PieceSum = field(default_factory=PieceSum)
    begun: bool = False
    cut: bool = False
    """A second call came where only one is allowed: what follows is dropped."""


class ChatShape:
    """OpenAI's `chat.completion` and `chat.completion.chunk` objects."""

    def __init__(self, body: ChatRequest, generation: Generation, tools: ToolPlan) -> None:
        self._body = body
        self._generation = generation
        self._tokenizer = generation.served.tokenizer
        self._usage = None if includes_usage(body) else UNSET
        self._messages = [_Message(tools.make_parser()) for _ in generation.sequences]

    def add(self, sequence: Sequence, piece: Piece) -> list[ChatChunk]:
        message = self._messages[sequence.index]
        parsed = self._parse(sequence, message, piece)
        if self._body.stream:
            return self._chunks(sequence, message, piece, parsed)
        message.parsed.append(parsed)
        message.pieces.add(piece)
        return []

    def usage_event(self) -> ChatChunk:
        event = self._chunk([])
        event.usage = self._generation.usage()
        return event

    def whole(self) -> ChatCompletion:
        generation = self._generation
        pairs = zip(generation.sequences, self._messages, strict=True)
        prompt, of_prompt = generation.sequences[0].prompt, self._messages[0].pieces.total().prompt_logprobs
        return ChatCompletion(
            generation.id,
            generation.created,
            generation.model,
            [self._choice(sequence, message) for sequence, message in pairs],
            generation.usage(),
            prompt_logprobs=UNSET if of_prompt is None else prompt_logprobs(self._tokenizer, of_prompt),
            prompt_token_ids=prompt.token_ids if self._body.return_token_ids else UNSET,
        )

    # Parsing -------------------------------------------------------------------------------------

    def _parse(self, sequence: Sequence, message: _Message, piece: Piece) -> ParsedDelta:
        if message.cut:
            return ParsedDelta()
        parsed = message.parser.push(piece.text)
        if piece.finish_reason is not None:
            rest = message.parser.finish()
            parsed = ParsedDelta(parsed.content + rest.content, parsed.tool_calls + rest.tool_calls)
        if self._body.parallel_tool_calls is False and any(call.index > 0 for call in parsed.tool_calls):
            message.cut = True
            sequence.cut(self._generation.served.engine)
            parsed = ParsedDelta(parsed.content, [call for call in parsed.tool_calls if call.index == 0])
        return parsed

    @staticmethod
    def _finish_reason(message: _Message, piece: Piece) -> FinishReason | None:
        """A call that the length cut off is no call to make."""
        if piece.finish_reason is None:
            return None
        if piece.finish_reason == "length" and not message.cut:
            return "length"
        return "tool_calls" if message.parser.found_calls else "stop"

    # In one piece --------------------------------------------------------------------------------

    def _choice(self, sequence: Sequence, message: _Message) -> ChatChoice:
        content, calls = join_deltas(message.parsed)
        tool_calls = [ChatToolCall(_call_id(), CalledFunction(call.name, call.arguments)) for call in calls]
        whole = message.pieces.total()
        reason = self._finish_reason(message, whole)
        assert reason is not None, "asked for the whole of a sequence that has not ended"
        return ChatChoice(
            index=sequence.index,
            message=AnswerMessage(content or (None if calls else ""), tool_calls=tool_calls or UNSET),
            logprobs=self._logprobs(whole),
            finish_reason=reason,
            stop_reason=whole.stop_reason,
            token_ids=whole.produced if self._body.return_token_ids else UNSET,
        )

    def _logprobs(self, piece: Piece) -> ChatLogprobs | None:
        return chat_logprobs(self._tokenizer, piece.logprobs) if self._body.logprobs else None

    # In a stream ---------------------------------------------------------------------------------

    def _chunks(self, sequence: Sequence, message: _Message, piece: Piece, parsed: ParsedDelta) -> list[ChatChunk]:
        chunks = [] if message.begun else [self._first_chunk(sequence)]
        message.begun = True
        returned = piece.produced if self._body.return_token_ids else []
        if parsed.content or parsed.tool_calls or piece.logprobs or returned:
            delta = MessagePiece(
                content=parsed.content or UNSET,
                tool_calls=[_call_piece(call) for call in parsed.tool_calls] or UNSET,
            )
            chunk = self._chunk_for(sequence, delta)
            chunk.choices[0].logprobs = self._logprobs(piece) if piece.logprobs else None
            chunk.choices[0].token_ids = returned or UNSET
            chunks.append(chunk)
        if piece.finish_reason is not None:
            chunk = self._chunk_for(sequence, MessagePiece())
            chunk.choices[0].finish_reason = self._finish_reason(message, piece)
            chunk.choices[0].stop_reason = piece.stop_reason
            chunks.append(chunk)
        return chunks

    def _first_chunk(self, sequence: Sequence) -> ChatChunk:
        chunk = self._chunk_for(sequence, MessagePiece(role="assistant", content=""))
        if self._body.return_token_ids and sequence.index == 0:
            chunk.prompt_token_ids = sequence.prompt.token_ids
        return chunk

    def _chunk_for(self, sequence: Sequence, delta: MessagePiece) -> ChatChunk:
        return self._chunk([ChatChunkChoice(sequence.index, delta)])

    def _chunk(self, choices: list[ChatChunkChoice]) -> ChatChunk:
        generation = self._generation
        return ChatChunk(generation.id, generation.created, generation.model, choices, usage=self._usage)


def _call_piece(call: ToolCallDelta) -> ToolCallPiece:
    """The first piece of a call has its id and name."""
    if call.name is None:
        return ToolCallPiece(call.index, FunctionPiece(arguments=call.arguments))
    return ToolCallPiece(
        call.index, FunctionPiece(name=call.name, arguments=call.arguments), id=_call_id(), type="function"
    )


def _call_id() -> str:
    return f"call_{secrets.token_hex(12)}"
