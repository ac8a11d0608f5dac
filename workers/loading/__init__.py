"""Weights by file format."""

from __future__ import annotations

from atom_async.wire.messages import WorkerInit

from .reader import TensorReader


def create_reader(init: WorkerInit) -> TensorReader:
    """The reader for the model's files. Raises OSError or ValueError when they cannot be read."""
    if init.weights.kind == "gguf":
        from .gguf import GgufReader

        return GgufReader(init.weights, init.model)
    if init.weights.kind == "safetensors":
        from .safetensors import SafetensorsReader

        return SafetensorsReader(init.weights.files)
    from .random import RandomReader

    return RandomReader(init.seed)
