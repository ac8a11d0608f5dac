"""A small SentencePiece vocabulary, as a GGUF file of the `llama` kind holds it."""

from typing import Any


def sentencepiece_metadata(*, add_space_prefix: bool = True) -> dict[str, Any]:
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
