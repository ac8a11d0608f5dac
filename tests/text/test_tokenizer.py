"""The tokenizer made from a GGUF file, against transformers' own conversion and a naive SentencePiece."""

import itertools
import warnings
from collections.abc import Callable

import pytest
import tokenizers
from corpus import TEXTS
from hypothesis import given, settings
from hypothesis import strategies as st
from spiece_vocabulary import sentencepiece_metadata
from tokenizers import pre_tokenizers

from atom_async.model.gguf_header import read_gguf_header
from atom_async.model.gguf_tokenizer import tokenizer_json_from_gguf
from atom_async.model.resolve import ResolvedModel
from atom_async.text.tokenizer import Tokenizer

Encode = Callable[[str], list[int]]


@pytest.fixture(scope="module")
def transformers_encode(default_model: ResolvedModel) -> Encode:
    """transformers reads the same GGUF with its own converter. That leaves out what the file's `smollm`
    stands for, SmolLM2's published splitting of every numeral, so it is put back here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers import AutoTokenizer

        path = read_gguf_header(default_model.weights.files[0]).path
        theirs = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    digits, byte_level = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
    theirs.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    return lambda text: list(theirs.encode(text, add_special_tokens=False))


def test_encodes_as_transformers_does(smol: Tokenizer, transformers_encode: Encode) -> None:
    for text in TEXTS:
        assert smol.encode(text) == transformers_encode(text), text


def test_random_text_encodes_as_in_transformers(smol: Tokenizer, transformers_encode: Encode) -> None:
    @settings(max_examples=300, deadline=None)
    @given(st.text(max_size=40))
    def check(text: str) -> None:
        assert smol.encode(text) == transformers_encode(text)

    check()


def test_every_numeral_is_split_off(smol: Tokenizer) -> None:
    assert [smol.token_text(token) for token in smol.encode("x 1234")] == ["x", " ", "1", "2", "3", "4"]
    assert [smol.token(token) for token in smol.encode("m ²")] == ["m", "Ġ", "Â²"]


def test_special_tokens_are_matched_and_skipped(smol: Tokenizer) -> None:
    ids = smol.encode("<|im_start|>user\nHi<|im_end|>")
    assert ids[0] == 1
    assert ids[-1] == 2
    assert smol.decode(ids) == "user\nHi"
    assert smol.decode(ids, skip_special_tokens=False) == "<|im_start|>user\nHi<|im_end|>"
    assert smol.special_ids >= {1, 2}
    assert smol.eos_ids == (2,)


@pytest.mark.parametrize("text", TEXTS)
def test_round_trip(smol: Tokenizer, text: str) -> None:
    assert smol.decode(smol.encode(text), skip_special_tokens=False) == text
    assert b"".join(map(smol.token_bytes, smol.encode(text))).decode() == text


def test_batch_is_the_same_as_one_by_one(smol: Tokenizer) -> None:
    assert smol.encode_batch(TEXTS) == [smol.encode(text) for text in TEXTS]


def test_ids_outside_the_vocabulary_are_nothing(smol: Tokenizer) -> None:
    assert smol.token_bytes(10**6) == b""
    assert smol.token(10**6) is None
    assert smol.decode([10**6]) == ""
    assert smol.vocab_size == 49_152


def naive_sentencepiece(text: str, scores: dict[str, float]) -> list[str]:
    """Merges the adjacent pair whose union scores highest, leftmost first, until none is left."""
    pieces = list("▁" + text.replace(" ", "▁"))
    while True:
        unions = [(scores.get(a + b), -index) for index, (a, b) in enumerate(itertools.pairwise(pieces))]
        known = [(score, index) for score, index in unions if score is not None]
        if not known:
            return pieces
        at = -max(known)[1]
        pieces[at : at + 2] = [pieces[at] + pieces[at + 1]]


def test_sentencepiece_merges_by_score(spiece: Tokenizer) -> None:
    metadata = sentencepiece_metadata()
    scores = {
        token: score
        for token, score, kind in zip(
            metadata["tokenizer.ggml.tokens"],
            metadata["tokenizer.ggml.scores"],
            metadata["tokenizer.ggml.token_type"],
            strict=True,
        )
        if kind == 1
    }

    @settings(max_examples=300, deadline=None)
    @given(st.text("abcdefghilnorst .", min_size=1, max_size=30))
    def check(text: str) -> None:
        ids = spiece.encode(text, add_special_tokens=False)
        assert [spiece.token(token) for token in ids] == naive_sentencepiece(text, scores)
        assert spiece.decode(ids) == text

    check()


def test_sentencepiece_adds_bos_and_falls_back_to_bytes(spiece: Tokenizer) -> None:
    ids = spiece.encode("the 😀")
    assert ids[0] == 1
    assert [spiece.token(token) for token in ids[-4:]] == ["<0xF0>", "<0x9F>", "<0x98>", "<0x80>"]
    assert spiece.decode(ids) == "the 😀"


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("llama-bpe", "x 12345", ["x", " ", "123", "45"]),
        ("qwen2", "x 123", ["x", " ", "1", "2", "3"]),
        ("smollm", "x 123", ["x", " ", "1", "2", "3"]),
        ("gpt-2", "x 123", ["x", " 123"]),
    ],
)
def test_pre_tokenizers_split_as_published(pre: str, text: str, pieces: list[str]) -> None:
    alphabet = [tokenizers.pre_tokenizers.ByteLevel.alphabet()]
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": sorted(alphabet[0]),
        "tokenizer.ggml.merges": [],
    }
    backend = tokenizers.Tokenizer.from_str(tokenizer_json_from_gguf(metadata))
    split = backend.pre_tokenizer.pre_tokenize_str(text)
    assert [text[begin:end] for _, (begin, end) in split] == pieces


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokenizer.ggml.model": "bert"}, "'bert' is not implemented; implemented: gpt2, llama"),
        ({"tokenizer.ggml.pre": "mystery"}, "'mystery' is not known"),
        ({"tokenizer.ggml.tokens": []}, "no vocabulary"),
        ({"tokenizer.ggml.tokens": ["a", "a"]}, "twice"),
        ({"tokenizer.ggml.merges": ["ab"]}, "not a pair"),
        ({"tokenizer.ggml.model": "llama"}, "lacks scores"),
        ({"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.bos_token_id": 9}, "outside the vocabulary"),
    ],
)
def test_what_cannot_be_converted_says_so(change: dict[str, object], message: str) -> None:
    metadata = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": ["a", "b"], "tokenizer.ggml.merges": []}
    with pytest.raises(ValueError, match=message):
        tokenizer_json_from_gguf(metadata | change)


def test_unsupported_decoder_is_refused() -> None:
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="a"))
    backend.decoder = tokenizers.decoders.CTC()
    with pytest.raises(ValueError, match="decoder 'CTC' is not supported"):
        Tokenizer(backend)
