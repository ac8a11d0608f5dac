"""The command line: one file a command."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from atom_async.cli import models


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(prog="atom-async", description="An event-driven LLM serving engine")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    models.add_parser(subparsers)
    args = parser.parse_args(argv)
    code: int = args.run(args)
    return code
