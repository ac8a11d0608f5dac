"""The openai client, sync and async, against a real server with the default model."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import openai
import pytest
from pydantic import BaseModel

pytestmark = pytest.mark.process

KEY = "test-key"
MODEL = "SmolLM2-135M-Instruct"
ATOM = [{"role": "user", "content": "What is an atom?"}]
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 12}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
ENDS: dict[str, Any] = {"type": "function", "function": {"name": "end_chat", "parameters": None}}


@pytest.fixture(scope="module")
def url(default_model: object) -> Iterator[str]:
    """One server for the file; it must leave in order."""
    command = [sys.executable, "-m", "atom_async.cli", "serve", "--port", "0", "--api-key", KEY]
    command += ["--max-model-len", "512", "--kv-cache-memory", "200M", "--log-level", "warning"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            found = next(filter(None, (re.search(r"Ready: .* on (http://\S+)", line) for line in process.stdout)))
            yield found[1]
        finally:
            process.send_signal(signal.SIGTERM)
            process.stdout.read()
        assert process.wait(20) == 0


class Client:
    """Both clients with one face: whole answers, or all chunks of a stream."""

    def __init__(self, url: str, kind: str, key: str = KEY) -> None:
        options: dict[str, Any] = {"base_url": f"{url}/v1", "api_key": key, "max_retries": 0, "timeout": 120}
        self.sync = openai.OpenAI(**options) if kind == "sync" else None
        self.asynchronous = openai.AsyncOpenAI(**options) if kind == "async" else None

    async def chat(self, messages: Any = ATOM, **fields: Any) -> Any:
        return await self._create("chat.completions", {"messages": messages, "model": MODEL, "temperature": 0} | fields)

    async def complete(self, prompt: Any, **fields: Any) -> Any:
        return await self._create("completions", {"prompt": prompt, "model": MODEL, "temperature": 0} | fields)

    async def _create(self, path: str, fields: dict[str, Any]) -> Any:
        resource: Any = self.sync or self.asynchronous
        for part in path.split("."):
            resource = getattr(resource, part)
        if self.sync is not None:
            answer = await asyncio.to_thread(resource.create, **fields)
            return await asyncio.to_thread(list, answer) if fields.get("stream") else answer
        answer = await resource.create(**fields)
        return [chunk async for chunk in answer] if fields.get("stream") else answer

    async def close(self) -> None:
        if self.sync is not None:
            self.sync.close()
        if self.asynchronous is not None:
            await self.asynchronous.close()


@asynccontextmanager
async def connected(url: str, kind: str, key: str = KEY) -> AsyncIterator[Client]:
    client = Client(url, kind, key)
    try:
        yield client
    finally:
        await client.close()


@pytest.fixture(params=["sync", "async"])
async def either(url: str, request: pytest.FixtureRequest) -> AsyncIterator[Client]:
    async with connected(url, request.param) as client:
        yield client


@pytest.fixture
async def client(url: str) -> AsyncIterator[Client]:
    async with connected(url, "async") as client:
        yield client


async def metrics(url: str) -> dict[str, float]:
    async with httpx.AsyncClient(headers={"authorization": f"Bearer {KEY}"}) as http:
        text = (await http.get(f"{url}/metrics")).text
    return {
        line.split("{")[0]: float(line.split()[-1]) for line in text.splitlines() if line.startswith(("vllm", "atom"))
    }


# Answers --------------------------------------------------------------------------------------------


async def test_a_chat(either: Client) -> None:
    answer = await either.chat(max_tokens=6)
    (choice,) = answer.choices
    assert choice.message.role == "assistant"
    assert choice.message.content == "An atom is the smallest unit"
    assert choice.finish_reason == "length"
    assert (answer.usage.completion_tokens, answer.model) == (6, MODEL)
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 6


async def test_a_streamed_chat(either: Client) -> None:
    *chunks, last = await either.chat(max_tokens=6, stream=True, stream_options={"include_usage": True})
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == "An atom is the smallest unit"
    assert [c.choices[0].finish_reason for c in chunks[-2:]] == [None, "length"]
    assert last.choices == []
    assert last.usage.completion_tokens == 6
    assert last.usage.prompt_tokens_details.cached_tokens >= 16


async def test_a_streamed_completion(either: Client) -> None:
    *chunks, last = await either.complete(
        "The capital of France is", max_tokens=3, stream=True, stream_options={"include_usage": True}, logprobs=0
    )
    assert "".join(c.choices[0].text for c in chunks) == " Paris.\n"
    assert [t for c in chunks if c.choices[0].logprobs for t in c.choices[0].logprobs.tokens] == [" Paris", ".", "\n"]
    assert last.usage.completion_tokens == 3


async def test_forms_of_a_prompt(client: Client, url: str) -> None:
    async with httpx.AsyncClient(headers={"authorization": f"Bearer {KEY}"}) as http:
        answer = await http.post(f"{url}/tokenize", json={"prompt": "The capital of France is"})
    ids = answer.json()["tokens"]
    answers = [await client.complete(prompt, max_tokens=2) for prompt in ("The capital of France is", ids)]
    assert [a.choices[0].text for a in answers] == [" Paris."] * 2
    for prompts in (["The capital of France is"] * 2, [ids, ids]):
        answer = await client.complete(prompts, max_tokens=2)
        assert [(c.index, c.text) for c in answer.choices] == [(0, " Paris."), (1, " Paris.")]
        assert answer.usage.prompt_tokens == 2 * len(ids)


async def test_echo_and_logprobs(client: Client) -> None:
    """The prompt's log-probabilities, and those of the same tokens when they are generated."""
    text = "The capital of France is Paris."
    whole = (await client.complete(text, max_tokens=0, echo=True, logprobs=1)).choices[0]
    made = (await client.complete("The capital of France is", max_tokens=2, echo=True, logprobs=1)).choices[0]
    assert whole.text == made.text == text
    assert whole.logprobs.tokens == made.logprobs.tokens
    assert whole.logprobs.text_offset == made.logprobs.text_offset
    assert whole.logprobs.token_logprobs[0] is None
    assert whole.logprobs.token_logprobs[1:] == pytest.approx(made.logprobs.token_logprobs[1:], abs=1e-3)


async def test_chat_logprobs(client: Client) -> None:
    (choice,) = (await client.chat(max_tokens=3, logprobs=True, top_logprobs=2)).choices
    content = choice.logprobs.content
    assert bytes(b for token in content for b in token.bytes).decode() == choice.message.content
    for token in content:
        assert token.top_logprobs[0].token == token.token  # greedy
        assert token.top_logprobs[0].logprob == pytest.approx(token.logprob, abs=1e-4)
        assert token.top_logprobs[0].logprob >= token.top_logprobs[1].logprob


async def test_choices_and_seeds(client: Client) -> None:
    """Choice i is what seed + i gives, alone or beside others."""
    both = await client.chat(max_tokens=5, n=2, seed=7, temperature=1)
    texts = [choice.message.content for choice in both.choices]
    alone = [await client.chat(max_tokens=5, seed=seed, temperature=1) for seed in (7, 8)]
    assert [answer.choices[0].message.content for answer in alone] == texts
    assert texts[0] != texts[1]
    chunks = await client.chat(max_tokens=5, n=2, seed=7, temperature=1, stream=True)
    streamed = ["", ""]
    for chunk in chunks:
        streamed[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert streamed == texts


async def test_requests_at_once_are_as_if_alone(client: Client) -> None:
    prompts = [f"{word} is a" for word in ("Iron", "Gold", "Water", "Paris", "A cat", "Music")]
    together = await asyncio.gather(*(client.complete(prompt, max_tokens=4) for prompt in prompts))
    alone = [await client.complete(prompt, max_tokens=4) for prompt in prompts]
    assert [a.choices[0].text for a in together] == [a.choices[0].text for a in alone]


# Parameters: each has an effect ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0},
        {"temperature": 1, "top_p": 1e-6},
        {"temperature": 1, "extra_body": {"top_k": 1}},
        {"temperature": 1, "extra_body": {"min_p": 1}},
    ],
    ids=str,
)
async def test_all_ways_to_be_greedy(client: Client, fields: dict[str, Any]) -> None:
    answer = await client.complete("The capital of France is", max_tokens=3, **fields)
    assert answer.choices[0].text == " Paris.\n"


@pytest.mark.parametrize(
    "fields",
    [
        {"presence_penalty": 2},
        {"frequency_penalty": 2},
        {"extra_body": {"repetition_penalty": 2}},
        {"logit_bias": {"421": -100}},
    ],
    ids=str,
)
async def test_what_bends_the_distribution(client: Client, fields: dict[str, Any]) -> None:
    """The plain answer repeats one token, and each of these keeps the model from it."""
    prompt = "ha " * 12 + "ha"
    plain = (await client.complete(prompt, max_tokens=4, extra_body={"return_token_ids": True})).choices[0]
    assert plain.token_ids == [421] * 4
    assert (await client.complete(prompt, max_tokens=4, **fields)).choices[0].text != plain.text


async def test_ends(client: Client) -> None:
    """Stop strings, stop tokens, min_tokens, ignore_eos."""
    prompt = "The capital of France is"
    (choice,) = (await client.complete(prompt, stop=["zzz", "aris"])).choices
    assert (choice.text, choice.finish_reason, choice.stop_reason) == (" P", "stop", "aris")
    kept = {"include_stop_str_in_output": True, "return_token_ids": True}
    (choice,) = (await client.complete(prompt, stop="aris", extra_body=kept)).choices
    assert choice.text == " Paris"
    paris = choice.token_ids[0]
    (choice,) = (await client.complete(prompt, extra_body={"stop_token_ids": [paris]})).choices
    assert (choice.text, choice.finish_reason, choice.stop_reason) == ("", "stop", paris)
    later = {"stop_token_ids": [paris], "min_tokens": 3}
    (choice,) = (await client.complete(prompt, max_tokens=3, extra_body=later)).choices
    assert (choice.finish_reason, "Paris" in choice.text) == ("length", False)


async def test_the_models_own_end(client: Client) -> None:
    (choice,) = (await client.chat([{"role": "user", "content": "Hi"}], logit_bias={"2": 100}, max_tokens=5)).choices
    assert (choice.message.content, choice.finish_reason, choice.stop_reason) == ("", "stop", None)
    ignoring = {"ignore_eos": True, "skip_special_tokens": False}
    (choice,) = (
        await client.chat([{"role": "user", "content": "Hi"}], logit_bias={"2": 100}, max_tokens=2, extra_body=ignoring)
    ).choices
    assert (choice.message.content, choice.finish_reason) == ("<|im_end|><|im_end|>", "length")


async def test_prompt_logprobs(client: Client) -> None:
    (choice,) = (await client.complete([19, 20, 21], max_tokens=1, extra_body={"prompt_logprobs": 0})).choices
    assert choice.prompt_logprobs[0] is None
    assert [list(entry) for entry in choice.prompt_logprobs[1:]] == [["20"], ["21"]]


async def test_salts_keep_prefixes_apart(client: Client) -> None:
    text = "Salt and pepper are on the table, and nobody has asked for either of them so far. " * 2
    first = await client.complete(text, max_tokens=1, extra_body={"cache_salt": "a"})
    again = await client.complete(text, max_tokens=1, extra_body={"cache_salt": "a"})
    other = await client.complete(text, max_tokens=1, extra_body={"cache_salt": "b"})
    cached = [answer.usage.prompt_tokens_details.cached_tokens for answer in (first, again, other)]
    assert cached[0] == cached[2] == 0
    assert cached[1] >= 16


# Grammars and tools ------------------------------------------------------------------------------------


class Person(BaseModel):
    name: str
    adult: bool


async def test_parsed_into_a_model(url: str) -> None:
    """The client's own helper, which sends a strict schema."""
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0) as client:
        answer = await client.chat.completions.parse(
            model=MODEL,
            messages=[{"role": "user", "content": "Ann is 30. As JSON:"}],
            response_format=Person,
            temperature=0,
            max_tokens=60,
        )
    assert isinstance(answer.choices[0].message.parsed, Person)


async def test_json_object(either: Client) -> None:
    answer = await either.chat(
        [{"role": "user", "content": 'Repeat exactly: {"a": 1}'}],
        response_format={"type": "json_object"},
        max_tokens=60,
    )
    (choice,) = answer.choices
    if choice.finish_reason == "stop":
        assert isinstance(json.loads(choice.message.content), dict)
    assert choice.message.content.startswith("{")


@pytest.mark.parametrize(
    ("field", "value", "pattern"),
    [
        ("guided_choice", ["red", "green"], "red|green"),
        ("guided_regex", "[0-9]{3}-[0-9]{2}", "[0-9]{3}-[0-9]{2}"),
        ("guided_json", {"enum": ["yes", "no"]}, '"(yes|no)"'),
        ("guided_grammar", 'start: "<" /[a-z]{2}/ ">"', "<[a-z]{2}>"),
        ("structured_outputs", {"regex": "x{4}"}, "x{4}"),
    ],
)
async def test_guided(client: Client, field: str, value: Any, pattern: str) -> None:
    answer = await client.complete("Q: what?\nA:", max_tokens=20, extra_body={field: value})
    (choice,) = answer.choices
    assert re.fullmatch(pattern, choice.text)
    assert choice.finish_reason == "stop"


async def test_required_tool(either: Client) -> None:
    answer = await either.chat(
        [{"role": "user", "content": "Weather in Rome?"}],
        tools=[WEATHER, ENDS],
        tool_choice="required",
        parallel_tool_calls=False,
        max_tokens=60,
    )
    (choice,) = answer.choices
    (call,) = choice.message.tool_calls
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    assert call.function.name in ("get_weather", "end_chat")
    assert set(json.loads(call.function.arguments)) == ({"city"} if call.function.name == "get_weather" else set())


async def test_named_tool_in_a_stream(either: Client) -> None:
    chunks = await either.chat(
        [{"role": "user", "content": "Weather in Rome?"}],
        tools=[WEATHER, ENDS],
        tool_choice={"type": "function", "function": {"name": "get_weather"}},
        max_tokens=60,
        stream=True,
    )
    calls = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or ()]
    assert calls[0].function.name == "get_weather"
    assert calls[0].id.startswith("call_")
    assert set(json.loads("".join(call.function.arguments or "" for call in calls))) == {"city"}
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


async def test_a_call_and_its_result(client: Client) -> None:
    """A whole round trip, with the client's own objects sent back."""
    question = {"role": "user", "content": "Weather in Rome?"}
    first = await client.chat([question], tools=[WEATHER], tool_choice="required", max_tokens=60)
    message = first.choices[0].message
    results = [{"role": "tool", "tool_call_id": call.id, "content": "sunny"} for call in message.tool_calls]
    second = await client.chat([question, message, *results], tools=[WEATHER], tool_choice="none", max_tokens=4)
    assert second.choices[0].message.content
    assert second.choices[0].message.tool_calls is None


# Errors and leaving --------------------------------------------------------------------------------------


async def test_errors_as_the_client_raises_them(either: Client) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        await either.chat(extra_body={"temperatur": 1})
    assert refused.value.param == "temperatur"
    assert "did you mean temperature?" in refused.value.message
    with pytest.raises(openai.NotFoundError) as missing:
        await either.chat(model="gpt-9")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError, match="maximum context length") as too_long:
        await either.complete("word " * 600)
    assert too_long.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match="invalid regex"):
        await either.complete("x", stream=True, extra_body={"guided_regex": "("})


async def test_keys(url: str) -> None:
    async with connected(url, "async", key="wrong") as client:
        with pytest.raises(openai.AuthenticationError):
            await client.chat()


async def test_models(url: str) -> None:
    with openai.OpenAI(base_url=f"{url}/v1", api_key=KEY) as client:
        listed = await asyncio.to_thread(lambda: list(client.models.list()))
        assert [model.id for model in listed] == [MODEL, "default"]
        assert (await asyncio.to_thread(client.models.retrieve, MODEL)).id == MODEL


@pytest.mark.parametrize("n", [1, 2])
async def test_leaving_frees_the_memory(url: str, client: Client, n: int) -> None:
    """Once another short request is through, nothing is left of a long one whose client went away."""
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0) as leaving:
        stream = await leaving.completions.create(
            model=MODEL, prompt="Once upon a time", max_tokens=400, n=n, stream=True, extra_body={"ignore_eos": True}
        )
        await anext(aiter(stream))
        assert (await metrics(url))["vllm:num_requests_running"] == n
        await stream.close()
    await client.complete("x", max_tokens=2)
    after = await metrics(url)
    assert after["vllm:num_requests_running"] == after["vllm:num_requests_waiting"] == 0
    assert after["atom:kv_blocks_used"] == 0


async def test_a_cancelled_answer_in_one_piece_frees_the_memory(url: str, client: Client) -> None:
    before = (await metrics(url))["atom:requests_aborted_total"]
    async with connected(url, "async") as leaving:
        waiting = asyncio.create_task(leaving.complete("Once upon", max_tokens=400, extra_body={"ignore_eos": True}))
        await client.complete("x", max_tokens=2)  # long enough for the other to run
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
    await client.complete("x", max_tokens=2)
    after = await metrics(url)
    assert after["atom:kv_blocks_used"] == 0
    assert after["atom:requests_aborted_total"] == before + 1


async def test_metrics_count_what_was_done(url: str, client: Client) -> None:
    before = await metrics(url)
    answer = await client.complete("One two three four", max_tokens=3)
    after = await metrics(url)
    grown = {name: after[name] - before[name] for name in after}
    assert grown["vllm:generation_tokens_total"] == 3
    assert grown["vllm:prompt_tokens_total"] == answer.usage.prompt_tokens
    assert grown["vllm:time_to_first_token_seconds_count"] == 1
    assert grown["vllm:inter_token_latency_seconds_count"] == 2
    assert grown["vllm:e2e_request_latency_seconds_count"] == 1
