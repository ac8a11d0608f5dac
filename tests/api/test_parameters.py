"""Every parameter reaches the engine as what it means: each case fails when its field is ignored."""

from __future__ import annotations

from typing import Any

import pytest
from asgi import post
from scripted import ScriptedEngine
from starlette.applications import Starlette

from atom_async.api.state import ServerState, TextSide
from atom_async.text.tokenizer import Tokenizer
from atom_async.wire.messages import unpack_ints
from atom_async.wire.sampling import Grammar, SamplingParams

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
PROMPT: dict[str, Any] = {"prompt": "Hello there"}
MESSAGES: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello"}]}
EOS = 2

CASES: list[tuple[dict[str, Any], str, Any]] = [
    ({}, "temperature", 1.0),
    ({"temperature": 0}, "temperature", 0.0),
    ({"top_p": 0.5}, "top_p", 0.5),
    ({"top_k": 7}, "top_k", 7),
    ({"top_k": -1}, "top_k", 0),
    ({"min_p": 0.25}, "min_p", 0.25),
    ({"presence_penalty": 1.5}, "presence_penalty", 1.5),
    ({"frequency_penalty": -1.5}, "frequency_penalty", -1.5),
    ({"repetition_penalty": 1.25}, "repetition_penalty", 1.25),
    ({"logit_bias": {"5": -3, "49151": 2.5}}, "logit_bias", ((5, -3.0), (49151, 2.5))),
    ({"seed": 11}, "seed", 11),
    ({"seed": -1}, "seed", 2**64 - 1),
    ({"max_tokens": 9}, "max_tokens", 9),
    ({"min_tokens": 3}, "min_tokens", 3),
    ({}, "end_token_ids", (EOS,)),
    ({"ignore_eos": True}, "end_token_ids", ()),
    ({"stop_token_ids": [9, EOS, 8]}, "end_token_ids", (EOS, 9, 8)),
    ({"ignore_eos": True, "stop_token_ids": [9]}, "end_token_ids", (9,)),
    ({}, "logprobs", -1),
    ({}, "prompt_logprobs", -1),
    ({"prompt_logprobs": 3}, "prompt_logprobs", 3),
    ({}, "grammar", None),
    ({"guided_json": {"type": "integer"}}, "grammar", Grammar("json_schema", '{"type":"integer"}')),
    ({"guided_json": '{"type": "integer"}'}, "grammar", Grammar("json_schema", '{"type": "integer"}')),
    ({"guided_regex": "a+"}, "grammar", Grammar("regex", "a+")),
    ({"guided_choice": ["a", 'b"']}, "grammar", Grammar("lark", 'start: "a" | "b\\""')),
    ({"guided_grammar": 'start: "a"'}, "grammar", Grammar("lark", 'start: "a"')),
    ({"structured_outputs": {"regex": "a+"}}, "grammar", Grammar("regex", "a+")),
    ({"structured_outputs": {"json_object": True}}, "grammar", Grammar("json_schema", '{"type":"object"}')),
    ({"response_format": {"type": "text"}}, "grammar", None),
    ({"response_format": {"type": "json_object"}}, "grammar", Grammar("json_schema", '{"type":"object"}')),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "null"}}}},
        "grammar",
        Grammar("json_schema", '{"type":"null"}'),
    ),
]


async def sampling_of(app: Starlette, engine: ScriptedEngine, path: str, body: dict[str, Any]) -> SamplingParams:
    exchange = await post(app, path, body)
    assert exchange.status == 200, exchange.data
    return engine.requests[-1].sampling


@pytest.mark.parametrize(("path", "base"), [(COMPLETIONS, PROMPT), (CHAT, MESSAGES)], ids=["completions", "chat"])
@pytest.mark.parametrize(("fields", "name", "value"), CASES, ids=lambda value: str(value)[:50])
async def test_reaches_the_engine(
    app: Starlette,
    engine: ScriptedEngine,
    path: str,
    base: dict[str, Any],
    fields: dict[str, Any],
    name: str,
    value: Any,
) -> None:
    assert getattr(await sampling_of(app, engine, path, base | fields), name) == value


async def test_max_tokens_defaults(app: Starlette, engine: ScriptedEngine, tokenizer: Tokenizer) -> None:
    """16 for completions as far as there is room; what the context leaves for chat."""
    assert (await sampling_of(app, engine, COMPLETIONS, PROMPT)).max_tokens == 16
    assert (await sampling_of(app, engine, COMPLETIONS, {"prompt": [1] * 250})).max_tokens == 6
    chat = await sampling_of(app, engine, CHAT, MESSAGES)
    assert chat.max_tokens == 256 - len(unpack_ints(engine.requests[-1].prompt_token_ids))
    assert (await sampling_of(app, engine, CHAT, MESSAGES | {"max_completion_tokens": 5})).max_tokens == 5
    assert (await sampling_of(app, engine, COMPLETIONS, {"prompt": [1] * 256, "max_tokens": 0})).max_tokens == 0


async def test_logprobs_of_each_endpoint(app: Starlette, engine: ScriptedEngine) -> None:
    assert (await sampling_of(app, engine, COMPLETIONS, PROMPT | {"logprobs": 0})).logprobs == 0
    assert (await sampling_of(app, engine, COMPLETIONS, PROMPT | {"logprobs": 4})).logprobs == 4
    echoed = await sampling_of(app, engine, COMPLETIONS, PROMPT | {"logprobs": 4, "echo": True})
    assert (echoed.logprobs, echoed.prompt_logprobs) == (4, 4)
    assert (await sampling_of(app, engine, CHAT, MESSAGES | {"logprobs": True})).logprobs == 0
    assert (await sampling_of(app, engine, CHAT, MESSAGES | {"logprobs": True, "top_logprobs": 3})).logprobs == 3


async def test_salt_and_priority(app: Starlette, engine: ScriptedEngine) -> None:
    await post(app, CHAT, MESSAGES | {"cache_salt": "mine", "priority": -4})
    assert (engine.requests[-1].cache_salt, engine.requests[-1].priority) == ("mine", -4)
    await post(app, CHAT, MESSAGES)
    assert (engine.requests[-1].cache_salt, engine.requests[-1].priority) == ("", 0)


async def test_choices_have_seeds_and_ids_of_their_own(app: Starlette, engine: ScriptedEngine) -> None:
    exchange = await post(app, COMPLETIONS, {"prompt": ["a", "b"], "n": 3, "seed": 10})
    assert [r.sampling.seed for r in engine.requests] == [10, 11, 12, 10, 11, 12]
    assert [r.request_id for r in engine.requests] == [f"{exchange.json['id']}-{i}" for i in range(6)]
    prompts = [r.prompt_token_ids for r in engine.requests]
    assert prompts == [prompts[0]] * 3 + [prompts[3]] * 3
    assert prompts[0] != prompts[3]


async def test_seeds_are_drawn_from_the_servers(app: Starlette, engine: ScriptedEngine, state: ServerState) -> None:
    """Equal over restarts with equal --seed, different from request to request."""
    state.seeds.seed(5)
    await post(app, COMPLETIONS, PROMPT | {"n": 2})
    await post(app, COMPLETIONS, PROMPT)
    drawn = [r.sampling.seed for r in engine.requests]
    assert len(set(drawn)) == 3
    state.seeds.seed(5)
    await post(app, COMPLETIONS, PROMPT | {"n": 2})
    assert [r.sampling.seed for r in engine.requests[3:]] == drawn[:2]


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("Hello there", [["Hello there"]]),
        (["Hello", " there"], [["Hello"], [" there"]]),
        ([1, 2, 3], [[1, 2, 3]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
    ],
    ids=["text", "texts", "ids", "lists of ids"],
)
async def test_forms_of_prompts(
    app: Starlette, engine: ScriptedEngine, tokenizer: Tokenizer, prompt: Any, expected: list[list[Any]]
) -> None:
    await post(app, COMPLETIONS, {"prompt": prompt})
    sent = [list(unpack_ints(r.prompt_token_ids)) for r in engine.requests]
    assert sent == [tokenizer.encode(ids[0]) if isinstance(ids[0], str) else ids for ids in expected]


async def test_long_texts_are_the_same_tokens(app: Starlette, state: ServerState, tokenizer: Tokenizer) -> None:
    """From 8,192 characters on another thread tokenizes."""
    text = "word " * 3000
    exchange = await post(app, "/tokenize", {"prompt": text})
    assert exchange.json["tokens"] == tokenizer.encode(text)


@pytest.mark.parametrize(("keep", "kept"), [(2, [4, 5]), (9, [1, 2, 3, 4, 5]), (-1, [1, 2, 3, 4, 5])])
async def test_truncate_prompt_tokens(app: Starlette, engine: ScriptedEngine, keep: int, kept: list[int]) -> None:
    await post(app, COMPLETIONS, {"prompt": [1, 2, 3, 4, 5], "truncate_prompt_tokens": keep})
    assert list(unpack_ints(engine.requests[-1].prompt_token_ids)) == kept


async def test_truncated_to_what_fits(app: Starlette, engine: ScriptedEngine) -> None:
    exchange = await post(app, COMPLETIONS, {"prompt": [1] * 999, "truncate_prompt_tokens": -1, "max_tokens": 56})
    assert exchange.status == 200
    assert len(unpack_ints(engine.requests[-1].prompt_token_ids)) == 200


async def test_chat_is_rendered_by_the_models_template(
    app: Starlette, engine: ScriptedEngine, text_side: TextSide
) -> None:
    assert text_side.chat_template is not None
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    await post(app, CHAT, {"messages": messages})
    text = text_side.chat_template.render_chat(messages)
    assert list(unpack_ints(engine.requests[-1].prompt_token_ids)) == text_side.tokenizer.encode(
        text, add_special_tokens=False
    )


async def test_continue_final_message(app: Starlette, engine: ScriptedEngine, tokenizer: Tokenizer) -> None:
    messages = [{"role": "user", "content": "Count"}, {"role": "assistant", "content": "One, two,"}]
    await post(app, CHAT, {"messages": messages, "continue_final_message": True})
    text = tokenizer.decode(list(unpack_ints(engine.requests[-1].prompt_token_ids)), skip_special_tokens=False)
    assert text.endswith("One, two,")
    await post(app, CHAT, {"messages": messages, "add_generation_prompt": False})
    text = tokenizer.decode(list(unpack_ints(engine.requests[-1].prompt_token_ids)), skip_special_tokens=False)
    assert text.endswith("One, two,<|im_end|>\n")


async def test_no_chat_template(app: Starlette, state: ServerState) -> None:
    assert state.served is not None
    served = state.served
    from dataclasses import replace

    state.served = replace(served, text=TextSide(served.tokenizer, None, "none"))
    exchange = await post(app, CHAT, MESSAGES)
    assert exchange.status == 400
    assert "--chat-template" in exchange.error["message"]
