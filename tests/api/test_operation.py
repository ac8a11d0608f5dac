"""Keys, request ids, health, readiness, models, tokenize, OpenAPI, metrics."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest
from asgi import begin, call, post
from prometheus_client.parser import text_string_to_metric_families
from scripted import ScriptedEngine
from starlette.applications import Starlette

from atom_async import __version__
from atom_async.api import requests
from atom_async.api.app import create_app
from atom_async.api.openapi import OPERATIONS
from atom_async.api.state import ServerState
from atom_async.config import EngineConfig, ServeConfig
from atom_async.engine.client import EngineDead, EngineOutput, EngineRequest, EngineStats
from atom_async.telemetry.metrics import Metrics
from atom_async.text.tokenizer import Tokenizer

PROMPT: dict[str, Any] = {"prompt": "Hello"}


@pytest.fixture
def locked(state: ServerState) -> Starlette:
    state.serve_config = ServeConfig(api_key=("first", "sécond"))
    return create_app(state)


@pytest.mark.parametrize(
    ("header", "status"),
    [
        (None, 401),
        ("", 401),
        ("Bearer", 401),
        ("Bearer wrong", 401),
        ("Bearer firs", 401),
        ("Basic first", 401),
        ("Bearer first", 200),
        ("bearer first", 200),
    ],
)
async def test_keys(locked: Starlette, header: str | None, status: int) -> None:
    exchange = await call(locked, "GET", "/v1/models", headers={} if header is None else {"authorization": header})
    assert exchange.status == status
    if status == 401:
        assert exchange.error["code"] == "invalid_api_key"
        assert exchange.headers["www-authenticate"] == "Bearer"


async def test_probes_need_no_key_and_metrics_do(locked: Starlette) -> None:
    statuses = {
        path: (await call(locked, "GET", path)).status
        for path in ("/health", "/ready", "/metrics", "/version", "/ping", "/openapi.json", "/nowhere")
    }
    assert statuses == {"/health": 200, "/ready": 200} | dict.fromkeys(
        ("/metrics", "/version", "/ping", "/openapi.json", "/nowhere"), 401
    )


async def test_request_ids(app: Starlette) -> None:
    given = await post(app, "/v1/completions", PROMPT, {"x-request-id": "my-id"})
    assert given.headers["x-request-id"] == "my-id"
    fresh = await call(app, "GET", "/nowhere")
    assert len(fresh.headers["x-request-id"]) == 32
    odd = await call(app, "GET", "/version", headers={"x-request-id": "a b"})
    assert len(odd.headers["x-request-id"]) == 32
    streamed = await post(app, "/v1/completions", PROMPT | {"stream": True}, {"x-request-id": "s"})
    assert streamed.headers["x-request-id"] == "s"


async def test_a_fault_of_ours_has_the_requests_id(app: Starlette, engine: ScriptedEngine) -> None:
    def broken(request: EngineRequest) -> list[EngineOutput | Exception]:
        raise LookupError("a fault")

    engine.script = broken
    exchange, task = begin(app, "POST", "/v1/completions", PROMPT, {"x-request-id": "mine"})
    with pytest.raises(LookupError):  # again, for the server's log
        await task
    assert (exchange.status, exchange.error["code"]) == (500, "internal_error")
    assert exchange.headers["x-request-id"] == "mine"


async def test_health_while_all_is_well(app: Starlette) -> None:
    assert (await call(app, "GET", "/health")).json == {"status": "ok", "cause": None}
    assert (await call(app, "GET", "/ready")).json == {"status": "ready", "cause": None}
    assert (await call(app, "GET", "/version")).json == {"version": __version__}
    assert (await call(app, "GET", "/ping")).status == 200


async def test_before_the_model_is_loaded() -> None:
    app = create_app(ServerState(EngineConfig(), ServeConfig(), Metrics("m")))
    for path in ("/health", "/ready", "/v1/models"):
        exchange = await call(app, "GET", path)
        assert exchange.status == 503
        assert int(exchange.headers["retry-after"]) > 0
    assert (await post(app, "/v1/completions", PROMPT)).error["code"] == "loading"
    assert (await call(app, "GET", "/metrics")).status == 200
    assert (await call(app, "GET", "/version")).status == 200


async def test_draining(app: Starlette, state: ServerState) -> None:
    """Alive, but not to be sent more."""
    state.draining = True
    assert (await call(app, "GET", "/health")).status == 200
    assert (await call(app, "GET", "/ready")).status == 503
    exchange = await post(app, "/v1/completions", PROMPT)
    assert (exchange.status, exchange.error["code"]) == (503, "draining")
    assert int(exchange.headers["retry-after"]) > 0


async def test_a_dead_engine_is_named(app: Starlette, engine: ScriptedEngine) -> None:
    engine.cause = "worker 1 (pid 7) was killed by SIGKILL"
    engine.stats_error = EngineDead(engine.cause)
    health = await call(app, "GET", "/health")
    assert (health.status, health.json) == (503, {"status": "failed", "cause": engine.cause})
    assert (await call(app, "GET", "/ready")).status == 503
    exchange = await post(app, "/v1/completions", PROMPT)
    assert (exchange.status, exchange.error["code"]) == (503, "engine_failed")
    assert engine.cause in exchange.error["message"]


async def test_a_step_that_takes_too_long_is_not_healthy(app: Starlette, engine: ScriptedEngine) -> None:
    engine.current_stats = EngineStats(steps_in_flight=1, step_age_s=121)
    assert (await call(app, "GET", "/health")).status == 503
    engine.current_stats = EngineStats(steps_in_flight=1, step_age_s=119)
    assert (await call(app, "GET", "/health")).status == 200


async def test_models(app: Starlette, state: ServerState) -> None:
    listed = (await call(app, "GET", "/v1/models")).json
    assert listed["object"] == "list"
    assert [model["id"] for model in listed["data"]] == ["tiny", "default"]
    assert listed["data"][0] == {
        "id": "tiny",
        "created": state.created,
        "max_model_len": 256,
        "object": "model",
        "owned_by": "atom-async",
    }
    assert (await call(app, "GET", "/v1/models/default")).json["id"] == "default"
    assert (await call(app, "GET", "/v1/models/other/name")).error["code"] == "model_not_found"


async def test_names_with_slashes(app: Starlette, state: ServerState) -> None:
    assert state.served is not None
    state.served = replace(state.served, names=("org/model",))
    assert (await call(app, "GET", "/v1/models/org/model")).json["id"] == "org/model"


async def test_tokenize_and_back(app: Starlette, tokenizer: Tokenizer) -> None:
    text = "Hello 🌍<|im_end|>"
    answer = (await post(app, "/tokenize", {"prompt": text, "return_token_strs": True})).json
    assert answer["tokens"] == tokenizer.encode(text)
    assert (answer["count"], answer["max_model_len"]) == (len(answer["tokens"]), 256)
    assert answer["token_strs"] == [tokenizer.token(token) for token in answer["tokens"]]
    assert (await post(app, "/detokenize", {"tokens": answer["tokens"]})).json == {"prompt": text}


async def test_tokenize_a_chat(app: Starlette, tokenizer: Tokenizer) -> None:
    messages = [{"role": "user", "content": "Hello"}]
    tokens = (await post(app, "/tokenize", {"messages": messages})).json["tokens"]
    assert tokenizer.decode(tokens, skip_special_tokens=False).endswith("<|im_start|>assistant\n")
    shorter = (await post(app, "/tokenize", {"messages": messages, "add_generation_prompt": False})).json["tokens"]
    assert tokens[: len(shorter)] == shorter


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": []}, "prompt"),
        ("/tokenize", {"prompt": "x", "add_generation_prompt": True}, "add_generation_prompt"),
        ("/tokenize", {"prompt": "x", "extra": 1}, "extra"),
        ("/detokenize", {"tokens": [10**6]}, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, "tokens[0]"),
        ("/detokenize", {}, "tokens"),
    ],
)
async def test_tokenizer_routes_refuse(app: Starlette, path: str, body: dict[str, Any], param: str) -> None:
    exchange = await post(app, path, body)
    assert (exchange.status, exchange.error["param"]) == (400, param)


async def test_head_on_every_get_route(app: Starlette) -> None:
    for method, path, *_ in OPERATIONS:
        if method == "get":
            exchange = await call(app, "HEAD", path.replace("{name}", "tiny"))
            assert exchange.status == 200, path


async def test_openapi_describes_what_is_decoded(app: Starlette) -> None:
    document = (await call(app, "GET", "/openapi.json")).json
    assert document["openapi"] == "3.1.0"
    described = document["components"]["schemas"]["ChatRequest"]
    assert set(described["properties"]) == {field.name for field in msgspec.structs.fields(requests.ChatRequest)}
    assert described["additionalProperties"] is False
    assert described["required"] == ["messages"]
    routes = {route.path for route in app.routes} - {"/openapi.json"}  # type: ignore[attr-defined]
    assert {path.replace("{name}", "{name:path}") for path in document["paths"]} == routes


async def test_every_reference_in_openapi_resolves(app: Starlette) -> None:
    data = (await call(app, "GET", "/openapi.json")).data.decode()
    schemas = msgspec.json.decode(data)["components"]["schemas"]
    names = {part.split('"')[0] for part in data.split("#/components/schemas/")[1:]}
    assert names == set(schemas)


async def test_metrics_of_a_request(app: Starlette, engine: ScriptedEngine) -> None:
    await post(app, "/v1/completions", PROMPT | {"max_tokens": 7})
    exchange = await call(app, "GET", "/metrics")
    assert exchange.headers["content-type"].startswith("text/plain")
    samples = {
        sample.name: sample.value
        for family in text_string_to_metric_families(exchange.data.decode())
        for sample in family.samples
        if sample.labels.get("finished_reason", "length") == "length"
    }
    assert samples["vllm:num_requests_running"] == 2
    assert samples["vllm:kv_cache_usage_perc"] == 0.25
    assert samples["vllm:request_success_total"] == 1
    assert samples["vllm:request_params_max_tokens_sum"] == 7
    assert samples["vllm:request_params_n_count"] == 1
    assert samples["vllm:e2e_request_latency_seconds_count"] == 1
    assert samples["atom:engine_up"] == 1


async def test_openmetrics_for_those_who_ask(app: Starlette) -> None:
    accept = {"accept": "application/openmetrics-text; version=1.0.0"}
    exchange = await call(app, "GET", "/metrics", headers=accept)
    assert exchange.headers["content-type"].startswith("application/openmetrics-text")
    assert exchange.data.endswith(b"# EOF\n")


async def test_metrics_outlive_the_engine(app: Starlette, engine: ScriptedEngine) -> None:
    await call(app, "GET", "/metrics")
    engine.stats_error = EngineDead("gone")
    text = (await call(app, "GET", "/metrics")).data.decode()
    assert 'atom:engine_up{engine="0",model_name="tiny"} 0.0' in text
    assert 'vllm:num_requests_running{engine="0",model_name="tiny"} 2.0' in text
