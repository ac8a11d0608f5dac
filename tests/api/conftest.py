"""The application around a scripted engine, with the default model's real tokenizer and chat template."""

import pytest
from scripted import ScriptedEngine
from starlette.applications import Starlette

from atom_async.api.app import create_app
from atom_async.api.state import Served, ServerState, TextSide, load_text
from atom_async.config import EngineConfig, ServeConfig
from atom_async.model.resolve import ResolvedModel
from atom_async.telemetry.metrics import Metrics
from atom_async.text.tokenizer import Tokenizer

NAMES = ("tiny", "default")


@pytest.fixture(scope="session")
def text_side(default_model: ResolvedModel) -> TextSide:
    return load_text(default_model, ServeConfig())


@pytest.fixture(scope="session")
def tokenizer(text_side: TextSide) -> Tokenizer:
    return text_side.tokenizer


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine()


@pytest.fixture
def state(engine: ScriptedEngine, text_side: TextSide, default_model: ResolvedModel) -> ServerState:
    state = ServerState(EngineConfig(), ServeConfig(), Metrics(NAMES[0]))
    state.begin(Served(engine, text_side, NAMES, default_model))
    return state


@pytest.fixture
def app(state: ServerState) -> Starlette:
    return create_app(state)
