"""Where atom-async keeps files of its own."""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir() -> Path:
    """`$ATOM_CACHE_DIR`, else `atom-async` in `$XDG_CACHE_HOME` (`~/.cache`). Not created here."""
    own = os.environ.get("ATOM_CACHE_DIR")
    if own:
        return Path(own).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "atom-async"


def models_dir() -> Path:
    return cache_dir() / "models"


def tokenizers_dir() -> Path:
    return cache_dir() / "tokenizers"
