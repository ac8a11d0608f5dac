"""The map in docs/architecture.md, kept true: who imports whom, how large things grow, what is never called."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCES = sorted([*ROOT.glob("atom_async/**/*.py"), *ROOT.glob("workers/**/*.py")])
MOST_LINES = 450
MOST_FUNCTION_LINES = 70

MAY_IMPORT = {
    "atom_async.wire": set(),
    "atom_async.cache": set(),
    "atom_async.events": set(),
    "atom_async.config": set(),
    "atom_async.scheduler": {"atom_async.cache", "atom_async.config", "atom_async.events", "atom_async.wire"},
    "atom_async.model": {"atom_async.wire", "atom_async.config", "atom_async.text"},
    "atom_async.text": {"atom_async.wire"},
    "atom_async.engine": {
        "atom_async.scheduler",
        "atom_async.events",
        "atom_async.cache",
        "atom_async.wire",
        "atom_async.config",
        "atom_async.model",
        "atom_async.text",
    },
    "atom_async.sim": {"atom_async.engine", "atom_async.wire", "atom_async.config"},
    "atom_async.telemetry": {"atom_async.engine", "atom_async.wire"},
    "atom_async.api": {
        "atom_async.engine",
        "atom_async.text",
        "atom_async.telemetry",
        "atom_async.model",
        "atom_async.wire",
        "atom_async.config",
    },
    "workers": {"atom_async.wire"},
}
FORBIDDEN_THIRD_PARTY = {"atom_async": {"torch", "transformers", "pickle"}, "workers": {"pickle", "transformers"}}


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


def package_of(module: str) -> str:
    parts = module.split(".")
    return parts[0] if parts[0] == "workers" else ".".join(parts[:2])


def imports_of(path: Path) -> set[str]:
    found: set[str] = set()
    parts = path.relative_to(ROOT).parts
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(parts[: len(parts) - node.level]) + "." if node.level else ""
            found.add((base + (node.module or "")).rstrip("."))
            if node.module in ("atom_async", None):
                found |= {f"{base or 'atom_async.'}{alias.name}" for alias in node.names}
    return found


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_point_one_way(path: Path) -> None:
    package = package_of(module_of(path))
    for imported in imports_of(path):
        top = imported.split(".")[0]
        assert top not in FORBIDDEN_THIRD_PARTY.get(package.split(".")[0], set()), f"imports {imported}"
        if top in ("atom_async", "workers") and package in MAY_IMPORT and imported != "atom_async":
            target = package_of(imported)
            if target == "atom_async.__version__":
                continue
            assert target == package or target in MAY_IMPORT[package], f"{package} imports {imported}"


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_files_and_functions_stay_small(path: Path) -> None:
    text = path.read_text()
    assert text.count("\n") <= MOST_LINES
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or 0) - node.lineno + 1
            assert lines <= MOST_FUNCTION_LINES, f"{node.name} has {lines} lines"


def calls_of(path: Path) -> set[str]:
    return {ast.unparse(node.func) for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)}


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_nothing_polls_and_no_task_is_dropped(path: Path) -> None:
    calls = calls_of(path)
    assert "asyncio.sleep" not in calls
    if path.name != "simulated.py":  # its steps last as long as its latency model says
        assert "time.sleep" not in calls


@pytest.mark.parametrize(
    "path",
    [p for p in SOURCES if p.parent.name in ("scheduler", "cache")],
    ids=lambda p: str(p.relative_to(ROOT)),
)
def test_decisions_are_deterministic(path: Path) -> None:
    """No clock, no randomness, no identity: the same events give the same decisions."""
    forbidden = {"time.time", "time.monotonic", "time.perf_counter", "random.random", "hash"}
    if path.name != "invariants.py":
        forbidden.add("id")
    assert not calls_of(path) & forbidden
    assert not imports_of(path) & {"time", "random", "asyncio", "uuid", "datetime"}
