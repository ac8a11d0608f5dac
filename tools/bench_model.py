"""Where a decode step's time goes on this machine: the default model in this process, no engine around it.

    python tools/bench_model.py [--threads 2] [--sequences 1 16 64] [--context 200] [--profile]

Beside the measured steps stands the floor: the bytes of the weights over the memory bandwidth of this machine,
measured with the same threads by a sum over a tensor larger than any cache.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch

from atom_async.config import EngineConfig
from atom_async.model.resolve import resolve_model
from atom_async.wire.messages import PROTOCOL_VERSION, NewSequence, StepPlan, StepTimings, WorkerInit, pack_ints
from atom_async.wire.sampling import SamplingParams
from workers.parallel import SingleRank
from workers.runner import ModelRunner


def load(threads: int, sequences: int, length: int) -> tuple[ModelRunner, WorkerInit]:
    model = resolve_model(EngineConfig(device="cpu"))
    init = WorkerInit(
        protocol_version=PROTOCOL_VERSION,
        rank=0,
        tp_size=1,
        model=model.spec,
        weights=model.weights,
        device="cpu",
        dtype="float32",
        seed=0,
        block_size=16,
        max_num_seqs=sequences,
        max_num_batched_tokens=1 << 20,
        max_model_len=length,
        kv_cache_bytes=0,
        gpu_memory_utilization=0.9,
        threads=threads,
        store_port=0,
        tokenizer_json="",
        end_token_ids=(),
        simulation="",
    )
    runner = ModelRunner(init, SingleRank())
    runner.load(lambda stage, done, total: None)
    runner.allocate(sequences * -(-length // 16))
    return runner, init


def enter(runner: ModelRunner, slot: int, context: int, length: int) -> float:
    """One prompt in one step; seconds."""
    blocks = -(-length // 16)
    params = SamplingParams(max_tokens=1 << 20, temperature=0.0)
    new = NewSequence(slot, context, context, 0, pack_ints(range(slot * blocks, (slot + 1) * blocks)), b"", params)
    plan = StepPlan(
        step_id=0,
        new=[new],
        chunk_slots=pack_ints([slot]),
        chunk_starts=pack_ints([0]),
        chunk_lengths=pack_ints([context]),
        chunk_tokens=pack_ints((7 * i + slot) % 40000 for i in range(context)),
    )
    begin = time.perf_counter()
    runner.execute(plan)
    return time.perf_counter() - begin


def decode(runner: ModelRunner, sequences: int, steps: int) -> tuple[list[float], list[StepTimings]]:
    plan = StepPlan(step_id=0, decode_slots=pack_ints(range(sequences)))
    times, parts = [], []
    for _ in range(steps):
        begin = time.perf_counter()
        parts.append(runner.execute(plan).timings)
        times.append(time.perf_counter() - begin)
    return times, parts


def bandwidth() -> float:
    """Bytes per second that a read of 512 MiB reaches, best of several."""
    data = torch.ones(1 << 27)
    times = []
    for _ in range(8):
        begin = time.perf_counter()
        data.sum()
        times.append(time.perf_counter() - begin)
    return data.numel() * 4 / min(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--context", type=int, default=200)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--profile", action="store_true", help="torch's table of operators for each size")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    most, length = max(arguments.sequences), arguments.context + 3 * arguments.steps * len(arguments.sequences)
    runner, init = load(arguments.threads, most, length)
    weights = _weight_bytes(runner)
    floor = weights / bandwidth()
    print(f"weights {weights / 1e6:.0f} MB, floor of a decode step {floor * 1e3:.1f} ms ({init.threads} threads)")
    prefill = [enter(runner, slot, arguments.context, length) for slot in range(most)]
    print(f"prompt of {arguments.context} tokens: {statistics.median(prefill) * 1e3:.1f} ms")
    for sequences in arguments.sequences:
        decode(runner, sequences, 3)
        times, parts = decode(runner, sequences, arguments.steps)
        step = statistics.median(times)
        inside = ", ".join(
            f"{name} {statistics.median(getattr(p, name + '_us') for p in parts) / 1e3:.2f}"
            for name in ("prepare", "forward", "sample")
        )
        print(
            f"{sequences:4} sequences: step {step * 1e3:.1f} ms (best {min(times) * 1e3:.1f}), "
            f"{sequences / step:.0f} tok/s; ms: {inside}"
        )
        if arguments.profile:
            with torch.profiler.profile() as profiler:
                decode(runner, sequences, 10)
            print(profiler.key_averages().table(sort_by="self_cpu_time_total", row_limit=14, max_name_column_width=40))


def _weight_bytes(runner: ModelRunner) -> int:
    """What a decode step reads of the model once."""
    decoder = runner._decoder
    tensors = [decoder.head.weight_SH]
    for layer in decoder.layers:
        attention, mlp = layer.attention, layer.mlp
        tensors += [
            attention.qkv.weight_OI,
            attention.output.weight_OI,
            mlp.gate_up.weight_OI,
            mlp.down.weight_OI,
        ]
    return sum(tensor.nbytes for tensor in tensors)


if __name__ == "__main__":
    main()
