"""``akv``: what a person types. One module a command; this one finds it.

Commands run in the foreground, in one thread. What a person has to put right
is one line on standard error and exit status 1.
"""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from akv.cli import bench, check, store, top, trace
from akv.core.errors import AkvError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ("main",)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; the exit status is 0 if nothing failed, else 1."""
    parser = argparse.ArgumentParser(
        prog="akv",
        description="Keeps the KV blocks that an LLM engine computes, and brings "
        "them back.",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for command in (check, trace, top, store, bench):
        command.add_command(commands)
    options = parser.parse_args(arguments)
    try:
        status: int = options.run(options)
    except AkvError as error:
        print(f"akv: {error}", file=sys.stderr)
        return 1
    return status
