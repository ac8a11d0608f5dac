"""A model folder: config.json, safetensors (one file or shards with an index), tokenizer.json."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from atom_async.model.text_settings import read_json
from atom_async.wire.model import WeightSource

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_LFS_POINTER = b"version https://git-lfs"


def folder_config(folder: Path) -> dict[str, Any]:
    """config.json, parsed. Raises FileNotFoundError or ValueError."""
    if not (folder / "config.json").is_file():
        found = sorted(path.name for path in folder.glob("*.gguf"))
        hint = f"; it holds {', '.join(found)}: give the path of that file" if found else ""
        raise FileNotFoundError(f"{folder} holds no config.json{hint}")
    return read_json(folder / "config.json")


def folder_weights(folder: Path) -> WeightSource:
    """The safetensors files. Raises FileNotFoundError when they are missing, ValueError when unusable."""
    names = _weight_names(folder)
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise FileNotFoundError(f"{folder} lacks {', '.join(missing)}, which its index names")
    for name in names:
        with (folder / name).open("rb") as file:
            if file.read(len(_LFS_POINTER)) == _LFS_POINTER:
                raise ValueError(f"{folder / name} is a Git LFS pointer, not the weights: run `git lfs pull`")
    return WeightSource(kind="safetensors", files=tuple(str(folder / name) for name in names))


def _weight_names(folder: Path) -> list[str]:
    if (folder / INDEX).is_file():
        shards = sorted(set(read_json(folder / INDEX).get("weight_map", {}).values()))
        if not shards or any(Path(name).name != name for name in shards):
            raise ValueError(f"{folder / INDEX} has no weight_map of file names in this folder")
        return shards
    if (folder / SINGLE).is_file():
        return [SINGLE]
    pickled = sorted(path.name for pattern in _PICKLED for path in folder.glob(pattern))
    if pickled:
        raise ValueError(
            f"{folder} holds only pickled weights ({', '.join(pickled[:3])}), which can run code on loading: "
            "convert them to safetensors"
        )
    raise FileNotFoundError(f"{folder} holds no weights: neither {SINGLE} nor {INDEX}")


def tokenizer_folder(setting: str) -> Path:
    """The folder meant by `--tokenizer` (a folder, or a tokenizer.json). Raises FileNotFoundError."""
    path = Path(setting).expanduser()
    if path.is_file() and path.name == "tokenizer.json":
        return path.parent
    if path.is_dir():
        return path
    raise FileNotFoundError(f"tokenizer {setting!r} is neither a folder nor a file called tokenizer.json")


def tokenizer_file(folder: Path) -> Path:
    """Raises FileNotFoundError, saying what else is there."""
    path = folder / "tokenizer.json"
    if path.is_file():
        return path
    hint = ""
    if (folder / "tokenizer.model").is_file():
        hint = " (only tokenizer.model: load and save it once with transformers to get a tokenizer.json)"
    raise FileNotFoundError(f"{folder} holds no tokenizer.json{hint}")
