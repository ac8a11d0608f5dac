"""Whatever fields a body combines, the answer is a result or the client's fault in OpenAI's shape, never ours."""

import asyncio
from typing import Any

from asgi import post
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scripted import ScriptedEngine, outputs_for
from starlette.applications import Starlette

Values = st.SearchStrategy[Any]
odd: Values = st.sampled_from(
    [None, True, -1, 0, 0.5, 300, 2**31, 2**63, 2**64, 1e308, "", "\ud83d", "9" * 5000, "²", [], {}, [[]], {"": []}]
)


def mostly(*values: Any) -> Values:
    """One of these, and now and then something odd: of many odd ones, the first would hide the others."""
    return st.integers(0, 9).flatmap(lambda draw: odd if draw == 9 else st.sampled_from(values))


SCHEMAS = ({}, {"type": "object"}, {"type": "nonsense"}, {"$ref": "#/$defs/none"}, {"enum": []}, {"properties": 3})
FUNCTIONS = (
    {"name": "f"},
    {"name": 'a"b', "strict": True},
    {"name": "g", "parameters": {"type": "object", "properties": {"x": {"$ref": "#/$defs/x"}}, "$defs": {"x": {}}}},
    {"name": "h", "parameters": {"type": "nonsense"}, "strict": False},
)
CALL = {"type": "function", "function": {"name": "f", "arguments": "{"}}
MESSAGES = (
    {"role": "user", "content": "hi"},
    {"role": "user", "content": [{"type": "text", "text": "hi"}]},
    {"role": "system", "content": "é"},
    {"role": "developer", "content": ""},
    {"role": "assistant", "tool_calls": [CALL]},
    {"role": "assistant", "content": "<tool_call>"},
    {"role": "tool", "content": "1", "tool_call_id": "a"},
    {"role": "user", "content": [{"type": "image_url"}]},
)
FLAGS = ("stream", "ignore_eos", "return_token_ids", "add_special_tokens", "skip_special_tokens")
SHARED: dict[str, Values] = {
    **dict.fromkeys((*FLAGS, "include_stop_str_in_output"), mostly(True, False)),
    **dict.fromkeys(("top_p", "min_p", "presence_penalty", "temperature"), mostly(0.1, 0.5, 1)),
    **dict.fromkeys(("top_k", "min_tokens", "seed", "max_tokens", "prompt_logprobs"), mostly(1, 2, 20)),
    "truncate_prompt_tokens": mostly(-1, 1, 2),
    "n": mostly(1, 2, 3),
    "stream_options": mostly({}, {"include_usage": True}),
    "stop": mostly("a", ["\n", " the"]),
    "stop_token_ids": mostly([1], [2, 49151]),
    "logit_bias": mostly({"1": 2}, {"05": 1}, {"9" * 5000: 1}, {"49152": 1}),
    "guided_json": mostly(*SCHEMAS),
    "guided_regex": mostly("[a-z]+", "(", "(?=a)"),
    "guided_choice": mostly(["a"], ["é", "\n"]),
    "guided_grammar": mostly('start: "a"', "start: x", "start: start"),
    "structured_outputs": mostly({"json": {}}, {"choice": ["a"]}, {"json_object": True}),
    "response_format": mostly({"type": "text"}, {"type": "json_object"}, {"type": "json_schema"}),
    "user": mostly("me"),
    "zzz": odd,
}
COMPLETION = SHARED | {"echo": mostly(True, False), "logprobs": mostly(0, 2), "best_of": mostly(1, 2)}
CHAT = SHARED | {
    "logprobs": mostly(True, False),
    "top_logprobs": mostly(0, 2),
    "max_completion_tokens": mostly(1, 20),
    "tools": st.lists(st.sampled_from(FUNCTIONS), max_size=3).map(
        lambda functions: [{"type": "function", "function": function} for function in functions]
    ),
    "tool_choice": mostly("auto", "none", "required", {"type": "function", "function": {"name": "f"}}),
    "parallel_tool_calls": mostly(True, False),
    "add_generation_prompt": mostly(True, False),
    "continue_final_message": mostly(True, False),
    "chat_template_kwargs": mostly({}, {"messages": []}, {"self": 1}, {"tools": 1}),
}
PROMPTS = mostly("a", "<|im_end|>", ["a", " the"], [1, 2], [[1], [2, 3]])


def bodies(own: dict[str, Values], fields: dict[str, Values]) -> st.SearchStrategy[dict[str, Any]]:
    chosen = st.lists(st.sampled_from(sorted(fields)), max_size=6, unique=True)
    return chosen.flatmap(lambda names: st.fixed_dictionaries(own | {name: fields[name] for name in names}))


calls = st.one_of(
    st.tuples(st.just("/v1/completions"), bodies({"prompt": PROMPTS}, COMPLETION)),
    st.tuples(
        st.just("/v1/chat/completions"),
        bodies({"messages": st.lists(mostly(*MESSAGES), min_size=1, max_size=3)}, CHAT),
    ),
)
OUTPUTS = ([28], [253, 198, 216], [2], [49151, 160, 233])
"""Ordinary tokens, special ones and parts of characters."""


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=150)
@given(calls)
def test_any_combination_is_answered(app: Starlette, engine: ScriptedEngine, call: tuple[str, dict[str, Any]]) -> None:
    path, body = call
    engine.script = lambda request: outputs_for(request, OUTPUTS[len(engine.requests) % 4], end=2)
    reply = asyncio.run(post(app, path, body))
    assert reply.status in (200, 400), reply.data
    if reply.status == 400:
        assert set(reply.error) == {"message", "type", "param", "code"}
        assert reply.error["message"]
    elif body.get("stream"):
        assert reply.events
    else:
        assert reply.json["choices"]
    assert not engine.running
    assert not engine.left_early
