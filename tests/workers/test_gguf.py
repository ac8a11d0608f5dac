"""GGUF tensors: the right rows and columns, in Hugging Face's order."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from tiny import TinyModel, worker_init

from atom_async.model.gguf_header import read_gguf_header
from atom_async.wire.model import WeightSource
from workers.loading.gguf import GgufReader, gguf_name
from workers.parallel import SingleRank
from workers.runner import ModelRunner

HIDDEN, INNER = 64, 96


def interleave(weight: np.ndarray, heads: int) -> np.ndarray:
    """What llama.cpp's converter does to query and key rows of Llama models."""
    shape = weight.shape
    return weight.reshape(heads, 2, shape[0] // heads // 2, *shape[1:]).swapaxes(1, 2).reshape(shape)


def write_gguf(tiny: TinyModel, path: Path, kinds: dict[str, gguf.GGMLQuantizationType]) -> dict[str, torch.Tensor]:
    """The tiny model as a GGUF file; returns the tensors as the file's quantisation leaves them."""
    spec, kept = tiny.spec, {}
    writer = gguf.GGUFWriter(path, "llama" if spec.architecture == "llama" else spec.architecture)
    for name, tensor in tiny.reference.state_dict().items():
        if name == "lm_head.weight" and spec.tie_word_embeddings:
            continue
        values = tensor.numpy().astype(np.float32)
        kind = next((k for part, k in kinds.items() if part in name), gguf.GGMLQuantizationType.F32)
        heads = spec.num_heads if "q_proj" in name else spec.num_kv_heads
        stored = interleave(values, heads) if "q_proj" in name or "k_proj" in name else values
        data = gguf.quants.quantize(stored, kind)
        back = gguf.quants.dequantize(data, kind).reshape(values.shape)
        if "q_proj" in name or "k_proj" in name:
            half = spec.head_dim // 2
            back = back.reshape(heads, half, 2, *back.shape[1:]).swapaxes(1, 2).reshape(values.shape)
        kept[name] = torch.from_numpy(np.array(back))
        writer.add_tensor(gguf_name(name), data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return kept


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("gguf")
    tiny = TinyModel("llama", folder / "hf", hidden_size=HIDDEN, intermediate_size=INNER)
    kinds = {
        "mlp": gguf.GGMLQuantizationType.Q8_0,
        "self_attn": gguf.GGMLQuantizationType.Q4_1,
        "embed_tokens": gguf.GGMLQuantizationType.F16,
    }
    kept = write_gguf(tiny, folder / "tiny.gguf", kinds)
    header = read_gguf_header(folder / "tiny.gguf")
    source = WeightSource(kind="gguf", files=(str(folder / "tiny.gguf"),), tensors=header.tensors)
    return tiny, kept, source


def test_rows_and_columns_are_those_of_the_dequantised_tensors(made) -> None:
    tiny, kept, source = made
    reader = GgufReader(source, tiny.spec)
    for name, expected in kept.items():
        shape = tuple(expected.shape)
        assert torch.equal(reader.rows(name, shape, 0, shape[0]), expected), name
        half = shape[0] // 2
        assert torch.equal(reader.rows(name, shape, half, shape[0] - half), expected[half:]), name
        if len(shape) == 2 and "q_proj" not in name and "k_proj" not in name:
            assert torch.equal(reader.columns(name, shape, 8, 24), expected[:, 8:32]), name
    assert reader.unread() == []


def test_a_missing_or_misshapen_tensor_is_named(made) -> None:
    tiny, _, source = made
    reader = GgufReader(source, tiny.spec)
    with pytest.raises(ValueError, match=r"tensor blk\.7\.attn_q\.weight is not in"):
        reader.rows("model.layers.7.self_attn.q_proj.weight", (64, 64), 0, 64)
    with pytest.raises(ValueError, match=r"tensor token_embd\.weight has shape \[131, 64\]"):
        reader.rows("model.embed_tokens.weight", (130, 64), 0, 130)


def test_the_loaded_model_gives_the_logits_of_the_dequantised_weights(made) -> None:
    tiny, kept, source = made
    tiny.reference.load_state_dict(kept)
    runner = ModelRunner(worker_init(tiny.spec, source), SingleRank())
    runner.load(lambda stage, done, total: None)
    runner.allocate(20)
    from atom_async.wire.messages import NewSequence, StepPlan, pack_ints
    from atom_async.wire.sampling import SamplingParams

    ids = [3, 99, 41, 7, 7, 80]
    new = NewSequence(0, 6, 6, 0, pack_ints([0, 1]), b"", SamplingParams(max_tokens=1))
    one = pack_ints([0])
    plan = StepPlan(1, b"", [new], b"", b"", b"", one, one, pack_ints([6]), pack_ints(ids))
    with torch.inference_mode():
        batch = runner._tables.apply(plan)
        logits = runner._decoder.logits(runner._decoder.forward(batch, runner._attention))
    assert (logits - tiny.logits(ids)).abs().max() <= 1e-4
