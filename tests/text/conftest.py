"""Tokenizers of both families that the text side must handle."""

import pytest
import tokenizers

from atom_async.model.gguf_tokenizer import tokenizer_json_from_gguf
from atom_async.model.resolve import ResolvedModel
from atom_async.text.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def smol(default_model: ResolvedModel) -> Tokenizer:
    """The default model's: byte-level BPE."""
    return Tokenizer.from_file(default_model.tokenizer_json, eos_ids=default_model.text.eos_ids)


def sentencepiece_metadata(*, add_space_prefix: bool = True) -> dict[str, object]:
    """A small vocabulary of the `llama` kind: characters, a few words with scores, all byte tokens."""
    pieces = [("<unk>", 0.0, 2), ("<s>", 0.0, 3), ("</s>", 0.0, 3)]
    pieces += [(f"<0x{byte:02X}>", 0.0, 6) for byte in range(256)]
    words = ["▁t", "he", "▁the", "in", "an", "▁a", "▁an", "er", "▁c", "at", "▁cat", "▁s", "on", "ing", "▁▁", "ll", "lo"]
    pieces += [(word, -float(rank), 1) for rank, word in enumerate(words)]
    pieces += [(character, -1000.0 - rank, 1) for rank, character in enumerate("▁abcdefghijklmnoprstuvwxyzé.,")]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [piece for piece, _, _ in pieces],
        "tokenizer.ggml.scores": [score for _, score, _ in pieces],
        "tokenizer.ggml.token_type": [kind for _, _, kind in pieces],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_space_prefix": add_space_prefix,
    }


@pytest.fixture(scope="session")
def spiece() -> Tokenizer:
    """SentencePiece style, with byte fallback and a space before the first word."""
    text = tokenizer_json_from_gguf(sentencepiece_metadata())
    return Tokenizer(tokenizers.Tokenizer.from_str(text), eos_ids=(2,), bos_token="<s>")


@pytest.fixture(scope="session", params=["smol", "spiece"])
def any_tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    tokenizer: Tokenizer = request.getfixturevalue(request.param)
    return tokenizer
