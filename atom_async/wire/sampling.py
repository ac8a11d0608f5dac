"""How one request is sampled: the single definition used by API, engine and worker."""

from __future__ import annotations

import msgspec

GRAMMAR_KINDS = ("json_schema", "regex", "lark")


class Grammar(msgspec.Struct, frozen=True, array_like=True):
    """A constraint on the output. `kind` is one of GRAMMAR_KINDS, `source` its text.

    `json_schema` holds a JSON Schema document; any JSON object is `{"type": "object"}`.
    A choice between literals is a `lark` grammar made by the API.
    """

    kind: str
    source: str


class SamplingParams(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """Sampling settings of one sequence.

    The engine reads the ending rules (max_tokens, end_token_ids); the worker reads the rest, and
    end_token_ids as the ids it must not produce before min_tokens.
    """

    max_tokens: int
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 is off."""
    min_p: float = 0.0
    presence_penalty: float = 0.0
    """OpenAI's: subtracted once from the logit of each token already in the output."""
    frequency_penalty: float = 0.0
    """OpenAI's: subtracted once per occurrence in the output."""
    repetition_penalty: float = 1.0
    """CTRL's (arXiv:1909.05858): divides positive, multiplies negative logits of prompt and output tokens."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int = 0
    """Always set (drawn by the engine's client when the caller gives none): draw i of a sequence is a
    function of (seed, i) alone, so the batch around it cannot change it."""
    min_tokens: int = 0
    end_token_ids: tuple[int, ...] = ()
    """Ids that end the output: EOS ids unless ignore_eos, plus the caller's stop token ids."""
    logprobs: int = -1
    """-1: none; k >= 0: the sampled token's log-probability and the k most likely ones. Of the model's
    own distribution (log-softmax of the raw logits), before penalties and temperature."""
    prompt_logprobs: int = -1
    """As `logprobs`, for every prompt token after the first."""
    grammar: Grammar | None = None

    @property
    def needs_history(self) -> bool:
        """Whether the sampler reads token ids that precede the first computed chunk."""
        return bool(
            self.presence_penalty
            or self.frequency_penalty
            or self.repetition_penalty != 1.0
            or self.grammar is not None
        )
