"""The model on a real GPU; skipped where there is none."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from driver import tokens
from tiny import TinyModel, worker_init
from tp_rank import run_script, script

from atom_async.wire.messages import unpack_ints
from workers.parallel import SingleRank

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or ROCm device")


@pytest.mark.parametrize("block_size", [16, 256])
@pytest.mark.parametrize("name", ["llama", "mistral-window", "qwen2-window", "qwen3"])
def test_the_gpu_agrees_with_transformers(name: str, block_size: int, tmp_path: Path) -> None:
    """bfloat16 rounds at 2^-8, so tokens may differ from float32's; their probabilities hardly do."""
    tiny = TinyModel(name, tmp_path, head_dim=64) if name != "qwen2-window" else TinyModel(name, tmp_path)
    rng = random.Random(1)
    prompts = [tokens(rng, length) for length in (31, 12, 17)]
    init = worker_init(
        tiny.spec, tiny.weights, device="cuda", dtype="bfloat16", block_size=block_size, kv_cache_bytes=1 << 26
    )
    results = run_script(init, SingleRank(), script(prompts))
    for slot in (0, 1):
        output: list[int] = []
        for result in results:
            slots = unpack_ints(result.slots).tolist()
            if slot in slots:
                output.append(unpack_ints(result.tokens)[slots.index(slot)])
        reference = tiny.logits(prompts[slot] + output)[len(prompts[slot]) - 1 : -1].log_softmax(-1)
        chosen = reference[torch.arange(len(output)), torch.tensor(output)]
        assert (reference.max(-1).values - chosen).max() < 0.3
        told = [part.logprobs[0] for result in results for part in result.logprobs if part.slot == slot]
        assert (torch.tensor(told) - chosen).abs().mean() < 0.1


def test_memory_is_measured_by_running_the_largest_step(tmp_path: Path) -> None:
    from workers.runner import ModelRunner

    tiny = TinyModel("llama", tmp_path, head_dim=64)
    init = worker_init(tiny.spec, tiny.weights, device="cuda", dtype="bfloat16", block_size=16, kv_cache_bytes=0)
    loaded = ModelRunner(init, SingleRank()).load(lambda stage, done, total: None)
    _, total = torch.cuda.mem_get_info()
    assert 0 < loaded.max_kv_blocks * loaded.bytes_per_block < 0.9 * total
