"""Which settings serve agentic traffic best, on real traces, in virtual time: how the defaults were chosen.

Closed loop, as AgentX plays it: each of C lanes replays one coding-agent session from a random point on. A turn is
sent its recorded think time after the previous answer ended; its prompt is the recorded one whatever was
answered. Caches are primed by the turn before. The engine, its tasks and its scheduler are the real ones; only
workers and clock are simulated.

python tools/study_policies.py --traces ../shared/data/agentic_traces.jsonl.gz --profile h200-70b --concurrency 16
"""

from __future__ import annotations

import argparse
import asyncio
import gzip
import json
import random
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from atom_async.config import EngineConfig
from atom_async.engine.client import EngineRequest
from atom_async.engine.local import LocalEngine
from atom_async.sim.loop import VirtualLoop
from atom_async.sim.workers import SimulatedWorkers
from atom_async.wire.sampling import SamplingParams
from atom_async.wire.simulation import SimulationOptions

BLOCK = 64
THINK_CAP_S = 80.0

PROFILES = {
    "h200-70b": SimulationOptions(
        decode_fixed_ms=7.10,
        decode_ms_per_sequence=0.0233,
        decode_ms_per_mtoken=6.70,
        prefill_fixed_ms=7.55,
        prefill_ms_per_ktoken=28.97,
        prefill_ms_per_gpair=533,
    ),
    "kimi-mi355x": SimulationOptions(
        decode_fixed_ms=15.0,
        experts_ms=30.8,
        experts_total=896,
        experts_active=16,
        decode_ms_per_sequence=0.269,
        decode_ms_per_mtoken=0.624,
        prefill_fixed_ms=161,
        prefill_ms_per_ktoken=59.8,
        prefill_ms_per_gpair=90.6,
    ),
    "prefill-heavy": SimulationOptions(
        decode_fixed_ms=30,
        decode_ms_per_sequence=0.05,
        decode_ms_per_mtoken=1.0,
        prefill_fixed_ms=32,
        prefill_ms_per_ktoken=40,
        prefill_ms_per_gpair=100,
    ),
}

POLICIES: dict[str, dict[str, Any]] = {
    "ATOM-like: separate, fcfs": {"step_policy": "separate", "queue_policy": "fcfs"},
    "ATOM-like, interval 4": {"step_policy": "separate", "queue_policy": "fcfs", "prefill_decode_interval": 4},
    "vLLM-like: mixed, fcfs": {"itl_target_ms": "off", "queue_policy": "fcfs"},
    "mixed, least work": {"itl_target_ms": "off"},
    "default": {},
    "default, interval 4": {"prefill_decode_interval": 4},
    "default, coalescing": {"coalesce_target_fill": 0.25},
}


@dataclass
class Turn:
    runs: list[int]
    """Start and count of runs of block ids."""
    salt: int
    length: int
    output: int
    think_s: float

    def tokens(self) -> bytes:
        """int32 ids of the whole prompt."""
        pairs = zip(self.runs[::2], self.runs[1::2], strict=True)
        ids = np.concatenate([np.arange(first, first + count, dtype=np.int64) for first, count in pairs])
        tokens = (ids[:, None] * BLOCK + np.arange(BLOCK) + self.salt) % (2**31 - 1)
        return tokens.astype("<i4").reshape(-1)[: self.length].tobytes()


@dataclass
class Figures:
    ttft: list[float] = field(default_factory=list)
    itl: list[float] = field(default_factory=list)
    output_tokens: int = 0
    prompt_tokens: int = 0


def sessions_of(path: Path, seed: int, longest: int, scale: tuple[int, int, int]) -> list[list[Turn]]:
    """Main turns of every session; `scale` divides lengths, outputs and times."""
    lengths, outputs, times = scale
    sessions = []
    with gzip.open(path, "rt") as file:
        for number, line in enumerate(file):
            turns = []
            for request in json.loads(line)["requests"]:
                if request["type"] == "subagent" or request["in"] // lengths + request["out"] // outputs >= longest:
                    continue
                think = min(request.get("think_time") or 0.0, THINK_CAP_S) / times
                length, output = max(request["in"] // lengths, 1), max(request["out"] // outputs, 1)
                turns.append(Turn(request["hash_rle"], number * 7_000_003, length, output, think))
            if len(turns) >= 4:
                sessions.append(turns)
    random.Random(seed).shuffle(sessions)
    return sessions


async def play(
    engine: LocalEngine, lanes: list[list[list[Turn]]], seed: int, duration_s: float, warmup_s: float
) -> Figures:
    loop = asyncio.get_running_loop()
    figures = Figures()
    begin = loop.time() + warmup_s
    end = begin + duration_s

    async def send(name: str, turn: Turn, max_tokens: int) -> None:
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0)
        asked = EngineRequest(request_id=name, prompt_token_ids=turn.tokens(), sampling=sampling)
        sent, first, count = loop.time(), 0.0, 0
        async for output in engine.generate(asked):
            count += len(output.token_ids)
            if not first and output.token_ids:
                first = loop.time()
        if sent >= begin:
            figures.ttft.append(first - sent)
            if count > 1:
                figures.itl.append((loop.time() - first) / (count - 1))
            figures.output_tokens += count
            figures.prompt_tokens += turn.length

    async def lane(number: int) -> None:
        rng = random.Random(seed * 1000 + number)
        for round_number, turns in enumerate(lanes[number]):
            start = 1 + int(len(turns) * rng.uniform(0.0, 0.75)) if round_number == 0 else 1
            await send(f"{number}-{round_number}-prime", turns[start - 1], 1)
            for index in range(start, len(turns)):
                await asyncio.sleep(turns[index].think_s)
                await send(f"{number}-{round_number}-{index}", turns[index], turns[index].output)

    tasks = [asyncio.create_task(lane(number)) for number in range(len(lanes))]
    await asyncio.sleep(end - loop.time())
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return figures


async def inline(function: Any, *arguments: Any) -> Any:
    return function(*arguments)


def run(options: SimulationOptions, settings: dict[str, Any], args: argparse.Namespace, sessions: Any) -> list[str]:
    config = EngineConfig(
        **{"max_num_seqs": 256, "max_num_batched_tokens": args.budget, "block_size": BLOCK, "device": "simulated"}
        | settings
    )
    shares = [sessions[number :: args.concurrency] for number in range(args.concurrency)]

    async def main() -> tuple[Figures, Any]:
        workers = SimulatedWorkers(
            options, block_size=BLOCK, max_num_seqs=config.max_num_seqs, num_kv_blocks=args.kv_tokens // BLOCK
        )
        loop = asyncio.get_running_loop()
        engine = LocalEngine(
            config, workers, max_model_len=args.longest, vocab_size=32_000, dtype="-", clock=loop.time, offload=inline
        )
        await engine.start()
        figures = await play(engine, shares, args.seed, args.duration, args.warmup)
        stats = await engine.stats()
        if engine.failure is not None:
            raise RuntimeError(engine.failure)
        await engine.stop()
        return figures, stats

    began = time.perf_counter()
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        figures, stats = runner.run(main())
    took = time.perf_counter() - began

    def spread(values: list[float]) -> str:
        if len(values) < 2:
            return f"only {len(values)}"
        cuts = statistics.quantiles(values, n=100)
        return " / ".join(f"{1e3 * cuts[q - 1]:.0f}" for q in (50, 90, 99))

    if args.verbose:
        print(stats)
    return [
        spread(figures.itl),
        spread(figures.ttft),
        f"{figures.output_tokens / args.duration:.0f}",
        f"{len(figures.ttft)}",
        f"{stats.prompt_tokens_computed / 1e6:.2f}",
        f"{stats.prediction_error:.1%}",
        f"{took:.0f}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=Path, required=True)
    parser.add_argument("--profile", choices=PROFILES, required=True)
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--duration", type=float, default=300.0, help="virtual seconds measured")
    parser.add_argument("--warmup", type=float, default=120.0)
    parser.add_argument("--budget", type=int, default=8192)
    parser.add_argument("--kv-tokens", type=int, default=16_000_000)
    parser.add_argument("--longest", type=int, default=400_000)
    parser.add_argument("--scale", type=int, nargs=3, default=(1, 1, 1), help="divide lengths, outputs, times")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="", help="policies whose name contains this")
    parser.add_argument("--verbose", action="store_true", help="print the engine's counters")
    parser.add_argument("--set", action="append", default=[], help="one more policy: name=value,name=value")
    args = parser.parse_args()
    sessions = sessions_of(args.traces, args.seed, args.longest, tuple(args.scale))
    policies = dict(POLICIES)
    for text in args.set:
        pairs = dict(pair.split("=") for pair in text.split(","))
        policies[text] = {key: json.loads(value) if value[0].isdigit() else value for key, value in pairs.items()}
    print(f"{args.profile}, C{args.concurrency}, {args.duration:g} s, budget {args.budget}")
    print(
        "| policy | ITL p50/p90/p99, ms | TTFT p50/p90/p99, ms | out tok/s | turns | Mtok computed | error | took, s |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for name, settings in policies.items():
        if args.only in name:
            print("| " + " | ".join([name, *run(PROFILES[args.profile], settings, args, sessions)]) + " |", flush=True)


if __name__ == "__main__":
    main()
