"""Which device `auto` means, found out without importing torch."""

from __future__ import annotations

import importlib.util
import os
import re
from functools import cache
from pathlib import Path
from typing import Literal

Device = Literal["cpu", "cuda", "simulated"]

_GPU_NODES = ("/dev/nvidiactl", "/dev/kfd")
_VISIBILITY = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
_GPU_BUILD = re.compile(r"^(?:cuda|hip)\b[^=\n]*=\s*['\"]", re.MULTILINE)


def resolve_device(setting: Literal["auto", "cpu", "cuda", "simulated"]) -> Device:
    """`auto` is `cuda` (ROCm too) where there is a GPU and torch is built for one, else `cpu`.

    Raises ValueError when `cuda` is asked for and the installed torch has no GPU support.
    """
    if setting == "auto":
        return "cuda" if _gpu_visible() and torch_has_gpu_support() else "cpu"
    if setting == "cuda" and not torch_has_gpu_support():
        raise ValueError("device cuda: the installed torch is built without CUDA or ROCm; install a GPU build of torch")
    return setting


def _gpu_visible() -> bool:
    hidden = any(os.environ.get(name) in ("", "-1") for name in _VISIBILITY)
    return not hidden and any(Path(node).exists() for node in _GPU_NODES)


@cache
def torch_has_gpu_support() -> bool:
    """Reads torch/version.py as text: `cuda` or `hip` is a version there, or None."""
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        return False
    version = Path(found.origin).with_name("version.py")
    return version.is_file() and bool(_GPU_BUILD.search(version.read_text()))
