"""Cost of one `Sampler.sample` call on this machine, without a model.

    python tools/bench_sampler.py [--threads 2] [--device cpu]

Logits fall off like a language model's: a few likely tokens over a wide, flat rest. Median of the calls that
fit into about a second, milliseconds.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch

from atom_async.wire.messages import NewSequence
from atom_async.wire.sampling import SamplingParams
from workers.sampler import Sampler

CASES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "temperature": {},
    "top_p": {"top_p": 0.95},
    "top_k+top_p": {"top_k": 50, "top_p": 0.95},
    "min_p": {"min_p": 0.05},
    "penalties": {"presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.1},
    "logprobs 5": {"temperature": 0, "logprobs": 5},
}


def logits_like_a_model(rows: int, vocab: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(rows, vocab, generator=generator) * 2.5
    likely = torch.randint(vocab, (rows, 30), generator=generator)
    return logits.scatter_(1, likely, 16 + 2.5 * torch.randn(rows, 30, generator=generator))


def median_ms(sampler: Sampler, logits: torch.Tensor) -> float:
    rows = list(range(len(logits)))
    times: list[float] = []
    began = time.perf_counter()
    while len(times) < 3 or (time.perf_counter() - began < 1 and len(times) < 200):
        copy = logits.clone()
        start = time.perf_counter()
        sampler.sample(copy, rows, [len(times)] * len(rows))
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    device = torch.device(arguments.device)
    print(f"{'vocab':>7} {'rows':>5}  " + "".join(f"{name:>13}" for name in CASES))
    for vocab in (49152, 152064):
        for rows in (1, 16, 256):
            logits = logits_like_a_model(rows, vocab).to(device)
            cells = []
            for settings in CASES.values():
                sampler = Sampler(vocab_size=vocab, max_num_seqs=rows, device=device, grammar=None)
                for slot in range(rows):
                    sampling = SamplingParams(max_tokens=1000, seed=slot, **settings)
                    sampler.add(NewSequence(slot, 1, 1, 0, b"", b"", sampling))
                cells.append(f"{median_ms(sampler, logits):13.3f}")
            print(f"{vocab:7} {rows:5}  " + "".join(cells), flush=True)


if __name__ == "__main__":
    main()
