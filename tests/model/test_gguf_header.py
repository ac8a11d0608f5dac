"""The GGUF header reader against the gguf package, and against files that lie."""

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf_bytes import Gguf, floats, text, value
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from atom_async.model.gguf_header import BLOCK_SIZES, read_gguf_header, tensor_bytes
from atom_async.model.resolve import ResolvedModel
from atom_async.wire.model import TensorEntry


def written(folder: Path, data: bytes) -> Path:
    path = folder / "model.gguf"
    path.write_bytes(data)
    return path


def test_default_model_agrees_with_the_gguf_package(default_model: ResolvedModel) -> None:
    """Tensors and scalars; the package's own arrays take seconds, so they are not built."""
    path = Path(default_model.weights.files[0])
    header = read_gguf_header(path)
    assert len(header.metadata["tokenizer.ggml.tokens"]) == 49_152
    assert header.metadata["tokenizer.ggml.tokens"][:3] == ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    assert header.metadata["llama.attention.head_count"] == 9
    names = {tensor.name for tensor in header.tensors}
    assert len(names) == 272
    last = max(header.tensors, key=lambda tensor: tensor.offset)
    assert last.offset + tensor_bytes(last) <= path.stat().st_size


def test_small_file_agrees_with_the_gguf_package(tmp_path: Path) -> None:
    path = tmp_path / "small.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(3)
    writer.add_rope_freq_base(5000.5)
    writer.add_token_list(["a", "é", "😀"])
    writer.add_token_types([1, 2, 3])
    writer.add_bool("x.flag", True)
    writer.add_int64("x.big", -(2**40))
    writer.add_tensor("first", np.arange(12, dtype=np.float32).reshape(3, 4))
    writer.add_tensor("second", np.arange(5, dtype=np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    header, reader = read_gguf_header(path), gguf.GGUFReader(path)
    assert header.metadata["x.flag"] is True
    assert header.metadata["x.big"] == -(2**40)
    assert header.metadata["llama.rope.freq_base"] == 5000.5
    assert header.metadata["tokenizer.ggml.tokens"] == ["a", "é", "😀"]
    assert header.metadata["tokenizer.ggml.token_type"] == [1, 2, 3]
    ours = [(t.name, t.shape, t.ggml_type, t.offset) for t in header.tensors]
    theirs = [
        (t.name, tuple(int(n) for n in reversed(t.shape)), int(t.tensor_type), int(t.data_offset))
        for t in reader.tensors
    ]
    assert ours == theirs


def test_block_sizes_agree_with_the_gguf_package() -> None:
    theirs = {int(kind): sizes for kind, sizes in gguf.GGML_QUANT_SIZES.items()}
    assert {kind: theirs[kind] for kind in BLOCK_SIZES} == BLOCK_SIZES


def test_version_2_is_read_like_version_3(tmp_path: Path) -> None:
    metadata = {"a": "b", "n": [1, 2], "e": []}
    header = read_gguf_header(written(tmp_path, Gguf(metadata, {"t": floats(4, 2)}, version=2).to_bytes()))
    assert header.metadata == metadata
    assert header.tensors[0].shape == (2, 4)


GOOD = Gguf({"general.name": "x", "list": ["a", "bc"], "nested": [[1], [2, 3]]}, {"t": floats(8, 2)}).to_bytes()


def head(tensors: int, keys: int, rest: bytes = b"", version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, keys) + rest


HUGE = 2**62


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"PK\x03\x04 and more", "not a GGUF file"),
        (b"GGUF" + struct.pack(">I", 3) + bytes(16), "big-endian"),
        (head(0, 0, version=1), "version 1; versions 2 and 3"),
        (head(HUGE, 0), "tensor count .* over the limit"),
        (head(0, HUGE), "key count .* over the limit"),
        (head(0, 1, struct.pack("<Q", HUGE)), "key is .* over the limit"),
        (head(0, 1, text("k") + struct.pack("<IQ", 8, HUGE)), "runs past the end"),
        (head(0, 1, text("k") + struct.pack("<IIQ", 9, 8, HUGE)), "claims .* elements"),
        (head(0, 1, text("k") + struct.pack("<IIQ", 9, 4, HUGE)), "runs past the end"),
        (head(0, 1, text("k") + struct.pack("<IIQ", 9, 9, HUGE)), "claims .* elements"),
        (head(0, 1, text("k") + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 9), "nest deeper"),
        (head(0, 1, text("k") + struct.pack("<II", 77, 0)), "unknown value type 77"),
        (head(0, 1, text("k") + struct.pack("<I", 8) + text(b"\xff")), "not UTF-8"),
        (head(0, 1, text("k") + struct.pack("<IIQ", 9, 8, 1) + text(b"\xff")), "element 0 of 'k' is not UTF-8"),
        (head(0, 2, (text("k") + value(1)) * 2), "'k' appears twice"),
        (head(0, 1, text("general.alignment") + value(3)), "not a power of two"),
        (head(1, 0, text("t") + struct.pack("<I", 9)), "9 dimensions"),
        (head(1, 0, text("t" * 300)), "tensor name is 300 bytes"),
        (head(1, 0, text("t") + struct.pack("<IQIQ", 1, 8, 200, 0)), "unknown ggml type 200"),
        (head(1, 0, text("t") + struct.pack("<IQIQ", 1, 8, 3, 0)), "do not divide into blocks of 32"),
        (head(1, 0, text("t") + struct.pack("<IQIQ", 1, 8, 0, 1)), "not aligned"),
        (head(1, 0, text("t") + struct.pack("<IQIQ", 1, 8, 0, HUGE)), "past the end of the file: the file is inc"),
        (head(1, 0, text("t") + struct.pack("<IQQIQ", 2, HUGE, HUGE, 0, 0)), "past the end"),
        (head(2, 0, (text("t") + struct.pack("<IQIQ", 1, 0, 0, 0)) * 2), "same name"),
    ],
)
def test_a_file_that_lies_is_refused_by_name(tmp_path: Path, data: bytes, message: str) -> None:
    path = written(tmp_path, data)
    with pytest.raises(ValueError, match=message) as refused:
        read_gguf_header(path)
    assert str(path) in str(refused.value)


@pytest.mark.parametrize("end", range(len(GOOD)))
def test_a_torn_file_is_refused(tmp_path: Path, end: int) -> None:
    assert read_gguf_header(written(tmp_path, GOOD)).tensors[0].offset + 64 == len(GOOD)
    with pytest.raises(ValueError):
        read_gguf_header(written(tmp_path, GOOD[:end]))


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(4, len(GOOD) - 65), st.binary(min_size=1, max_size=8))
def test_no_damage_does_worse_than_a_value_error(tmp_path: Path, at: int, damage: bytes) -> None:
    path = written(tmp_path, GOOD[:at] + damage + GOOD[at + len(damage) :])
    try:
        header = read_gguf_header(path)
    except ValueError:
        return
    assert all(tensor.offset + tensor_bytes(tensor) <= len(GOOD) for tensor in header.tensors)


def test_missing_file() -> None:
    with pytest.raises(FileNotFoundError):
        read_gguf_header("/nowhere/at/all.gguf")


def test_scalar_tensor() -> None:
    assert tensor_bytes(TensorEntry("s", (), 0, 0)) == 4
