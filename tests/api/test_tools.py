"""Tools: what the model is shown, what its output is bound to, and what comes back."""

from __future__ import annotations

import json
from typing import Any

import pytest
from asgi import post
from llguidance import LLMatcher, LLTokenizer
from scripted import ScriptedEngine, outputs_for
from starlette.applications import Starlette
from test_shapes import assembled, produce

from atom_async.api.requests import FunctionDefinition, Tool
from atom_async.api.tools import calls_schema
from atom_async.text.tokenizer import Tokenizer
from atom_async.wire.grammar import to_llguidance
from atom_async.wire.messages import unpack_ints
from atom_async.wire.sampling import Grammar

CHAT = "/v1/chat/completions"
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Today's weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
NOTHING: dict[str, Any] = {"type": "function", "function": {"name": "nothing"}}
BASE: dict[str, Any] = {"messages": [{"role": "user", "content": "Weather?"}], "tools": [WEATHER, NOTHING]}
HERMES = 'Let me see.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
TWO = HERMES + '\n<tool_call>\n{"name": "nothing", "arguments": {}}\n</tool_call>'


def prompt_of(engine: ScriptedEngine, tokenizer: Tokenizer) -> str:
    return tokenizer.decode(list(unpack_ints(engine.requests[-1].prompt_token_ids)), skip_special_tokens=False)


def accepts(grammar: Grammar, text: str) -> bool:
    """Whether the whole text is in the language, by llguidance's own matcher over bytes."""
    matcher = LLMatcher(byte_tokenizer(), to_llguidance(grammar))
    return matcher.consume_tokens(list(text.encode())) and matcher.is_accepting()


def byte_tokenizer() -> LLTokenizer:
    return LLTokenizer("byte")


@pytest.mark.parametrize("stream", [False, True])
async def test_auto_reads_the_models_own_format(
    app: Starlette, engine: ScriptedEngine, tokenizer: Tokenizer, stream: bool
) -> None:
    produce(engine, tokenizer, TWO)
    exchange = await post(app, CHAT, BASE | {"stream": stream})
    if stream:
        whole = assembled(exchange.events)[0]
        content, reason, calls = whole["text"], whole["finish_reason"], list(whole["calls"].values())
    else:
        (choice,) = exchange.json["choices"]
        content, reason = choice["message"]["content"], choice["finish_reason"]
        calls = [{"id": call["id"], **call["function"]} for call in choice["message"]["tool_calls"]]
        assert all(call["type"] == "function" for call in choice["message"]["tool_calls"])
    assert (content, reason) == ("Let me see.", "tool_calls")
    assert [(call["name"], json.loads(call["arguments"])) for call in calls] == [
        ("get_weather", {"city": "Paris"}),
        ("nothing", {}),
    ]
    assert len({call["id"] for call in calls}) == 2
    assert engine.requests[-1].sampling.grammar is None
    assert "get_weather" in prompt_of(engine, tokenizer)


async def test_only_calls_have_null_content(app: Starlette, engine: ScriptedEngine, tokenizer: Tokenizer) -> None:
    produce(engine, tokenizer, HERMES.removeprefix("Let me see.\n"))
    (choice,) = (await post(app, CHAT, BASE)).json["choices"]
    assert choice["message"]["content"] is None


@pytest.mark.parametrize("stream", [False, True])
async def test_length_is_not_masked_by_calls(
    app: Starlette, engine: ScriptedEngine, tokenizer: Tokenizer, stream: bool
) -> None:
    produce(engine, tokenizer, HERMES[:-20], end=None)
    exchange = await post(app, CHAT, BASE | {"stream": stream})
    reason = assembled(exchange.events)[0]["finish_reason"] if stream else exchange.json["choices"][0]["finish_reason"]
    assert reason == "length"


@pytest.mark.parametrize("stream", [False, True])
async def test_one_call_at_most(app: Starlette, engine: ScriptedEngine, tokenizer: Tokenizer, stream: bool) -> None:
    """The request ends where a second call begins."""
    produce(engine, tokenizer, TWO + " and much more", end=None)
    exchange = await post(app, CHAT, BASE | {"parallel_tool_calls": False, "stream": stream})
    if stream:
        whole = assembled(exchange.events)[0]
        names, reason = [call["name"] for call in whole["calls"].values()], whole["finish_reason"]
    else:
        (choice,) = exchange.json["choices"]
        names, reason = [call["function"]["name"] for call in choice["message"]["tool_calls"]], choice["finish_reason"]
    assert (names, reason) == (["get_weather"], "tool_calls")
    assert engine.finished == [engine.requests[-1].request_id]


async def test_tokens_in_flight_at_the_cut_are_not_counted(
    app: Starlette, engine: ScriptedEngine, tokenizer: Tokenizer
) -> None:
    """The engine's last output comes after the second call has begun."""
    head = tokenizer.encode(TWO, add_special_tokens=False)
    body = BASE | {"parallel_tool_calls": False, "logprobs": True, "return_token_ids": True}
    answers = []
    for in_flight in ([], [28, 28, 28]):
        ids = head + in_flight
        engine.script = lambda request, ids=ids: outputs_for(request, ids, sizes=[1] * len(head) + [99], end=2)
        answers.append((await post(app, CHAT, body)).json)
    short, long = answers
    assert long["usage"] == short["usage"]
    assert long["choices"][0]["token_ids"] == short["choices"][0]["token_ids"]
    assert 0 < short["usage"]["completion_tokens"] < len(head)
    assert head[: short["usage"]["completion_tokens"]] == short["choices"][0]["token_ids"]


async def test_none_shows_no_tools_and_reads_no_calls(
    app: Starlette, engine: ScriptedEngine, tokenizer: Tokenizer
) -> None:
    produce(engine, tokenizer, HERMES)
    (choice,) = (await post(app, CHAT, BASE | {"tool_choice": "none"})).json["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == (HERMES, "stop")
    assert "tool_calls" not in choice["message"]
    assert "get_weather" not in prompt_of(engine, tokenizer)


@pytest.mark.parametrize("stream", [False, True])
async def test_required(app: Starlette, engine: ScriptedEngine, tokenizer: Tokenizer, stream: bool) -> None:
    text = '[{"name": "nothing", "arguments": {}}, {"name": "get_weather", "arguments": {"city": "Oslo"}}]'
    produce(engine, tokenizer, text)
    exchange = await post(app, CHAT, BASE | {"tool_choice": "required", "stream": stream})
    if stream:
        whole = assembled(exchange.events)[0]
        calls, content = list(whole["calls"].values()), whole["text"]
    else:
        message = exchange.json["choices"][0]["message"]
        calls, content = [call["function"] for call in message["tool_calls"]], message["content"] or ""
    assert [call["name"] for call in calls] == ["nothing", "get_weather"]
    assert json.loads(calls[1]["arguments"]) == {"city": "Oslo"}
    assert content == ""
    grammar = engine.requests[-1].sampling.grammar
    assert grammar is not None
    assert accepts(grammar, text)
    assert not accepts(grammar, "[]")
    assert not accepts(grammar, '[{"name": "other", "arguments": {}}]')
    assert not accepts(grammar, '[{"name": "get_weather", "arguments": {}}]')


async def test_required_once(app: Starlette, engine: ScriptedEngine) -> None:
    await post(app, CHAT, BASE | {"tool_choice": "required", "parallel_tool_calls": False})
    grammar = engine.requests[-1].sampling.grammar
    assert grammar is not None
    one = '{"name": "nothing", "arguments": {}}'
    assert accepts(grammar, f"[{one}]")
    assert not accepts(grammar, f"[{one}, {one}]")


async def test_required_cut_by_the_length(app: Starlette, engine: ScriptedEngine, tokenizer: Tokenizer) -> None:
    """What is left of a call that did not get its name is not content."""
    produce(engine, tokenizer, '[{"name": "nothing", "arguments": {}}, {"na', end=None)
    (choice,) = (await post(app, CHAT, BASE | {"tool_choice": "required"})).json["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == (None, "length")
    assert len(choice["message"]["tool_calls"]) == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_named(app: Starlette, engine: ScriptedEngine, tokenizer: Tokenizer, stream: bool) -> None:
    produce(engine, tokenizer, '{"city": "Rome"}')
    choice_of = {"tool_choice": {"type": "function", "function": {"name": "get_weather"}}}
    exchange = await post(app, CHAT, BASE | choice_of | {"stream": stream})
    if stream:
        whole = assembled(exchange.events)[0]
        (call,), reason = whole["calls"].values(), whole["finish_reason"]
    else:
        (choice,) = exchange.json["choices"]
        (call,), reason = [call["function"] for call in choice["message"]["tool_calls"]], choice["finish_reason"]
    assert (call["name"], call["arguments"], reason) == ("get_weather", '{"city": "Rome"}', "tool_calls")
    grammar = engine.requests[-1].sampling.grammar
    assert grammar is not None
    assert accepts(grammar, '{"city": "Rome"}')
    assert not accepts(grammar, "{}")


async def test_strict_binds_calls_but_not_text(app: Starlette, engine: ScriptedEngine) -> None:
    strict = {"type": "function", "function": WEATHER["function"] | {"strict": True}}
    await post(app, CHAT, BASE | {"tools": [strict, NOTHING]})
    grammar = engine.requests[-1].sampling.grammar
    assert grammar is not None
    assert accepts(grammar, "Just text, with < and { in it.")
    assert accepts(grammar, TWO)
    assert not accepts(grammar, HERMES.replace("city", "town"))
    assert not accepts(grammar, HERMES.replace("get_weather", "get_whether"))


async def test_a_schema_or_calls(app: Starlette, engine: ScriptedEngine) -> None:
    """Tools and a response format together: the answer follows the schema, or is calls."""
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    shape = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    assert (await post(app, CHAT, BASE | {"response_format": shape})).status == 200
    grammar = engine.requests[-1].sampling.grammar
    assert grammar is not None
    assert accepts(grammar, '{"ok": true}')
    assert accepts(grammar, TWO.removeprefix("Let me see.\n"))
    assert not accepts(grammar, "Just text")
    assert not accepts(grammar, "{}")


async def test_grammars_that_leave_no_room_for_calls(app: Starlette) -> None:
    exchange = await post(app, CHAT, BASE | {"guided_regex": "a"})
    assert (exchange.status, exchange.error["param"]) == (400, "guided_regex")
    assert "tool_choice none" in exchange.error["message"]
    assert (await post(app, CHAT, BASE | {"guided_regex": "a", "tool_choice": "none"})).status == 200


async def test_references_inside_parameters_still_resolve() -> None:
    """Each tool's own definitions, although both are called `n`."""

    def tool(name: str, kind: str) -> Tool:
        parameters = {
            "type": "object",
            "properties": {"x": {"$ref": "#/$defs/n"}},
            "required": ["x"],
            "$defs": {"n": {"type": kind}},
        }
        return Tool(type="function", function=FunctionDefinition(name=name, parameters=parameters))

    schema = json.dumps(calls_schema([tool("a", "integer"), tool("b", "boolean")], None))
    grammar = Grammar("json_schema", schema)
    assert accepts(grammar, '[{"name": "a", "arguments": {"x": 1}}, {"name": "b", "arguments": {"x": true}}]')
    assert not accepts(grammar, '[{"name": "a", "arguments": {"x": true}}]')


async def test_schemas_that_cannot_be_enforced_name_the_tools(app: Starlette) -> None:
    bad = {"type": "function", "function": {"name": "f", "parameters": {"type": "nonsense"}}}
    exchange = await post(app, CHAT, BASE | {"tools": [bad], "tool_choice": "required"})
    assert exchange.status == 400
    assert exchange.error["param"] == "tool_choice"


async def test_a_conversation_with_calls_and_results(
    app: Starlette, engine: ScriptedEngine, tokenizer: Tokenizer
) -> None:
    """What a client sends back after a call, as the openai client dumps it."""
    call = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'}}
    messages = [
        {"role": "user", "content": "Weather?"},
        {
            "role": "assistant",
            "content": None,
            "refusal": None,
            "annotations": None,
            "audio": None,
            "function_call": None,
            "tool_calls": [call],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "sunny"}]},
    ]
    exchange = await post(app, CHAT, BASE | {"messages": messages})
    assert exchange.status == 200, exchange.data
    prompt = prompt_of(engine, tokenizer)
    assert "sunny" in prompt
    assert '"city": "Paris"' in prompt
