"""What every route works with."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, field
from pathlib import Path

from atom_async.api.errors import ApiError
from atom_async.config import EngineConfig, ServeConfig
from atom_async.engine.client import EngineClient
from atom_async.model.catalog import DEFAULT_ALIAS
from atom_async.model.resolve import ResolvedModel
from atom_async.telemetry.metrics import Metrics
from atom_async.text.chat_template import ChatTemplate
from atom_async.text.tokenizer import Tokenizer
from atom_async.text.tool_calls import detect_parser

RETRY_AFTER_S = 5


@dataclass(frozen=True, slots=True)
class TextSide:
    """Between text and token ids."""

    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    """None: the model has none, and /v1/chat/completions is refused."""
    tool_call_parser: str
    """A name in `text.tool_calls.PARSERS`."""


def load_text(model: ResolvedModel, config: ServeConfig) -> TextSide:
    """Blocks for as long as the tokenizer takes to load (up to about a second).

    Raises OSError or ValueError for a tokenizer or template that cannot be read.
    """
    text = model.text
    tokenizer = Tokenizer.from_file(model.tokenizer_json, eos_ids=text.eos_ids, bos_token=text.bos_token)
    source, tool_source = text.chat_template, text.tool_chat_template
    if config.chat_template is not None:
        source, tool_source = Path(config.chat_template).read_text(encoding="utf-8"), None
    special = {"bos_token": text.bos_token, "eos_token": text.eos_token}
    template = ChatTemplate(source, tool_source=tool_source, special_tokens=special) if source is not None else None
    parser: str = config.tool_call_parser
    if parser == "auto":
        parser = detect_parser(tool_source or source)
    return TextSide(tokenizer, template, parser)


def served_names(config: EngineConfig, serve: ServeConfig, model: ResolvedModel) -> tuple[str, ...]:
    """Names that clients may use; responses and metrics carry the first."""
    if serve.served_model_name:
        return serve.served_model_name
    names = (model.name, config.model) if config.model == DEFAULT_ALIAS else (config.model, model.name)
    return tuple(dict.fromkeys(names))


@dataclass(frozen=True, slots=True)
class Served:
    """A model with a running engine behind it."""

    engine: EngineClient
    text: TextSide
    names: tuple[str, ...]
    model: ResolvedModel

    @property
    def tokenizer(self) -> Tokenizer:
        return self.text.tokenizer

    @property
    def max_model_len(self) -> int:
        return self.engine.info.max_model_len


@dataclass(slots=True)
class ServerState:
    """Mutable: the server calls `begin` when loading is done, and sets `draining` when it begins to leave."""

    engine_config: EngineConfig
    serve_config: ServeConfig
    metrics: Metrics
    served: Served | None = None
    draining: bool = False
    """New requests get 503; running ones go on."""
    created: int = field(default_factory=lambda: int(time.time()))
    """Unix seconds, for /v1/models."""
    seeds: random.Random = field(init=False)
    """Of requests that bring no seed."""

    def __post_init__(self) -> None:
        self.seeds = random.Random(self.engine_config.seed)

    def begin(self, served: Served) -> None:
        """Loading is done: requests are accepted from now on."""
        self.served = served
        self.metrics.info = served.engine.info
        self.metrics.engine_up = True

    def accepting(self) -> Served:
        """Raises ApiError (503) unless new requests are accepted."""
        retry = {"retry-after": str(RETRY_AFTER_S)}
        if self.served is None:
            raise ApiError(503, "the model is still loading", code="loading", headers=retry)
        if (cause := self.served.engine.failure) is not None:
            raise ApiError(503, f"the engine has failed: {cause}", code="engine_failed")
        if self.draining:
            raise ApiError(503, "the server is shutting down", code="draining", headers=retry)
        return self.served

    def accepting_for(self, model: str | None) -> Served:
        """The same, for the model name of a request; none means the served one. Raises ApiError (404)."""
        served = self.accepting()
        if model is not None and model not in served.names:
            raise ApiError(
                404,
                f"the model {model!r} is not served here; served: {', '.join(served.names)}",
                param="model",
                code="model_not_found",
            )
        return served
