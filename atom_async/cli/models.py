"""`atom-async models list | fetch | remove | verify`: the catalog models kept in the cache folder."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from atom_async.model.catalog import CATALOG, DEFAULT_ALIAS, DEFAULT_MODEL, CatalogModel, FetchError
from atom_async.model.catalog import fetch as fetch_model
from atom_async.model.catalog import find as find_model
from atom_async.model.catalog import remove as remove_model
from atom_async.model.catalog import verify as verify_model
from atom_async.model.progress import console_progress

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser("models", help="list, fetch, remove or verify the models atom-async can fetch")
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    actions.add_parser("list", help="what there is, and what is kept on this machine")
    for name, text in (
        ("fetch", "download a model into the cache folder"),
        ("remove", "delete a kept model"),
        ("verify", "read a kept model and compare its SHA-256"),
    ):
        action = actions.add_parser(name, help=text)
        action.add_argument(
            "model", nargs="?", default=DEFAULT_ALIAS, help=f"default: {DEFAULT_ALIAS} ({DEFAULT_MODEL.name})"
        )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Returns the exit code: 0, or 1 after saying on standard error what went wrong."""
    if args.action == "list":
        return _list()
    action: Callable[[CatalogModel], None] = {"fetch": _fetch, "remove": _remove, "verify": _verify}[args.action]
    try:
        action(find_model(args.model))
    except (FetchError, OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def _list() -> int:
    for model in CATALOG:
        alias = f" ({DEFAULT_ALIAS})" if model is DEFAULT_MODEL else ""
        where = str(model.path) if model.present else "not fetched"
        print(f"{model.name}{alias}  {model.size / 1e6:.1f} MB  {model.license}  {where}")
    return 0


def _fetch(model: CatalogModel) -> None:
    with console_progress() as progress:
        path = fetch_model(model, progress)
    print(f"{model.name} is at {path}")


def _remove(model: CatalogModel) -> None:
    freed = remove_model(model)
    print(f"{model.name}: {f'freed {freed / 1e6:.1f} MB' if freed else 'was not kept'}")


def _verify(model: CatalogModel) -> None:
    verify_model(model)
    print(f"{model.name} is complete: SHA-256 {model.sha256}")
