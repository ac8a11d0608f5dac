"""The tokenizer: a `tokenizer.json` with what the engine's text side needs around it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import tokenizers

from atom_async.text.token_bytes import Leading, TokenBytes


class Tokenizer:
    """Text to token ids and back. Safe to share between threads."""

    def __init__(
        self, backend: tokenizers.Tokenizer, *, eos_ids: Sequence[int] = (), bos_token: str | None = None
    ) -> None:
        """Raises ValueError when the tokenizer's decoder is not supported."""
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._bytes_of = TokenBytes(backend)
        self._bytes: dict[int, bytes] = {}
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(index for index, token in added.items() if token.special)
        self.eos_ids = tuple(eos_ids)
        self.bos_token = bos_token

    @classmethod
    def from_file(cls, path: str | Path, *, eos_ids: Sequence[int] = (), bos_token: str | None = None) -> Tokenizer:
        """`path` is a tokenizer.json. Raises FileNotFoundError, or ValueError when it is none."""
        text = Path(path).read_text(encoding="utf-8")
        try:
            backend = tokenizers.Tokenizer.from_str(text)
        except Exception as error:  # the library raises bare Exception
            raise ValueError(f"{path} is not a tokenizer.json that the tokenizers library reads: {error}") from error
        return cls(backend, eos_ids=eos_ids, bos_token=bos_token)

    @property
    def vocab_size(self) -> int:
        """Added tokens included. The model's may be larger: checkpoints pad it."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    @property
    def leading(self) -> Leading:
        """What decoding does with the space before the first word."""
        return self._bytes_of.leading

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """`add_special_tokens` adds what the model expects around a bare prompt, such as BOS; a rendered
        chat template brings its own."""
        return self._backend.encode(text, add_special_tokens=add_special_tokens).ids

    def encode_batch(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[list[int]]:
        """As `encode`, in parallel."""
        encodings = self._backend.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        return [encoding.ids for encoding in encodings]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Ids outside the vocabulary decode to nothing."""
        return self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def token_id(self, token: str) -> int | None:
        return self._backend.token_to_id(token)

    def token(self, token_id: int) -> str | None:
        """As written in the vocabulary: `Ġthe`, `▁the`."""
        return self._backend.id_to_token(token_id)

    def token_bytes(self, token_id: int) -> bytes:
        """What the token adds to the text, in UTF-8; half a character when the token is that. Empty for
        an id outside the vocabulary."""
        data = self._bytes.get(token_id)
        if data is None:
            token = self._backend.id_to_token(token_id)
            data = b"" if token is None else self._bytes_of.of(token)
            self._bytes[token_id] = data
        return data

    def token_text(self, token_id: int) -> str:
        """`token_bytes` as text, for logprobs; U+FFFD where it is half a character."""
        return self.token_bytes(token_id).decode(errors="replace")
