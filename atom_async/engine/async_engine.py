"""`AsyncEngine`: the engine for programs that embed it, in text."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import Any

import msgspec

from atom_async.config import EngineConfig
from atom_async.model.resolve import ResolvedModel, resolve_model
from atom_async.text.chat_template import ChatTemplate
from atom_async.text.output import TextAssembler, TextDelta
from atom_async.text.tokenizer import Tokenizer
from atom_async.wire.messages import WorkerProgress, pack_ints
from atom_async.wire.sampling import SamplingParams

from .client import EngineInfo, EngineOutput, EngineRequest, EngineStats, FinishReason, TokenLogprob
from .local import LocalEngine
from .process_workers import ProcessWorkers
from .prompts import check_ids

DEFAULT_MAX_TOKENS = 128

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]


class TextOutput(msgspec.Struct, frozen=True, kw_only=True):
    """News of one request. The texts of all outputs, joined, are the answer; the last has finish_reason."""

    request_id: str
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprob] | None = None
    """One a token id, when sampling.logprobs was set."""
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    """So far: up to the stop, with the token that stops."""
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    """The stop string or the stop token that ended the text."""
    error: str = ""


class AsyncEngine:
    """An async context manager: entering loads the model into worker processes, leaving ends them.

        async with AsyncEngine("default", max_num_seqs=16) as engine:
            async for output in engine.generate("Once upon a time", max_tokens=20):
                print(output.text, end="")

    Args:
        model: as for `atom-async serve`: `default`, a hub id, a folder or a `.gguf` file.
        config: everything at once, instead of `model` and `settings`.
        settings: fields of `EngineConfig`.

    Entering raises ValueError or FileNotFoundError (model or settings), or WorkerStartError.
    """

    def __init__(self, model: str | None = None, *, config: EngineConfig | None = None, **settings: Any) -> None:
        if config is not None and (model is not None or settings):
            raise ValueError("give either config or a model and settings, not both")
        if config is None:
            config = msgspec.convert(settings | ({"model": model} if model is not None else {}), EngineConfig)
        self.config = config
        self.model: ResolvedModel
        self.tokenizer: Tokenizer
        self._template: ChatTemplate | None = None
        self._engine: LocalEngine
        self._ids = itertools.count(1)
        self._seeds = random.Random(config.seed)

    async def __aenter__(self) -> AsyncEngine:
        await self.start()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._engine.stop()

    async def start(self, on_progress: Callable[[WorkerProgress], None] = lambda progress: None) -> EngineInfo:
        """What entering does, with a say in its progress."""
        self.model = await asyncio.to_thread(resolve_model, self.config)
        text = self.model.text
        self.tokenizer = await asyncio.to_thread(
            Tokenizer.from_file, self.model.tokenizer_json, eos_ids=text.eos_ids, bos_token=text.bos_token
        )
        if text.chat_template is not None:
            special = {"bos_token": text.bos_token, "eos_token": text.eos_token}
            self._template = ChatTemplate(
                text.chat_template, tool_source=text.tool_chat_template, special_tokens=special
            )
        self._engine = self._make_engine()
        return await self._engine.start(on_progress)

    def _make_engine(self) -> LocalEngine:
        model = self.model
        workers = ProcessWorkers(
            self.config,
            model.spec,
            model.weights,
            device=model.device,
            dtype=model.dtype,
            max_model_len=model.max_model_len,
            tokenizer_json=str(model.tokenizer_json),
            end_token_ids=model.text.eos_ids,
        )
        return LocalEngine(
            self.config,
            workers,
            max_model_len=model.max_model_len,
            vocab_size=model.spec.vocab_size,
            dtype=model.dtype,
        )

    async def stop(self) -> None:
        """What leaving does. Idempotent."""
        await self._engine.stop()

    @property
    def info(self) -> EngineInfo:
        return self._engine.info

    @property
    def failure(self) -> str | None:
        """Why the engine is dead; None while it lives."""
        return self._engine.failure

    async def generate(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        stop: Sequence[str] = (),
        ignore_eos: bool = False,
        priority: int = 0,
        cache_salt: str = "",
        deadline_ms: float | None = None,
        **settings: Any,
    ) -> AsyncGenerator[TextOutput, None]:
        """Streams the answer to one prompt; leaving the loop early aborts the request.

        Args:
            prompt: text, token ids, or chat messages (rendered with the model's template).
            sampling: all settings at once, end_token_ids included; otherwise `settings` are fields of
                SamplingParams, EOS ends the output unless `ignore_eos`, and a seed is drawn from `config.seed`.
            stop: strings that end the text; they are not part of it.
            priority: lower runs first.
            deadline_ms: a request that has not been started by then ends with finish_reason `error`.

        Raises ValueError for settings or prompts that make no sense, RequestRejected, QueueFull,
        EngineDraining, EngineDead.
        """
        ids = self._encode(prompt)
        params = self._params(sampling, settings, ignore_eos=ignore_eos)
        request = EngineRequest(
            request_id=request_id or f"req-{next(self._ids)}",
            prompt_token_ids=pack_ints(ids),
            sampling=params,
            cache_salt=cache_salt,
            priority=priority,
            deadline_ms=deadline_ms,
        )
        assembler = TextAssembler[TokenLogprob](self.tokenizer, stop=stop, min_tokens=params.min_tokens)
        completion_tokens = 0
        # aclosing: a generator left early must end the one inside it now, not when it is collected
        async with contextlib.aclosing(self._engine.generate(request)) as stream:
            async for output in stream:
                delta = assembler.push(output.token_ids, output.logprobs, stop_token_id=output.stop_token_id)
                completion_tokens += delta.produced
                rest = assembler.finish() if output.finish_reason is not None else None
                if assembler.stopped_by is not None:
                    self._engine.finish(request.request_id)
                yield _text_output(output, [delta, rest], len(ids), completion_tokens, assembler.stopped_by)
                if assembler.stopped_by is not None:
                    return

    def _encode(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt)
        ids = [item for item in prompt if isinstance(item, int)]
        if len(ids) == len(prompt):
            check_ids(ids, self.info.vocab_size)
            return ids
        if self._template is None:
            raise ValueError(f"{self.model.name} has no chat template: give text or token ids instead of messages")
        messages = [dict(item) for item in prompt if not isinstance(item, int)]
        return self.tokenizer.encode(self._template.render_chat(messages), add_special_tokens=False)

    def _params(self, given: SamplingParams | None, settings: dict[str, Any], *, ignore_eos: bool) -> SamplingParams:
        if given is not None:
            if settings or ignore_eos:
                raise ValueError("give either sampling or single settings, not both")
            return given
        ends = tuple(settings.pop("end_token_ids", ())) + (() if ignore_eos else self.model.text.eos_ids)
        defaults = {"max_tokens": DEFAULT_MAX_TOKENS, "seed": self._seeds.getrandbits(64)}
        values = defaults | settings | {"end_token_ids": tuple(dict.fromkeys(ends))}
        unknown = values.keys() - set(SamplingParams.__struct_fields__)
        if unknown:
            raise ValueError(
                f"unknown sampling settings {sorted(unknown)}; known: {', '.join(SamplingParams.__struct_fields__)}"
            )
        return SamplingParams(**values)

    def abort(self, request_id: str) -> None:
        """The request's iterator ends with finish_reason `abort`. Idempotent."""
        self._engine.abort(request_id)

    async def drain(self) -> None:
        """Refuses new requests and returns when the running ones have ended."""
        await self._engine.drain()

    async def stats(self) -> EngineStats:
        return await self._engine.stats()


def _text_output(
    output: EngineOutput,
    deltas: Sequence[TextDelta[TokenLogprob] | None],
    prompt_tokens: int,
    completion_tokens: int,
    stopped_by: str | None,
) -> TextOutput:
    parts = [delta for delta in deltas if delta is not None]
    logprobs = [entry for part in parts for entry in part.logprobs or ()]
    return TextOutput(
        request_id=output.request_id,
        text="".join(part.text for part in parts),
        token_ids=[token for part in parts for token in part.token_ids],
        logprobs=logprobs if any(part.logprobs is not None for part in parts) else None,
        prompt_tokens=prompt_tokens,
        cached_tokens=output.cached_tokens,
        completion_tokens=completion_tokens,
        finish_reason="stop" if stopped_by is not None else output.finish_reason,
        stop_reason=stopped_by if stopped_by is not None else output.stop_token_id,
        error=output.error,
    )
