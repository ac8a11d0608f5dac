"""`atom-async serve` as a process: starts, refusals, deaths, drains, idleness. On the simulated model, for speed."""

from __future__ import annotations

import asyncio
import random
import signal
import socket
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from serving import SIMULATED, Serve

pytestmark = pytest.mark.process
SLOW = ("--simulation", '{"decode_fixed_ms": 20, "prefill_fixed_ms": 20, "vocab_size": 49152}')


async def collect(server: Serve, **body: Any) -> list[dict[str, Any]]:
    return [event async for event in server.stream(**body)]


async def test_a_newcomers_first_minute(default_model: object) -> None:
    async with Serve(*SIMULATED) as server:
        assert "curl http://127.0.0.1:" in server.output
        assert "KV cache" in server.output
        assert (await server.client.get("/health")).status_code == 200
        assert (await server.client.get("/ready")).status_code == 200
        events = await collect(server, max_tokens=5)
        assert events[-1] == {"done": True}
        assert [e["choices"][0]["finish_reason"] for e in events[:-1]][-1] == "length"
        server.signal(signal.SIGINT)
        assert await server.exit_code() == 0


@pytest.mark.parametrize("victim", ["worker", "engine"])
@pytest.mark.parametrize("seed", range(2))
async def test_a_death_reaches_every_client_within_a_second(victim: str, seed: int) -> None:
    rng = random.Random(seed)
    async with Serve(*SIMULATED, *SLOW, "--tp", "3") as server:
        streams = [asyncio.create_task(collect(server)) for _ in range(10)]
        whole = asyncio.create_task(
            server.client.post("/v1/completions", json={"prompt": "x", "max_tokens": 500, "ignore_eos": True})
        )
        await asyncio.sleep(0.3 + rng.random() * 0.3)
        process = server.engine if victim == "engine" else rng.choice(server.workers)
        process.kill()
        async with asyncio.timeout(1):
            results = await asyncio.gather(*streams)
            answer = await whole
        for events in results:
            assert f"pid {process.pid}" in events[-1]["error"]["message"]
            assert "SIGKILL" in events[-1]["error"]["message"]
        assert answer.status_code in (500, 503)
        assert "SIGKILL" in answer.json()["error"]["message"]
        health = await server.client.get("/health")
        assert health.status_code == 503
        assert "SIGKILL" in health.text
        late = await server.client.post("/v1/completions", json={"prompt": "x"})
        assert late.status_code == 503
        assert await server.exit_code() == 1


async def test_a_dead_frontend_takes_everything_along() -> None:
    async with Serve(*SIMULATED, *SLOW, "--tp", "3") as server:
        stream = server.stream()
        await anext(stream)
        server.signal(signal.SIGKILL)
        assert await server.exit_code() == -signal.SIGKILL
        with pytest.raises(httpx.HTTPError):
            async for _ in stream:
                pass


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_drains(number: signal.Signals) -> None:
    async with Serve(*SIMULATED, *SLOW) as server:
        stream = server.stream(max_tokens=60)
        await anext(stream)
        for child in [server.engine, *server.workers]:  # a supervisor signals the whole group
            child.send_signal(number)
        server.signal(number)
        first = await anext(stream)  # by the time it comes the signal has been handled
        assert "error" not in first
        refused = await server.client.post("/v1/completions", json={"prompt": "x"})
        assert refused.status_code == 503
        assert int(refused.headers["retry-after"]) > 0
        assert (await server.client.get("/ready")).status_code == 503
        rest = [event async for event in stream]
        assert rest[-1] == {"done": True}
        assert rest[-2]["choices"][0]["finish_reason"] == "length"
        assert await server.exit_code() == 0


async def test_a_second_signal_ends_now_with_an_error_to_the_client() -> None:
    async with Serve(*SIMULATED, *SLOW) as server:
        stream = server.stream(max_tokens=2000)
        await anext(stream)
        server.signal(signal.SIGTERM)
        await anext(stream)
        server.signal(signal.SIGTERM)
        rest = [event async for event in stream]
        assert rest[-1]["error"]["code"] == "engine_stopped"
        assert "stopped" in rest[-1]["error"]["message"]
        assert await server.exit_code() == 0


async def test_a_death_while_draining_is_told() -> None:
    async with Serve(*SIMULATED, *SLOW) as server:
        stream = server.stream(max_tokens=2000)
        await anext(stream)
        server.signal(signal.SIGTERM)
        await anext(stream)
        server.workers[0].kill()
        rest = [event async for event in stream]
        assert rest[-1]["error"]["code"] == "engine_failed"
        assert await server.exit_code() == 1
    assert "was killed by SIGKILL" in server.output


async def test_the_drain_timeout_ends_what_still_runs() -> None:
    async with Serve(*SIMULATED, *SLOW, "--drain-timeout", "0.3") as server:
        events = asyncio.create_task(collect(server, max_tokens=2000))
        await asyncio.sleep(0.3)
        server.signal(signal.SIGTERM)
        assert "error" in (await events)[-1]
        assert await server.exit_code() == 0


async def test_a_client_that_goes_away_frees_its_blocks() -> None:
    async def used() -> float:
        text = (await server.client.get("/metrics")).text
        line = next(line for line in text.splitlines() if line.startswith("atom:kv_blocks_used"))
        return float(line.split()[-1])

    async with Serve(*SIMULATED, *SLOW) as server:
        stream = server.stream(max_tokens=2000)
        await anext(stream)
        assert await used() > 0
        await stream.aclose()
        await asyncio.sleep(0.1)
        assert await used() == 0


REFUSALS = [
    (("--tp", "2", *SIMULATED), "1, 3"),
    (("no/such/folder/model.gguf", *SIMULATED), "model"),
    (("--device", "cuda"), "CUDA"),
    (("--max-model-len", "100000", *SIMULATED), "8192"),
    (("--max-num-seqs", "0"), "max-num-seqs"),
    (("--max-num-batched-tokens", "8", *SIMULATED), "at least --max-num-seqs"),
    (("--simulation", '{"x": 1}', *SIMULATED), "x"),
    (("--kv-cache-memory", "1K", "--device", "simulated"), "--kv-cache-memory"),
    (("--tokenizer", "/nowhere", *SIMULATED), "nowhere"),
    (("--chat-template", "/nowhere", *SIMULATED, "--simulation", '{"start_delay_ms": 600000}'), "nowhere"),
]


@pytest.mark.parametrize(("flags", "message"), REFUSALS, ids=[r[0][0] + " " + r[0][1] for r in REFUSALS])
async def test_what_cannot_start_says_why_in_one_line(flags: tuple[str, ...], message: str) -> None:
    async with Serve(*flags) as server:
        assert await server.exit_code() == 2
        await server.reading
        assert message in server.output
        assert "Traceback" not in server.output


async def test_a_port_in_use_is_found_before_anything_is_loaded() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        async with Serve(*SIMULATED, "--port", str(taken.getsockname()[1])) as server:
            assert await server.exit_code() == 2
            await server.reading
            assert "cannot listen" in server.output
            assert "worker" not in server.output


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_while_loading_leaves_nothing(number: signal.Signals) -> None:
    flags = ("--simulation", '{"start_delay_ms": 60000}', "--log-level", "info")
    async with Serve(*SIMULATED, *flags, until="starting") as server:
        assert server.tree
        server.signal(number)
        assert await server.exit_code() == 0
        assert "Traceback" not in server.output


def switches(processes: list[psutil.Process]) -> dict[int, int]:
    found = {}
    for process in processes:
        for thread in Path(f"/proc/{process.pid}/task").iterdir():
            status = (thread / "status").read_text()
            found[int(thread.name)] = sum(
                int(line.split()[1]) for line in status.splitlines() if "ctxt_switches" in line
            )
    return found


def cpu_s(processes: list[psutil.Process]) -> float:
    return sum(sum(process.cpu_times()[:2]) for process in processes)


async def test_an_idle_server_sleeps() -> None:
    async with Serve(*SIMULATED) as server:
        await collect(server, max_tokens=3)
        await server.client.aclose()
        processes = [psutil.Process(server.process.pid), *server.tree]
        await asyncio.sleep(1)
        before, cpu = switches(processes), cpu_s(processes)
        await asyncio.sleep(3)
        woken = {tid: count - before[tid] for tid, count in switches(processes).items() if count != before[tid]}
        assert not woken, f"threads that woke up: {woken}"
        assert cpu_s(processes) - cpu < 0.03
