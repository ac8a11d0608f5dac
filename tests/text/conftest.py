"""Tokenizers of both families that the text side must handle."""

import pytest
import tokenizers
from spiece_vocabulary import sentencepiece_metadata

from atom_async.model.gguf_tokenizer import tokenizer_json_from_gguf
from atom_async.model.resolve import ResolvedModel
from atom_async.text.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def smol(default_model: ResolvedModel) -> Tokenizer:
    """The default model's: byte-level BPE."""
    return Tokenizer.from_file(default_model.tokenizer_json, eos_ids=default_model.text.eos_ids)


@pytest.fixture(scope="session")
def spiece() -> Tokenizer:
    """SentencePiece style, with byte fallback and a space before the first word."""
    text = tokenizer_json_from_gguf(sentencepiece_metadata())
    return Tokenizer(tokenizers.Tokenizer.from_str(text), eos_ids=(2,), bos_token="<s>")


@pytest.fixture(scope="session")
def metaspace() -> Tokenizer:
    """SentencePiece style as a `Metaspace` decoder, without byte fallback."""
    words = ["▁", "▁the", "▁cat", "▁▁", "a", "b", "é", "<unk>"]
    backend = tokenizers.Tokenizer(
        tokenizers.models.BPE({word: i for i, word in enumerate(words)}, [], unk_token="<unk>")
    )
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    backend.decoder = tokenizers.decoders.Metaspace()
    backend.add_special_tokens(["<end>"])
    return Tokenizer(backend)


@pytest.fixture(scope="session", params=["smol", "spiece"])
def any_tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    tokenizer: Tokenizer = request.getfixturevalue(request.param)
    return tokenizer
