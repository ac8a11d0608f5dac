"""Fixtures that several test folders share."""

import os

os.environ.setdefault("GOMP_SPINCOUNT", "10000")  # before torch: references must not spin while workers run

import pytest

from atom_async.config import EngineConfig
from atom_async.model.resolve import ResolvedModel, resolve_model


@pytest.fixture(scope="session")
def default_model() -> ResolvedModel:
    """The embedded default model, from the cache; fetched when it is missing."""
    return resolve_model(EngineConfig(device="cpu"))
