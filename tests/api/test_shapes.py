"""Answers in OpenAI's shape, in one piece and streamed, whatever pieces the engine's output comes in."""

from __future__ import annotations

from typing import Any

import pytest
from asgi import Exchange, post
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scripted import ScriptedEngine, outputs_for
from starlette.applications import Starlette

from atom_async.engine.client import EngineDead, EngineDraining, EngineOutput, EngineRequest, RequestRejected
from atom_async.text.tokenizer import Tokenizer

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MESSAGES: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello"}]}
EOS = 2
USAGE = {"stream": True, "stream_options": {"include_usage": True}}
TEXT = "Atoms are small. 🌍 Ça va, naïve café?\nStop here, not later."


def produce(engine: ScriptedEngine, tokenizer: Tokenizer, text: str, *, end: int | None = EOS, **how: Any) -> list[int]:
    """The engine's answer to everything from now on."""
    ids = tokenizer.encode(text, add_special_tokens=False)
    engine.script = lambda request: outputs_for(request, ids, end=end, **how)
    return ids


def assembled(events: list[Any]) -> dict[int, dict[str, Any]]:
    """What a client puts together from a completions or chat stream, by choice."""
    choices: dict[int, dict[str, Any]] = {}
    for event in events:
        for piece in event["choices"]:
            whole = choices.setdefault(
                piece["index"], {"text": "", "tokens": [], "offsets": [], "calls": {}, "finish_reason": None, "ids": []}
            )
            assert whole["finish_reason"] is None, "a piece after the end"
            delta = piece.get("delta", {})
            whole["text"] += piece.get("text") or delta.get("content") or ""
            whole["finish_reason"] = piece["finish_reason"]
            whole["stop_reason"] = piece["stop_reason"]
            whole["ids"] += piece.get("token_ids", [])
            logprobs = piece["logprobs"] or {}
            whole["tokens"] += logprobs.get("tokens") or [t["token"] for t in logprobs.get("content", [])]
            whole["offsets"] += logprobs.get("text_offset", [])
            for call in delta.get("tool_calls", []):
                known = whole["calls"].setdefault(call["index"], {"name": "", "arguments": "", "id": call.get("id")})
                known["name"] += call["function"].get("name", "")
                known["arguments"] += call["function"].get("arguments", "")
    return choices


async def test_completion(app: Starlette, engine: ScriptedEngine, tokenizer: Tokenizer) -> None:
    ids = produce(engine, tokenizer, " is Paris.", cached=3)
    answer = (await post(app, COMPLETIONS, {"prompt": "The capital of France", "model": "default"})).json
    assert answer["id"].startswith("cmpl-")
    assert (answer["object"], answer["model"]) == ("text_completion", "tiny")
    assert answer["choices"] == [
        {"index": 0, "text": " is Paris.", "logprobs": None, "finish_reason": "stop", "stop_reason": None}
    ]
    prompt = len(tokenizer.encode("The capital of France"))
    assert answer["usage"] == {
        "prompt_tokens": prompt,
        "completion_tokens": len(ids) + 1,
        "total_tokens": prompt + len(ids) + 1,
        "prompt_tokens_details": {"cached_tokens": 3},
    }


async def test_chat(app: Starlette, engine: ScriptedEngine, tokenizer: Tokenizer) -> None:
    produce(engine, tokenizer, "Hi.")
    answer = (await post(app, CHAT, MESSAGES)).json
    assert answer["id"].startswith("chatcmpl-")
    assert answer["object"] == "chat.completion"
    assert answer["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "Hi.", "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": None,
        }
    ]


async def test_chat_stream(app: Starlette, engine: ScriptedEngine, tokenizer: Tokenizer) -> None:
    """The role first, content, the reason in an event of its own, then the usage; usage is null before."""
    produce(engine, tokenizer, "Hi there", sizes=[1, 1, 1])
    exchange = await post(app, CHAT, MESSAGES | USAGE)
    assert exchange.headers["content-type"].startswith("text/event-stream")
    events = exchange.events
    assert {event["object"] for event in events} == {"chat.completion.chunk"}
    assert len({event["id"] for event in events}) == 1
    deltas = [event["choices"][0]["delta"] for event in events[:-1]]
    assert deltas == [{"role": "assistant", "content": ""}, {"content": "Hi"}, {"content": " there"}, {}]
    assert [event["choices"][0]["finish_reason"] for event in events[:-1]] == [None, None, None, "stop"]
    assert events[-1]["choices"] == []
    assert events[-1]["usage"]["completion_tokens"] == 3
    assert all(event["usage"] is None for event in events[:-1])


async def test_streams_have_no_usage_unless_asked_for(
    app: Starlette, engine: ScriptedEngine, tokenizer: Tokenizer
) -> None:
    produce(engine, tokenizer, "Hi")
    for path, body in ((COMPLETIONS, {"prompt": "x"}), (CHAT, MESSAGES)):
        events = (await post(app, path, body | {"stream": True})).events
        assert all("usage" not in event and event["choices"] for event in events)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 5), max_size=30),
    stop=st.lists(st.sampled_from(["Stop", "\nSto", "small. 🌍", "é", "zzz", "here, no"]), max_size=2),
    include=st.booleans(),
    with_logprobs=st.booleans(),
    chat=st.booleans(),
    end=st.sampled_from([EOS, None]),
)
async def test_a_stream_says_what_the_whole_says(
    app: Starlette,
    engine: ScriptedEngine,
    tokenizer: Tokenizer,
    sizes: list[int],
    stop: list[str],
    include: bool,
    with_logprobs: bool,
    chat: bool,
    end: int | None,
) -> None:
    """However the output is cut: same text, tokens, reasons and usage; tokens spell the text up to the cut."""
    produce(engine, tokenizer, TEXT, end=end, sizes=sizes)
    body: dict[str, Any] = {"stop": stop, "include_stop_str_in_output": include}
    body |= MESSAGES if chat else {"prompt": "x"}
    if with_logprobs:
        body["logprobs"] = True if chat else 1
    path = CHAT if chat else COMPLETIONS
    whole = (await post(app, path, body)).json
    events = (await post(app, path, body | USAGE)).events
    streamed = assembled(events)[0]
    (choice,) = whole["choices"]
    assert streamed["text"] == (choice["message"]["content"] if chat else choice["text"])
    assert (streamed["finish_reason"], streamed["stop_reason"]) == (choice["finish_reason"], choice["stop_reason"])
    assert events[-1]["usage"] == whole["usage"]
    expected, matched = cut_at_stop(TEXT, stop, include)
    assert streamed["text"] == expected
    assert streamed["stop_reason"] == matched
    assert streamed["finish_reason"] == ("stop" if matched or end == EOS else "length")
    if with_logprobs:
        shape = choice["logprobs"]
        names = [token["token"] for token in shape["content"]] if chat else shape["tokens"]
        assert streamed["tokens"] == names
        if not chat:  # there, half a character is U+FFFD
            assert_spells(names, expected)


def cut_at_stop(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """What is found by searching the finished text: the stop that is complete first, the longest of several."""
    found = [(text.find(stop) + len(stop), -len(stop), stop) for stop in stops if stop in text]
    if not found:
        return text, None
    end, _, stop = min(found)
    return text[: end if include else end - len(stop)], stop


def assert_spells(names: list[str], text: str) -> None:
    """The tokens are those of the text, the last one perhaps cut."""
    if names and names[-1] == "<|im_end|>":  # a special token is shown, without text, where a stop is
        names = names[:-1]
    pieces = [as_bytes(name) for name in names]
    assert b"".join(pieces).startswith(text.encode())
    assert not pieces or len(b"".join(pieces[:-1])) < len(text.encode())


def as_bytes(name: str) -> bytes:
    return bytes.fromhex(name.removeprefix("bytes:").replace("\\x", "")) if name.startswith("bytes:") else name.encode()


async def test_a_stop_string_frees_the_request(app: Starlette, engine: ScriptedEngine, tokenizer: Tokenizer) -> None:
    """It is finished, not aborted; tokens after the stop count for nothing."""
    ids = produce(engine, tokenizer, "one two three four five")
    answer = (await post(app, COMPLETIONS, {"prompt": "x", "stop": " three", "return_token_ids": True})).json
    (choice,) = answer["choices"]
    assert (choice["text"], choice["stop_reason"]) == ("one two", " three")
    assert choice["token_ids"] == ids[:3]
    assert answer["usage"]["completion_tokens"] == 3
    assert engine.finished == [engine.requests[0].request_id]
    assert not engine.left_early


async def test_stop_token_ids_are_the_stop_reason(app: Starlette, engine: ScriptedEngine, tokenizer: Tokenizer) -> None:
    (stop_id,) = tokenizer.encode(" end", add_special_tokens=False)
    produce(engine, tokenizer, "the", end=stop_id)
    body = {"prompt": "x", "stop_token_ids": [stop_id]}
    (choice,) = (await post(app, COMPLETIONS, body)).json["choices"]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("the", "stop", stop_id)


async def test_skip_special_tokens(app: Starlette, engine: ScriptedEngine, tokenizer: Tokenizer) -> None:
    produce(engine, tokenizer, "a<|im_start|>b")
    (choice,) = (await post(app, COMPLETIONS, {"prompt": "x"})).json["choices"]
    assert choice["text"] == "ab"
    (choice,) = (await post(app, COMPLETIONS, {"prompt": "x", "skip_special_tokens": False})).json["choices"]
    assert choice["text"] == "a<|im_start|>b<|im_end|>"


async def test_min_tokens_also_holds_back_stop_strings(
    app: Starlette, engine: ScriptedEngine, tokenizer: Tokenizer
) -> None:
    produce(engine, tokenizer, "a b a b")
    body = {"prompt": "x", "stop": " b", "min_tokens": 2, "max_tokens": 5}
    assert (await post(app, COMPLETIONS, body)).json["choices"][0]["text"] == "a b a"


@pytest.mark.parametrize("stream", [False, True])
async def test_several_choices(app: Starlette, engine: ScriptedEngine, tokenizer: Tokenizer, stream: bool) -> None:
    """In the order of prompts, then choices; each prompt counts once in the usage."""
    words = [" zero", " one", " two", " three"]

    def script(request: EngineRequest) -> list[EngineOutput | Exception]:
        index = int(request.request_id.rsplit("-")[-1])
        ids = tokenizer.encode(words[index], add_special_tokens=False)
        return outputs_for(request, ids, end=EOS, cached=index % 2)

    engine.script = script
    body = {"prompt": [[1, 2], [3, 4, 5]], "n": 2}
    if stream:
        events = (await post(app, COMPLETIONS, body | USAGE)).events
        texts = [choice["text"] for _, choice in sorted(assembled(events).items())]
        usage = events[-1]["usage"]
    else:
        answer = (await post(app, COMPLETIONS, body)).json
        assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
        texts, usage = [choice["text"] for choice in answer["choices"]], answer["usage"]
    assert texts == words
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (5, 8)
    assert usage["prompt_tokens_details"]["cached_tokens"] == 0


async def test_completion_logprobs(app: Starlette, engine: ScriptedEngine, tokenizer: Tokenizer) -> None:
    produce(engine, tokenizer, "Hi 🌍")
    (choice,) = (await post(app, COMPLETIONS, {"prompt": "x", "logprobs": 2})).json["choices"]
    logprobs = choice["logprobs"]
    assert logprobs["tokens"][0] == "Hi"
    assert all(name.startswith(("bytes:", " ")) for name in logprobs["tokens"][1:])
    assert logprobs["token_logprobs"] == [-0.5 - i for i in range(len(logprobs["tokens"]))]
    assert logprobs["text_offset"][:2] == [0, 2]
    assert logprobs["top_logprobs"][0] == {"Hi": -0.5, tokenizer.token_text(100): -101.5}


async def test_chat_logprobs(app: Starlette, engine: ScriptedEngine, tokenizer: Tokenizer) -> None:
    produce(engine, tokenizer, "é🌍")
    body = MESSAGES | {"logprobs": True, "top_logprobs": 1}
    (choice,) = (await post(app, CHAT, body)).json["choices"]
    content = choice["logprobs"]["content"]
    assert bytes(byte for token in content for byte in token["bytes"]).decode() == "é🌍"
    assert content[0]["logprob"] == -0.5
    assert content[0]["top_logprobs"] == [{"token": content[0]["token"], "logprob": -0.5, "bytes": content[0]["bytes"]}]
    (choice,) = (await post(app, CHAT, MESSAGES | {"logprobs": True})).json["choices"]
    assert choice["logprobs"]["content"][0]["top_logprobs"] == []


@pytest.mark.parametrize("stream", [False, True])
async def test_echo(app: Starlette, engine: ScriptedEngine, tokenizer: Tokenizer, stream: bool) -> None:
    """Prompt and output are one text with one list of tokens; offsets go on."""
    produce(engine, tokenizer, " Paris.")
    prompt = "The capital 🌍 of France is"
    exchange = await post(app, COMPLETIONS, {"prompt": prompt, "echo": True, "logprobs": 1, "stream": stream})
    if stream:
        whole = assembled(exchange.events)[0]
        text, tokens, offsets = whole["text"], whole["tokens"], whole["offsets"]
    else:
        (choice,) = exchange.json["choices"]
        text, tokens = choice["text"], choice["logprobs"]["tokens"]
        offsets = choice["logprobs"]["text_offset"]
        assert choice["logprobs"]["token_logprobs"][0] is None
        assert choice["logprobs"]["top_logprobs"][0] is None
        assert len(choice["logprobs"]["token_logprobs"]) == len(tokens)
    assert text == prompt + " Paris."
    for token, offset in zip(tokens, offsets, strict=True):
        assert token.startswith("bytes:") or text.startswith(token, offset)


async def test_echo_without_output(app: Starlette, engine: ScriptedEngine, tokenizer: Tokenizer) -> None:
    """What evaluation harnesses send: log-probabilities of a prompt, nothing else."""

    def script(request: EngineRequest) -> list[EngineOutput | Exception]:
        first, *_, last = outputs_for(request, [1])
        assert isinstance(first, EngineOutput)
        assert isinstance(last, EngineOutput)
        return [
            EngineOutput(request_id=request.request_id, prompt_logprobs=first.prompt_logprobs, finish_reason="length")
        ]

    engine.script = script
    ids = tokenizer.encode("Hello there")
    body = {"prompt": ids, "echo": True, "logprobs": 1, "max_tokens": 0}
    answer = (await post(app, COMPLETIONS, body)).json
    (choice,) = answer["choices"]
    assert choice["text"] == "Hello there"
    assert choice["logprobs"]["tokens"] == ["Hello", " there"]
    assert answer["usage"]["completion_tokens"] == 0
    assert assembled((await post(app, COMPLETIONS, body | {"stream": True})).events)[0]["text"] == "Hello there"


async def test_prompt_logprobs(app: Starlette, engine: ScriptedEngine, tokenizer: Tokenizer) -> None:
    produce(engine, tokenizer, "x")
    (choice,) = (await post(app, COMPLETIONS, {"prompt": [5, 6], "prompt_logprobs": 1})).json["choices"]
    first, second = choice["prompt_logprobs"]
    assert first is None
    assert second == {"6": {"logprob": -1.5, "rank": 1, "decoded_token": tokenizer.token_text(6)}}
    assert (await post(app, CHAT, MESSAGES | {"prompt_logprobs": 1})).json["prompt_logprobs"][0] is None


async def test_return_token_ids(app: Starlette, engine: ScriptedEngine, tokenizer: Tokenizer) -> None:
    """All that were produced, the one that ended it included."""
    ids = produce(engine, tokenizer, "Hi there")
    body = {"prompt": [5, 6], "return_token_ids": True}
    (choice,) = (await post(app, COMPLETIONS, body)).json["choices"]
    assert (choice["prompt_token_ids"], choice["token_ids"]) == ([5, 6], [*ids, EOS])
    assert assembled((await post(app, COMPLETIONS, body | {"stream": True})).events)[0]["ids"] == [*ids, EOS]
    chat = MESSAGES | {"return_token_ids": True}
    answer = (await post(app, CHAT, chat)).json
    assert answer["choices"][0]["token_ids"] == [*ids, EOS]
    events = (await post(app, CHAT, chat | {"stream": True})).events
    assert assembled(events)[0]["ids"] == [*ids, EOS]
    assert events[0]["prompt_token_ids"] == answer["prompt_token_ids"]


FAILURES = [
    (RequestRejected("a request with id x is running already"), 400, None),
    (
        RequestRejected("the prompt has 9 tokens; the maximum context length is 8 tokens"),
        400,
        "context_length_exceeded",
    ),
    (EngineDraining("draining"), 503, "draining"),
    (EngineDead("worker 0 (pid 1) was killed by SIGKILL in step 3"), 503, "engine_failed"),
    (EngineOutput(request_id="", finish_reason="error", error="the grammar ran dry"), 500, "engine_error"),
    (EngineOutput(request_id="", finish_reason="abort", error="by the operator"), 503, "aborted"),
]


@pytest.mark.parametrize(("failure", "status", "code"), FAILURES, ids=lambda value: str(value)[:30])
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 2])
async def test_failures_before_the_first_token(
    app: Starlette, engine: ScriptedEngine, path: str, failure: Any, status: int, code: str | None, stream: bool, n: int
) -> None:
    """An HTTP status, also for a stream."""
    engine.script = lambda request: [failure]
    exchange = await post(app, path, {"n": n, "stream": stream} | (MESSAGES if path == CHAT else {"prompt": "x"}))
    assert (exchange.status, exchange.error["code"]) == (status, code)
    assert str(getattr(failure, "error", failure)) in exchange.error["message"]
    assert not engine.running


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("n", [1, 2])
async def test_failures_in_the_middle_of_a_stream(
    app: Starlette, engine: ScriptedEngine, tokenizer: Tokenizer, path: str, n: int
) -> None:
    """An error event, and the stream ends without [DONE]."""
    dead = EngineDead("worker 0 (pid 1) was killed by SIGKILL in step 3")

    def script(request: EngineRequest) -> list[EngineOutput | Exception]:
        outputs = outputs_for(request, tokenizer.encode("one two three"))
        return [*outputs[:2], dead] if request.request_id.endswith("-0") else outputs[:1]

    engine.script = script
    exchange = await post(app, path, {"n": n, "stream": True} | (MESSAGES if path == CHAT else {"prompt": "x"}))
    frames = exchange.data.decode().split("\n\n")
    assert exchange.status == 200
    assert frames.pop() == ""
    assert "SIGKILL in step 3" in frames[-1]
    assert frames[-1].startswith('data: {"error":{"message":')
    assert not any("[DONE]" in frame for frame in frames)
    assert not engine.running


async def test_writes_hold_all_that_is_ready(app: Starlette, engine: ScriptedEngine, tokenizer: Tokenizer) -> None:
    """One write an output, and one for the end with [DONE]."""
    produce(engine, tokenizer, "one two three", sizes=[3, 1])
    exchange: Exchange = await post(app, CHAT, MESSAGES | {"stream": True})
    assert len(exchange.writes) == 3
    assert exchange.writes[0].count(b"data: ") == 2
