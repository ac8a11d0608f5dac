"""The tokenizer inside a GGUF file, as a `tokenizer.json`.

A GGUF names its pre-tokenizer (`tokenizer.ggml.pre`) instead of describing it; the descriptions are here.
Two models of tokenizer exist: `gpt2`, byte-level BPE with its merges in the file, and `llama`,
SentencePiece BPE, whose merges follow from the scores (the pair whose union scores highest merges first).

The pre-tokenizers are those the models were trained with, as published in their own tokenizer.json
files. For SmolLM2 that is: every digit apart, then GPT-2's byte-level split.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import PreTokenizer

CONVERTER_VERSION = 1
"""Part of the cache key of converted tokenizers: raise it when the output changes."""

_UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 2, 3, 4, 6

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPLIT_WORDS = (
    _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{DIGITS}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True)
class _PreTokenization:
    digits: str | None = None
    """How many digits one piece may have, as a regex repetition; None: GPT-2's own split."""
    single_digits: bool = False
    nfc: bool = False
    ignore_merges: bool = False
    """A piece that is a vocabulary entry as a whole is taken as it is."""


_GPT2 = _PreTokenization()
_LLAMA3 = _PreTokenization(digits="{1,3}", ignore_merges=True)
_QWEN2 = _PreTokenization(digits="", nfc=True)
_PRE: dict[str, _PreTokenization] = {
    "default": _GPT2,
    "gpt-2": _GPT2,
    "smollm": _PreTokenization(single_digits=True),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
}
KNOWN_PRE_TOKENIZERS = tuple(_PRE)


def tokenizer_json_from_gguf(metadata: Mapping[str, Any]) -> str:
    """`metadata` as read by `read_gguf_header`.

    Raises ValueError when the vocabulary is missing, inconsistent or of a kind that is not implemented.
    """
    kind = metadata.get("tokenizer.ggml.model")
    vocabulary = _vocabulary(metadata)
    if kind == "gpt2":
        tokenizer = _byte_level(metadata, vocabulary)
    elif kind == "llama":
        tokenizer = _sentencepiece(metadata, vocabulary)
    else:
        raise ValueError(f"GGUF tokenizer model {kind!r} is not implemented; implemented: gpt2, llama")
    _add_tokens(tokenizer, metadata)
    _add_post_processor(tokenizer, metadata, byte_level=kind == "gpt2")
    return tokenizer.to_str()


def _vocabulary(metadata: Mapping[str, Any]) -> dict[str, int]:
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not tokens:
        raise ValueError("the GGUF file holds no vocabulary (tokenizer.ggml.tokens)")
    vocabulary = {token: index for index, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        raise ValueError("the GGUF vocabulary holds a token twice")
    return vocabulary


def _byte_level(metadata: Mapping[str, Any], vocabulary: dict[str, int]) -> Tokenizer:
    name = metadata.get("tokenizer.ggml.pre", "default")
    if name not in _PRE:
        known = ", ".join(KNOWN_PRE_TOKENIZERS)
        raise ValueError(
            f"GGUF pre-tokenizer {name!r} is not known; known: {known}. Pass the model's tokenizer.json (--tokenizer)"
        )
    pre = _PRE[name]
    merges = [_merge(line) for line in metadata.get("tokenizer.ggml.merges", [])]
    tokenizer = Tokenizer(BPE(vocabulary, merges, ignore_merges=pre.ignore_merges))
    if pre.nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _pre_tokenizer(pre)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _merge(line: str) -> tuple[str, str]:
    left, separator, right = line.partition(" ")
    if not separator or " " in right:
        raise ValueError(f"GGUF merge {line!r} is not a pair")
    return left, right


def _pre_tokenizer(pre: _PreTokenization) -> PreTokenizer:
    if pre.digits is not None:
        pattern = Regex(_SPLIT_WORDS.replace("{DIGITS}", pre.digits))
        split = pre_tokenizers.Split(pattern, behavior="isolated")
        return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if pre.single_digits:
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    return byte_level


def _sentencepiece(metadata: Mapping[str, Any], vocabulary: dict[str, int]) -> Tokenizer:
    scores = metadata.get("tokenizer.ggml.scores")
    if not isinstance(scores, list) or len(scores) != len(vocabulary):
        raise ValueError("the GGUF vocabulary lacks scores (tokenizer.ggml.scores), one a token")
    types = metadata.get("tokenizer.ggml.token_type", [])
    unknown = next((token for token, index in vocabulary.items() if types[index : index + 1] == [_UNKNOWN]), None)
    merges = _merges_by_score(vocabulary, scores, types)
    model = BPE(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=_BYTE in types)
    tokenizer = Tokenizer(model)
    prefix = metadata.get("tokenizer.ggml.add_space_prefix", True)
    space = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), space]) if prefix else space
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return tokenizer


def _merges_by_score(vocabulary: dict[str, int], scores: list[float], types: list[int]) -> list[tuple[str, str]]:
    """All pairs of entries whose union is an entry, best union first, then by the parts' ids."""
    merges = []
    for token, index in vocabulary.items():
        if types[index : index + 1] in ([_CONTROL], [_BYTE], [_UNKNOWN]):
            continue
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in vocabulary and right in vocabulary:
                merges.append((-scores[index], vocabulary[left], vocabulary[right], left, right))
    merges.sort()
    return [(left, right) for *_, left, right in merges]


def _add_tokens(tokenizer: Tokenizer, metadata: Mapping[str, Any]) -> None:
    """Control tokens are special (dropped from text); user-defined ones are matched whole but are text."""
    tokens = metadata["tokenizer.ggml.tokens"]
    for token, kind in zip(tokens, metadata.get("tokenizer.ggml.token_type", []), strict=False):
        if kind == _CONTROL:
            tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False)])
        elif kind == _USER_DEFINED:
            tokenizer.add_tokens([AddedToken(token, special=False, normalized=False)])


def _add_post_processor(tokenizer: Tokenizer, metadata: Mapping[str, Any], *, byte_level: bool) -> None:
    # Llama's SentencePiece files begin every prompt with BOS unless they say otherwise; GPT-2's do not.
    begin = _edge_token(metadata, "bos", default=not byte_level)
    end = _edge_token(metadata, "eos", default=False)
    if begin or end:
        template = " ".join([token for token, _ in begin] + ["$A"] + [token for token, _ in end])
        tokenizer.post_processor = processors.TemplateProcessing(single=template, special_tokens=begin + end)
    elif byte_level:
        tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)


def _edge_token(metadata: Mapping[str, Any], name: str, *, default: bool) -> list[tuple[str, int]]:
    index = metadata.get(f"tokenizer.ggml.{name}_token_id")
    if not metadata.get(f"tokenizer.ggml.add_{name}_token", default) or index is None:
        return []
    tokens = metadata["tokenizer.ggml.tokens"]
    if not 0 <= index < len(tokens):
        raise ValueError(f"GGUF {name} token id {index} is outside the vocabulary of {len(tokens)}")
    return [(tokens[index], index)]
