"""What is not understood or not implemented is refused, with the field named and what would be right."""

from __future__ import annotations

from typing import Any

import pytest
from asgi import call, post
from scripted import ScriptedEngine
from starlette.applications import Starlette

from atom_async.api import decode
from atom_async.api.decode import HARMLESS, REFUSED

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
PROMPT: dict[str, Any] = {"prompt": "Hello"}
MESSAGES: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello"}]}
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "f"}}

BOTH = [
    ({"temperature": 2.1}, "temperature", "<= 2"),
    ({"temperature": "hot"}, "temperature", "float"),
    ({"top_p": 0}, "top_p", "> 0"),
    ({"top_k": -2}, "top_k", ">= -1"),
    ({"min_p": 1.5}, "min_p", "<= 1"),
    ({"presence_penalty": -3}, "presence_penalty", ">= -2"),
    ({"frequency_penalty": 3}, "frequency_penalty", "<= 2"),
    ({"repetition_penalty": 0}, "repetition_penalty", "> 0"),
    ({"n": 0}, "n", ">= 1"),
    ({"n": 129}, "n", "<= 128"),
    ({"seed": 1.5}, "seed", "int"),
    ({"stop": ["a", ""]}, "stop", "empty"),
    ({"stop": ["x"] * 65}, "stop", "64"),
    ({"logit_bias": {"x": 1}}, "logit_bias", "no token id"),
    ({"logit_bias": {"49152": 1}}, "logit_bias", "49151"),
    ({"logit_bias": {"5": 101}}, "logit_bias[...]", "<= 100"),
    ({"stop_token_ids": [49152]}, "stop_token_ids", "49151"),
    ({"min_tokens": 5, "max_tokens": 4}, "min_tokens", "more than max_tokens"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "stream"),
    ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x", "unknown field"),
    ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation", "false"),
    ({"stream": True, "prompt_logprobs": 0}, "prompt_logprobs", "stream"),
    ({"prompt_logprobs": 21}, "prompt_logprobs", "at most 20"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "-1 or at least 1"),
    ({"cache_salt": ""}, "cache_salt", ">= 1"),
    ({"max_tokens": 257}, "max_tokens", "maximum context length is 256"),
    ({"temperatur": 1}, "temperatur", "did you mean temperature?"),
    ({"nonsense": 1}, "nonsense", "Accepted: "),
    ({"guided_regex": "("}, "guided_regex", "regex"),
    ({"guided_json": "{"}, "guided_json", "JSON"),
    ({"guided_json": {"type": "nonsense"}}, "guided_json", "nonsense"),
    ({"guided_grammar": "start: missing"}, "guided_grammar", "missing"),
    ({"guided_choice": []}, "guided_choice", "at least one"),
    ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice", "one grammar"),
    ({"structured_outputs": {}}, "structured_outputs", "exactly one"),
    ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs", "exactly one"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "json_schema"),
    ({"response_format": {"type": "xml"}}, "response_format.type", "xml"),
]
ONLY_COMPLETIONS = [
    ({"prompt": ""}, "prompt", "empty"),
    ({"prompt": []}, "prompt", "nothing"),
    ({"prompt": [1, "a"]}, "prompt", "mix"),
    ({"prompt": [[1], []]}, "prompt", "empty"),
    ({"prompt": [49152]}, "prompt", "49151"),
    ({"prompt": [-1]}, "prompt[0]", ">= 0"),
    ({"prompt": ["a"] * 1025}, "prompt", "at most 1024"),
    ({"prompt": ["a"] * 9, "n": 128}, "prompt", "9 prompts with 128 choices each"),
    ({"prompt": list(range(256))}, "prompt", "maximum context length is 256"),
    ({"best_of": 2}, "best_of", "the value of n, 1"),
    ({"logprobs": 21}, "logprobs", "at most 20"),
    ({"max_tokens": -1}, "max_tokens", ">= 0"),
    ({"messages": []}, "messages", "unknown field"),
]
ONLY_CHAT = [
    ({"messages": []}, "messages", ">= 1"),
    ({"messages": [{"role": "robot"}]}, "messages[0].role", "robot"),
    ({"messages": [{"role": "user", "content": "x", "mood": 1}]}, "messages[0].mood", "unknown field"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages", "image_url"),
    ({"messages": [{"role": "user", "content": "word " * 300}]}, "prompt", "maximum context length is 256"),
    ({"max_tokens": 0}, "max_tokens", ">= 1"),
    ({"max_tokens": 1, "max_completion_tokens": 2}, "max_tokens", "one of them"),
    ({"max_completion_tokens": 300}, "max_completion_tokens", "maximum context length"),
    ({"top_logprobs": 2}, "top_logprobs", "logprobs: true"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "at most 20"),
    ({"tool_choice": "required"}, "tool_choice", "no tools"),
    ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice", "names g"),
    ({"tools": [TOOL], "tool_choice": "maybe"}, "tool_choice", "maybe"),
    ({"tools": [TOOL, TOOL]}, "tools", "same name"),
    ({"tools": [{"type": "retrieval"}]}, "tools[0].type", "retrieval"),
    ({"tools": [TOOL], "tool_choice": "required", "guided_regex": "a"}, "tool_choice", "one grammar"),
    ({"chat_template_kwargs": {"mood": 1}}, "messages", "mood"),
    ({"chat_template_kwargs": {"tools": 1}}, "chat_template_kwargs", "tools"),
    ({"add_generation_prompt": True, "continue_final_message": True}, "messages", "exclude"),
    ({"echo": True}, "echo", "unknown field"),
]
CASES = [
    *((COMPLETIONS, PROMPT | fields, param, words) for fields, param, words in BOTH + ONLY_COMPLETIONS),
    *((CHAT, MESSAGES | fields, param, words) for fields, param, words in BOTH + ONLY_CHAT),
]


@pytest.mark.parametrize(("path", "body", "param", "words"), CASES, ids=lambda value: str(value)[:60])
async def test_refused_with_the_field_named(
    app: Starlette, engine: ScriptedEngine, path: str, body: dict[str, Any], param: str, words: str
) -> None:
    exchange = await post(app, path, body)
    assert exchange.status == 400
    assert exchange.error["param"] == param
    assert words in exchange.error["message"]
    assert exchange.error["type"] == "invalid_request_error"
    assert not engine.requests


@pytest.mark.parametrize("name", sorted(REFUSED))
async def test_known_but_not_implemented_says_what_to_do(app: Starlette, name: str) -> None:
    exchange = await post(app, CHAT, MESSAGES | {name: "x"})
    assert exchange.error["message"] == f"{name} is not supported: {REFUSED[name]}"
    assert exchange.error["code"] == "unsupported_parameter"
    assert (await post(app, CHAT, MESSAGES | {name: None})).status == 200


HARMLESS_VALUES: dict[str, tuple[Any, Any]] = {
    "safety_identifier": ("x", 1),
    "prompt_cache_key": ("x", 1),
    "store": (False, True),
    "service_tier": ("auto", "flex"),
    "modalities": (["text"], ["audio"]),
    "spaces_between_special_tokens": (True, "x"),
    "use_beam_search": (False, True),
    "length_penalty": (1.0, 1.2),
}


@pytest.mark.parametrize("name", sorted(HARMLESS))
async def test_harmless_fields_only_with_values_that_change_nothing(app: Starlette, name: str) -> None:
    good, bad = HARMLESS_VALUES[name]
    assert (await post(app, CHAT, MESSAGES | {name: good})).status == 200
    exchange = await post(app, CHAT, MESSAGES | {name: bad})
    assert exchange.status == 400
    assert exchange.error["param"] == name
    assert "accepted: " in exchange.error["message"]


async def test_over_long_prompts_have_openais_code(app: Starlette) -> None:
    exchange = await post(app, COMPLETIONS, {"prompt": "word " * 300})
    assert exchange.error["code"] == "context_length_exceeded"


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b'"x"', b"\xff", b'{"prompt": "\xff"}'])
async def test_bodies_that_are_no_json_object(app: Starlette, data: bytes) -> None:
    exchange = await post(app, COMPLETIONS, data)
    assert exchange.status == 400
    assert exchange.error["type"] == "invalid_request_error"


async def test_other_content_types(app: Starlette) -> None:
    form = {"content-type": "application/x-www-form-urlencoded"}
    assert (await post(app, COMPLETIONS, PROMPT, form)).status == 415
    assert (await post(app, COMPLETIONS, PROMPT, {"content-type": "application/json; charset=utf-8"})).status == 200


async def test_body_limit(app: Starlette, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "MAX_BODY_BYTES", 100)
    exchange = await post(app, COMPLETIONS, {"prompt": "x" * 100})
    assert exchange.status == 413
    assert exchange.error["code"] == "body_too_large"


async def test_routes_and_methods(app: Starlette) -> None:
    missing = await call(app, "GET", "/v1/nothing")
    assert missing.status == 404
    assert missing.error["code"] == "route_not_found"
    wrong = await call(app, "GET", COMPLETIONS)
    assert wrong.status == 405
    assert "POST" in wrong.error["message"]
    assert wrong.headers["allow"] == "POST"


async def test_unknown_model(app: Starlette) -> None:
    exchange = await post(app, COMPLETIONS, PROMPT | {"model": "gpt-9"})
    assert exchange.status == 404
    assert exchange.error["code"] == "model_not_found"
    assert "tiny, default" in exchange.error["message"]
    assert (await post(app, COMPLETIONS, PROMPT | {"model": "default"})).json["model"] == "tiny"
