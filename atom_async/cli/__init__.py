"""The command line: one file a command, imported only when it is the one that runs.

A command's module has `add_parser(subparsers)`, which sets `run` as the parser's default, and `run(args)`, which
returns the exit code.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from atom_async import __version__

COMMANDS = {
    "serve": "serve a model over HTTP",
    "chat": "talk to a server in the terminal",
    "models": "list, fetch, remove or verify the models atom-async can fetch",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0, 1 for a failure, 2 for a command line or setting that cannot be."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = _parser(next((word for word in arguments if not word.startswith("-")), None))
    args = parser.parse_args(arguments)
    from atom_async.cli.flags import ConfigError

    try:
        code: int = args.run(args)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return code


def _parser(chosen: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="atom-async", description="An event-driven LLM serving engine", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"atom-async {__version__}")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, text in COMMANDS.items():
        if name == chosen:
            importlib.import_module(f"atom_async.cli.{name}").add_parser(subparsers)
        else:
            subparsers.add_parser(name, help=text)
    return parser
