"""The command itself: quick help, lazy imports, exit codes."""

from __future__ import annotations

import subprocess
import sys

import pytest

from atom_async import __version__
from atom_async.cli import COMMANDS, main


def imported_by(code: str) -> set[str]:
    done = subprocess.run(
        [sys.executable, "-c", f"import sys\n{code}\nprint(*sys.modules)"], capture_output=True, text=True, check=True
    )
    return {name.split(".")[0] for name in done.stdout.splitlines()[-1].split()}


@pytest.mark.process
def test_help_imports_nothing_heavy() -> None:
    code = "from atom_async.cli import main\ntry:\n    main(['--help'])\nexcept SystemExit:\n    pass"
    assert not imported_by(code) & {"torch", "starlette", "uvicorn", "tokenizers", "numpy", "prompt_toolkit"}


@pytest.mark.process
def test_serve_never_imports_torch() -> None:
    assert "torch" not in imported_by("import atom_async.cli.serve")


def test_help_lists_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    text = capsys.readouterr().out
    assert all(name in text for name in COMMANDS)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"atom-async {__version__}\n"


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_every_command_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main([name, "--help"])
    assert f"atom-async {name}" in capsys.readouterr().out


def test_settings_that_cannot_be_end_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--port", "99999"]) == 2
    assert "--port '99999'" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [[], ["dance"], ["serve", "--nonsense"]])
def test_command_lines_that_cannot_be_end_with_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    assert "usage: atom-async" in capsys.readouterr().err
