"""What the GPU backend hands to torch's kernel, computed here by a plain reading of the kernel's documentation.

The kernel itself needs a GPU: where there is one, `test_gpu.py` runs it.
"""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch
from driver import Driver, run_mixed
from tiny import TinyModel, worker_init

from workers.attention import choose_attention
from workers.attention.varlen import VarlenAttention
from workers.parallel import SingleRank
from workers.runner import ModelRunner


def documented_varlen_attn(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor | None,
    max_q: int,
    max_k: int,
    *,
    scale: float,
    window_size: tuple[int, int],
    enable_gqa: bool,
    seqused_k: torch.Tensor | None,
    block_table: torch.Tensor | None,
) -> torch.Tensor:
    """torch.nn.attention.varlen.varlen_attn, sequence by sequence; causal masks are aligned at the end."""
    assert {t.dtype for t in (cu_seq_q, cu_seq_k, seqused_k, block_table) if t is not None} == {torch.int32}
    assert enable_gqa or query.shape[1] == key.shape[-2]
    assert window_size[1] == 0, "not causal"
    assert (seqused_k is None) == (block_table is None) == (cu_seq_k is not None)
    out = torch.empty_like(query)
    starts = cu_seq_q.tolist()
    for index, (begin, end) in enumerate(itertools.pairwise(starts)):
        if block_table is not None and seqused_k is not None:
            length = int(seqused_k[index])
            keys = key[block_table[index].long()].flatten(0, 1)[:length]
            values = value[block_table[index].long()].flatten(0, 1)[:length]
        else:
            assert cu_seq_k is not None
            first, last = cu_seq_k[index : index + 2].tolist()
            keys, values, length = key[first:last], value[first:last], last - first
        assert end - begin <= max_q
        assert length <= max_k
        repeats = query.shape[1] // keys.shape[1]
        keys, values = keys.repeat_interleave(repeats, 1), values.repeat_interleave(repeats, 1)
        scores = torch.einsum("qhd,khd->hqk", query[begin:end], keys) * scale
        at_q = torch.arange(length - (end - begin), length)[:, None]
        at_k = torch.arange(length)
        visible = at_k <= at_q
        if window_size[0] >= 0:
            visible &= at_k >= at_q - window_size[0]
        weights = scores.masked_fill(~visible, -math.inf).softmax(-1)
        out[begin:end] = torch.einsum("hqk,khd->qhd", weights, values)
    return out


@pytest.mark.parametrize("paged", [True, False])
@pytest.mark.parametrize("name", ["llama", "mistral-window", "qwen2-window", "qwen3"])
def test_logits_through_the_gpu_backend(name: str, paged: bool, tmp_path_factory: pytest.TempPathFactory) -> None:
    tiny = TinyModel(name, tmp_path_factory.mktemp(name))
    runner = ModelRunner(worker_init(tiny.spec, tiny.weights), SingleRank())
    runner.load(lambda stage, done, total: None)
    runner.allocate(200)
    scale = tiny.spec.head_dim**-0.5
    runner._attention = VarlenAttention(runner._pool, scale, paged=paged, kernel=documented_varlen_attn)
    for seed in range(2):
        run_mixed(Driver(runner, tiny), random.Random(seed))


@pytest.mark.parametrize(
    ("block_size", "hip", "expected"),
    [
        (16, None, "varlen-gathered"),
        (128, None, "varlen-gathered"),
        (256, None, "varlen-paged"),
        (512, None, "varlen-paged"),
        (256, "6.4", "varlen-gathered"),
    ],
)
def test_pages_are_read_in_place_only_where_the_kernel_can(
    block_size: int, hip: str | None, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "hip", hip)
    device = torch.device("cuda", 0)
    assert choose_attention(device, dtype=torch.bfloat16, head_dim=64, block_size=block_size) == expected


@pytest.mark.parametrize(
    ("dtype", "head_dim", "message"),
    [
        (torch.float32, 64, "needs --dtype bfloat16 or float16, not float32"),
        (torch.float16, 512, "at most 256; this model's is 512"),
        (torch.float16, 20, "multiple of 8"),
    ],
)
def test_what_the_kernel_cannot_compute_is_refused(dtype: torch.dtype, head_dim: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        choose_attention(torch.device("cuda", 0), dtype=dtype, head_dim=head_dim, block_size=16)
