"""Load one or more OpenAI-compatible servers from a single process and compare them.

    python tools/bench_serving.py --server ours=http://127.0.0.1:8000 --server theirs=http://127.0.0.1:8001

Each round visits every server in turn (A B A B ...), so that a drift of the machine's speed hits all alike;
medians over the rounds are printed, with the ratio to the first server. Definitions: TTFT is first content
chunk minus request start; ITL of a request is (last chunk - first chunk) / (tokens - 1); output tok/s is all
output tokens of a round over the time from its first request to its last chunk.

The prompts are random words, never repeated between requests, so that no prefix cache helps anyone.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import time
from dataclasses import dataclass
from urllib.parse import urlsplit

WORDS = (
    "time person year way day thing man world life hand part child eye woman place work week case point "
    "company number group problem fact night water room mother area money story month lot right study book "
    "word business issue side kind head house service friend father power hour game line end member law car "
    "city community name president team minute idea body information back parent face level office door health"
).split()


@dataclass
class Sample:
    ttft_s: float
    itl_s: float
    tokens: int
    begin: float
    end: float


@dataclass
class Round:
    output_tokens_per_s: float
    ttft_s: float
    itl_s: float


@dataclass
class Server:
    name: str
    url: str
    model: str
    endpoint: str
    """`completions` or `chat`; transformers' server only has the latter."""


def prompt(rng: random.Random, words: int) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(words))


def body_of(server: Server, text: str, output_tokens: int) -> bytes:
    fields: dict[str, object] = {"model": server.model, "stream": True, "temperature": 0.0}
    if server.endpoint == "chat":
        fields |= {"messages": [{"role": "user", "content": text}], "max_tokens": output_tokens}
    else:
        fields |= {"prompt": text, "max_tokens": output_tokens, "ignore_eos": True}
    return json.dumps(fields).encode()


async def one_request(server: Server, text: str, output_tokens: int) -> Sample:
    parts = urlsplit(server.url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    path = "/v1/chat/completions" if server.endpoint == "chat" else "/v1/completions"
    body = body_of(server, text, output_tokens)
    head = (
        f"POST {path} HTTP/1.1\r\nHost: {parts.netloc}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    begin = time.perf_counter()
    writer.write(head.encode() + body)
    first = last = 0.0
    tokens = 0
    status = await reader.readline()
    if b" 200 " not in status:
        raise SystemExit(f"{server.name}: {status.decode().strip()}: {(await reader.read()).decode()[-400:]}")
    async for line in reader:
        if not line.startswith(b"data: {"):
            continue
        choices = json.loads(line[6:]).get("choices") or []
        content = choices and (choices[0].get("text") or choices[0].get("delta", {}).get("content"))
        if content or (choices and server.endpoint != "chat" and not choices[0].get("finish_reason")):
            last = time.perf_counter()
            first = first or last
            tokens += 1
    writer.close()
    tokens = max(tokens, output_tokens) if server.endpoint != "chat" else tokens
    return Sample(first - begin, (last - first) / max(1, tokens - 1), tokens, begin, last)


async def one_round(server: Server, texts: list[str], concurrency: int, output_tokens: int) -> Round:
    samples: list[Sample] = []
    queue = iter(texts)

    async def lane() -> None:
        for text in queue:
            samples.append(await one_request(server, text, output_tokens))

    await asyncio.gather(*(lane() for _ in range(concurrency)))
    elapsed = max(s.end for s in samples) - min(s.begin for s in samples)
    return Round(
        sum(s.tokens for s in samples) / elapsed,
        statistics.median(s.ttft_s for s in samples),
        statistics.median(s.itl_s for s in samples),
    )


async def measure(servers: list[Server], args: argparse.Namespace) -> dict[str, list[Round]]:
    rng = random.Random(args.seed)
    rounds: dict[str, list[Round]] = {server.name: [] for server in servers}
    for number in range(args.rounds + 1):
        for server in servers:
            texts = [prompt(rng, args.words) for _ in range(args.requests)]
            if number == 0:  # warm-up, not counted
                texts = texts[: args.concurrency]
            result = await one_round(server, texts, args.concurrency, args.output_tokens)
            if number:
                rounds[server.name].append(result)
    return rounds


def report(rounds: dict[str, list[Round]]) -> None:
    print("| server | output tok/s | ITL p50, ms | TTFT p50, ms | tok/s, first server over this |")
    print("|---|---|---|---|---|")
    first = next(iter(rounds.values()))
    for name, results in rounds.items():
        ratios = [a.output_tokens_per_s / b.output_tokens_per_s for a, b in zip(first, results, strict=True)]
        speed, itl, ttft = (
            statistics.median(getattr(r, field) for r in results)
            for field in ("output_tokens_per_s", "itl_s", "ttft_s")
        )
        print(f"| {name} | {speed:.1f} | {itl * 1e3:.1f} | {ttft * 1e3:.0f} | {statistics.median(ratios):.2f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server", action="append", required=True, metavar="NAME=URL[,MODEL[,chat]]")
    parser.add_argument("--concurrency", type=int, default=1)
    parser.add_argument("--requests", type=int, default=3, help="per round and server")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--words", type=int, default=128)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    servers = []
    for text in args.server:
        name, _, rest = text.partition("=")
        url, *more = rest.split(",")
        servers.append(Server(name, url, more[0] if more else "default", more[1] if len(more) > 1 else "completions"))
    report(asyncio.run(measure(servers, args)))


if __name__ == "__main__":
    main()
