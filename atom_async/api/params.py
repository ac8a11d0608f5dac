"""From a request's fields to the sampling parameters of its sequences."""

from __future__ import annotations

import re
from dataclasses import dataclass

import msgspec

from atom_async.api.errors import ApiError, bad_request
from atom_async.api.requests import SharedFields
from atom_async.api.state import Served
from atom_async.wire.sampling import Grammar, SamplingParams

SEED_MASK = 2**64 - 1
MAX_STOPS = 64
_TOKEN_ID = re.compile(r"0|[1-9][0-9]{0,9}")
"""As JSON writes a number: one spelling for each id, so that none is biased twice."""


@dataclass(frozen=True, slots=True)
class TextRules:
    """How the output becomes text."""

    stop: tuple[str, ...]
    include_stop: bool
    skip_special_tokens: bool
    min_tokens: int


def text_rules(body: SharedFields) -> TextRules:
    """Raises ApiError."""
    stop = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
    if "" in stop:
        raise bad_request("a stop string must not be empty", "stop")
    if len(stop) > MAX_STOPS:
        raise bad_request(f"{len(stop)} stop strings; at most {MAX_STOPS} are taken", "stop")
    return TextRules(
        stop=stop,
        include_stop=bool(body.include_stop_str_in_output),
        skip_special_tokens=body.skip_special_tokens is not False,
        min_tokens=body.min_tokens or 0,
    )


def checked_output_tokens(asked: int | None, default: int, prompt_tokens: int, served: Served, param: str) -> int:
    """max_tokens of a sequence: what was asked for, or the default as far as the context goes.

    Raises ApiError when the prompt, or the prompt and what was asked for, do not fit the context.
    """
    room = served.max_model_len - prompt_tokens
    tokens = asked if asked is not None else min(default, max(room, 1))
    if tokens > room:
        wanted = f"{tokens} for the output" if asked is not None else "at least one for the output"
        raise ApiError(
            400,
            f"this model's maximum context length is {served.max_model_len} tokens, prompt and output together; the "
            f"request needs {prompt_tokens + tokens}: {prompt_tokens} in the prompt and {wanted}",
            param=param if asked is not None and room > 0 else "prompt",
            code="context_length_exceeded",
        )
    return tokens


def sampling_params(
    body: SharedFields, served: Served, *, max_tokens: int, logprobs: int, prompt_logprobs: int, grammar: Grammar | None
) -> SamplingParams:
    """Everything but the seed, which each sequence gets of its own. Raises ApiError.

    `logprobs` and `prompt_logprobs` are as in SamplingParams: -1 is none.
    """
    min_tokens = body.min_tokens or 0
    if min_tokens > max_tokens:
        raise bad_request(f"min_tokens is {min_tokens}, more than max_tokens, {max_tokens}", "min_tokens")
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=_or(body.temperature, 1.0),
        top_p=_or(body.top_p, 1.0),
        top_k=max(body.top_k or 0, 0),
        min_p=body.min_p or 0.0,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        repetition_penalty=_or(body.repetition_penalty, 1.0),
        logit_bias=_logit_bias(body, served),
        min_tokens=min_tokens,
        end_token_ids=_end_token_ids(body, served),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        grammar=grammar,
    )


def with_seed(sampling: SamplingParams, seed: int) -> SamplingParams:
    return msgspec.structs.replace(sampling, seed=seed & SEED_MASK)


def checked_logprobs(asked: int | None, most: int, param: str) -> int:
    """-1 for none. Raises ApiError above the server's limit."""
    if asked is None:
        return -1
    if asked > most:
        raise bad_request(f"{param} is {asked}; this server gives at most {most} (--max-logprobs)", param)
    return asked


def _or(value: float | None, default: float) -> float:
    return default if value is None else value


def _logit_bias(body: SharedFields, served: Served) -> tuple[tuple[int, float], ...]:
    vocabulary = served.engine.info.vocab_size
    pairs = []
    for text, bias in (body.logit_bias or {}).items():
        if not _TOKEN_ID.fullmatch(text) or int(text) >= vocabulary:
            shown = text if len(text) <= 20 else text[:20] + "..."
            raise bad_request(f"logit_bias: {shown!r} is no token id; they go from 0 to {vocabulary - 1}", "logit_bias")
        pairs.append((int(text), bias))
    return tuple(pairs)


def _end_token_ids(body: SharedFields, served: Served) -> tuple[int, ...]:
    vocabulary = served.engine.info.vocab_size
    for token_id in body.stop_token_ids or ():
        if token_id >= vocabulary:
            raise bad_request(
                f"stop_token_ids: {token_id} is no token id; they end at {vocabulary - 1}", "stop_token_ids"
            )
    own = () if body.ignore_eos else served.tokenizer.eos_ids
    return tuple(dict.fromkeys((*own, *(body.stop_token_ids or ()))))
