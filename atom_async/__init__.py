"""atom-async: an event-driven LLM serving engine for agentic traffic.

`AsyncEngine` embeds it; everything else is under `atom-async --help`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from atom_async.config import EngineConfig
    from atom_async.engine.async_engine import AsyncEngine, TextOutput
    from atom_async.wire.sampling import Grammar, SamplingParams

__version__ = "0.1.0"
__all__ = ["AsyncEngine", "EngineConfig", "Grammar", "SamplingParams", "TextOutput", "__version__"]

_HOMES = {
    "AsyncEngine": "atom_async.engine.async_engine",
    "TextOutput": "atom_async.engine.async_engine",
    "EngineConfig": "atom_async.config",
    "SamplingParams": "atom_async.wire.sampling",
    "Grammar": "atom_async.wire.sampling",
}


def __getattr__(name: str) -> Any:
    """Imports on first use, so that `import atom_async` alone stays cheap."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)
