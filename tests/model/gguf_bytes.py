"""Writes GGUF files by hand, so that a test can also write wrong ones."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from typing import Any


def text(value: str | bytes) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(data)) + data


def value(item: Any) -> bytes:
    """Type and value: bool, int (u32), float (f32), str, or a list of one of them."""
    kind, data = _typed(item)
    return struct.pack("<I", kind) + data


def _typed(item: Any) -> tuple[int, bytes]:
    if isinstance(item, bool):
        return 7, struct.pack("<?", item)
    if isinstance(item, int):
        return 4, struct.pack("<I", item)
    if isinstance(item, float):
        return 6, struct.pack("<f", item)
    if isinstance(item, str):
        return 8, text(item)
    kinds = [_typed(element) for element in item]
    kind = kinds[0][0] if kinds else 4
    return 9, struct.pack("<IQ", kind, len(item)) + b"".join(data for _, data in kinds)


@dataclass
class Gguf:
    """`tensors`: name -> (innermost-first shape, ggml type, data)."""

    metadata: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, tuple[tuple[int, ...], int, bytes]] = field(default_factory=dict)
    version: int = 3

    def to_bytes(self) -> bytes:
        keys = b"".join(text(key) + value(item) for key, item in self.metadata.items())
        alignment = self.metadata.get("general.alignment", 32)
        index, data = b"", b""
        for name, (shape, kind, content) in self.tensors.items():
            index += text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, len(data))
            data += content + bytes(-len(content) % alignment)
        head = b"GGUF" + struct.pack("<IQQ", self.version, len(self.tensors), len(self.metadata)) + keys + index
        return head + bytes(-len(head) % alignment) + data


def llama(**changes: Any) -> dict[str, Any]:
    """Metadata of a small llama; `changes` by the key's last words, with `_` for `.`."""
    metadata: dict[str, Any] = {
        "general.architecture": "llama",
        "general.file_type": 0,
        "llama.block_count": 2,
        "llama.context_length": 64,
        "llama.embedding_length": 16,
        "llama.feed_forward_length": 24,
        "llama.attention.head_count": 4,
        "llama.attention.head_count_kv": 2,
        "llama.rope.freq_base": 10000.0,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
    }
    return metadata | changes


def floats(*shape: int) -> tuple[tuple[int, ...], int, bytes]:
    """A float32 tensor of zeros; `shape` is innermost first."""
    count = 1
    for size in shape:
        count *= size
    return shape, 0, bytes(4 * count)


EMBEDDING = {"token_embd.weight": floats(16, 8)}
