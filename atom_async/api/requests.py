"""Bodies of requests. What a field may hold is in its annotation; `decode` turns violations into errors.

A field that is not here is refused. Fields that OpenAI or vLLM have and that change nothing here stand in
`decode.HARMLESS`, those that are not implemented in `decode.REFUSED`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

INT32_MAX = 2**31 - 1

Count = Annotated[int, Meta(ge=0, le=INT32_MAX)]
Positive = Annotated[int, Meta(ge=1, le=INT32_MAX)]
Share = Annotated[float, Meta(ge=0, le=1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
JsonObject = dict[str, Any]


class StreamOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    include_usage: Annotated[bool | None, Meta(description="a last chunk with the token counts")] = None
    include_obfuscation: bool | None = None


class StructuredOutputs(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """vLLM's newer spelling of `guided_*`: exactly one is set."""

    json: JsonObject | str | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None


class SharedFields(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What both generating endpoints take."""

    model: Annotated[str | None, Meta(description="a served name; left out, the served model")] = None
    n: Annotated[int, Meta(ge=1, le=128, description="choices per prompt")] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: Annotated[str | list[str] | None, Meta(description="texts that end the output and are not part of it")] = None
    temperature: Annotated[float, Meta(ge=0, le=2, description="0 is greedy; default 1")] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: Annotated[
        dict[str, Annotated[float, Meta(ge=-100, le=100)]] | None,
        Meta(description="token id: added to its logit"),
    ] = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1, description="choice i uses seed + i")] | None = None

    top_k: Annotated[int, Meta(ge=-1, le=INT32_MAX, description="0 or -1: off")] | None = None
    min_p: Share | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=100)] | None = None
    min_tokens: Count | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[Count] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: Annotated[Count | None, Meta(description="log-probabilities of the prompt; not with stream")] = (
        None
    )
    return_token_ids: bool | None = None
    truncate_prompt_tokens: Annotated[
        int | None, Meta(description="keep only the last so many prompt tokens; -1: as many as fit")
    ] = None
    cache_salt: Annotated[str, Meta(min_length=1, description="KV is shared only under equal salts")] | None = None
    user: Annotated[str | None, Meta(description="changes nothing")] = None
    metadata: Annotated[JsonObject | None, Meta(description="changes nothing, and is not kept")] = None
    priority: Annotated[int, Meta(ge=-(2**31), le=INT32_MAX, description="lower runs first; default 0")] | None = None
    deadline_ms: Annotated[
        Annotated[float, Meta(gt=0)] | None,
        Meta(description="the request fails with 504 if it could not be started so long after its arrival"),
    ] = None

    guided_json: JsonObject | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: Annotated[str | None, Meta(description="Lark, in llguidance's dialect")] = None
    structured_outputs: StructuredOutputs | None = None


class ResponseFormatSchema(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    name: str
    schema: JsonObject
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: ResponseFormatSchema | None = None


class CompletionRequest(SharedFields, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/completions."""

    prompt: Annotated[
        str | list[str | Count | list[Count]],
        Meta(description="a text, a list of texts, a list of token ids, or a list of such lists"),
    ]
    max_tokens: Annotated[Count | None, Meta(description="default 16")] = None
    echo: Annotated[bool | None, Meta(description="begin the text with the prompt")] = None
    logprobs: Annotated[Count | None, Meta(description="so many most likely tokens at each position")] = None
    best_of: Annotated[Positive | None, Meta(description="only as equal to n")] = None
    add_special_tokens: Annotated[bool | None, Meta(description="tokens such as BOS around a text; default true")] = (
        None
    )
    response_format: ResponseFormat | None = None


class FunctionCall(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    name: str
    arguments: str | JsonObject | None = None


class MessageToolCall(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    function: FunctionCall
    id: str | None = None
    type: Literal["function"] = "function"
    index: int | None = None


class ChatMessage(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[JsonObject] | None = None
    name: str | None = None
    tool_calls: list[MessageToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    # As clients send an answer back: always null or empty here.
    audio: None = None
    function_call: None = None
    annotations: Annotated[list[Any], Meta(max_length=0)] | None = None


class FunctionDefinition(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    name: Annotated[str, Meta(min_length=1, max_length=256)]
    description: str | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None


class Tool(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    type: Literal["function"]
    function: FunctionDefinition


class NamedFunction(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    name: str


class NamedToolChoice(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    type: Literal["function"]
    function: NamedFunction


class ChatRequest(SharedFields, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Meta(min_length=1)]
    max_tokens: Annotated[Positive | None, Meta(description="older name of max_completion_tokens")] = None
    max_completion_tokens: Annotated[Positive | None, Meta(description="default: what the context leaves")] = None
    logprobs: bool | None = None
    top_logprobs: Count | None = None
    response_format: ResponseFormat | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedToolChoice | None = None
    parallel_tool_calls: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: Annotated[
        bool | None, Meta(description="default false: the chat template writes them itself")
    ] = None
    chat_template_kwargs: Annotated[JsonObject | None, Meta(description="variables of the chat template")] = None


class TokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /tokenize: a text or a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    tools: list[Tool] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: JsonObject | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /detokenize."""

    model: str | None = None
    tokens: list[Count]
