"""The bytes each token stands for, taken from the tokenizer's decoder.

Two families of decoder exist among the supported models. Byte-level BPE writes every byte as one
printable character (GPT-2's table). SentencePiece writes a space as ▁ and rare bytes as `<0xNN>`. In both,
a text is the concatenation of its tokens' bytes, except that SentencePiece drops the space it put
before the first word.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any, Literal

from tokenizers import Tokenizer

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")

Leading = Literal["keep", "strip_space", "strip_marks"]
"""What happens to the space before the first word: kept, stripped from the text, or stripped from
the first token (all of its marks)."""


class TokenBytes:
    """Maps a token's text in the vocabulary to its bytes."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Raises ValueError when the decoder is of neither family."""
        self.leading: Leading = "keep"
        self._space_mark: str | None = None
        self._byte_tokens = False
        self.of: Callable[[str], bytes] = self._plain
        state = tokenizer.decoder.__getstate__() if tokenizer.decoder is not None else b'{"type": "Fuse"}'
        description = json.loads(state)
        for step in description["decoders"] if description["type"] == "Sequence" else [description]:
            self._read(step)

    def _read(self, step: dict[str, Any]) -> None:
        match step:
            case {"type": "ByteLevel"}:
                self.of = _byte_level
            case {"type": "Replace", "pattern": {"String": mark}, "content": " "}:
                self._space_mark = mark
            case {"type": "ByteFallback"}:
                self._byte_tokens = True
            case {"type": "Strip", "content": " ", "start": 1, "stop": 0}:
                self.leading = "strip_space"
            case {"type": "Metaspace", "replacement": mark}:
                self._space_mark = mark
                if step.get("prepend_scheme", "always") != "never":
                    self.leading = "strip_marks"
            case {"type": "Fuse"}:
                pass
            case _:
                raise ValueError(f"tokenizer decoder {step.get('type')!r} is not supported in the form {step}")

    def _plain(self, token: str) -> bytes:
        if self._byte_tokens and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(match[1], 16)])
        if self._space_mark:
            token = token.replace(self._space_mark, " ")
        return token.encode()


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's table: printable Latin-1 bytes stand for themselves, the others for U+0100 onwards."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in printable]
    return table | {chr(0x100 + index): byte for index, byte in enumerate(others)}


_ALPHABET = _byte_alphabet()


def _byte_level(token: str) -> bytes:
    """A token with any other character (an added one, such as an emoji) stands for its own text."""
    try:
        return bytes([_ALPHABET[character] for character in token])
    except KeyError:
        return token.encode()
