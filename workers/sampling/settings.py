"""Sampling settings as columns indexed by slot, so that a batch is read with one gather per column."""

from __future__ import annotations

from enum import IntFlag

import numpy as np
import torch

from atom_async.wire.sampling import SamplingParams

_SMALLEST_TEMPERATURE = float(np.finfo(np.float32).tiny)


class Need(IntFlag):
    """What a slot asks for beyond the largest logit."""

    RANDOM = 1
    TRUNCATION = 2
    OUTPUT_PENALTY = 4
    REPETITION_PENALTY = 8
    BIAS = 16
    MIN_TOKENS = 32
    GRAMMAR = 64
    LOGPROBS = 128


ADJUSTING = Need.OUTPUT_PENALTY | Need.REPETITION_PENALTY | Need.BIAS | Need.MIN_TOKENS | Need.GRAMMAR
"""Those that change the logits."""


def needs_of(sampling: SamplingParams) -> Need:
    random = sampling.temperature > 0
    truncated = sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0
    asked = {
        Need.RANDOM: random,
        Need.TRUNCATION: random and truncated,
        Need.OUTPUT_PENALTY: bool(sampling.presence_penalty or sampling.frequency_penalty),
        Need.REPETITION_PENALTY: sampling.repetition_penalty != 1,
        Need.BIAS: bool(sampling.logit_bias),
        Need.MIN_TOKENS: sampling.min_tokens > 0 and bool(sampling.end_token_ids),
        Need.GRAMMAR: sampling.grammar is not None,
        Need.LOGPROBS: sampling.logprobs >= 0,
    }
    return Need(sum(need for need, wanted in asked.items() if wanted))


class Settings:
    """One row per slot; `flags` is 0 for a free slot."""

    def __init__(self, max_num_seqs: int, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self.flags = np.zeros(max_num_seqs, dtype=np.int64)
        self.seed = np.zeros(max_num_seqs, dtype=np.uint64)
        self.temperature = np.ones(max_num_seqs, dtype=np.float32)
        self.top_k = np.zeros(max_num_seqs, dtype=np.int64)
        self.top_p = np.ones(max_num_seqs)
        self.min_p = np.zeros(max_num_seqs)
        self.presence = np.zeros(max_num_seqs, dtype=np.float32)
        self.frequency = np.zeros(max_num_seqs, dtype=np.float32)
        self.repetition = np.ones(max_num_seqs, dtype=np.float32)
        self.min_tokens = np.zeros(max_num_seqs, dtype=np.int64)
        self.bias_ids: dict[int, torch.Tensor] = {}
        self.bias: dict[int, torch.Tensor] = {}
        self.end_ids: dict[int, torch.Tensor] = {}

    def add(self, slot: int, sampling: SamplingParams) -> Need:
        """Raises ValueError for a logit_bias outside the vocabulary."""
        needs = needs_of(sampling)
        if Need.BIAS in needs:
            self.bias_ids[slot], self.bias[slot] = self._bias(sampling)
        if Need.MIN_TOKENS in needs:
            ids = [token for token in sampling.end_token_ids if 0 <= token < self._vocab_size]
            self.end_ids[slot] = torch.tensor(ids, dtype=torch.int64, device=self._device)
        self.flags[slot] = needs
        self.seed[slot] = sampling.seed & 0xFFFFFFFFFFFFFFFF
        self.temperature[slot] = max(sampling.temperature, _SMALLEST_TEMPERATURE)
        self.top_k[slot] = max(sampling.top_k, 0)
        self.top_p[slot] = sampling.top_p
        self.min_p[slot] = sampling.min_p
        self.presence[slot] = sampling.presence_penalty
        self.frequency[slot] = sampling.frequency_penalty
        self.repetition[slot] = sampling.repetition_penalty
        self.min_tokens[slot] = sampling.min_tokens
        return needs

    def remove(self, slot: int) -> None:
        self.flags[slot] = 0
        self.bias_ids.pop(slot, None)
        self.bias.pop(slot, None)
        self.end_ids.pop(slot, None)

    def _bias(self, sampling: SamplingParams) -> tuple[torch.Tensor, torch.Tensor]:
        biases = dict(sampling.logit_bias)
        for token in biases:
            if not 0 <= token < self._vocab_size:
                raise ValueError(f"logit_bias names token {token}; the vocabulary has ids 0 to {self._vocab_size - 1}")
        ids = torch.tensor(list(biases), dtype=torch.int64, device=self._device)
        return ids, torch.tensor(list(biases.values()), dtype=torch.float32, device=self._device)
