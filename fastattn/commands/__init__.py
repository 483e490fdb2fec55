"""python -m fastattn COMMAND: each a module with HELP, add_options() and run()."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout

from ..cpu.cache import version
from ..verifying.oracle import WrongAnswer
from . import bench, info, verify, warmup

COMMANDS = {"info": info, "bench": bench, "verify": verify, "warmup": warmup}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status. arguments default to those of the process."""
    with (
        open(os.devnull, "w", encoding="utf-8") as nowhere,
        # None in a process without a console, or where the shell has closed it.
        redirect_stdout(sys.stdout or nowhere),
        redirect_stderr(sys.stderr or nowhere),
    ):
        return _main(arguments)


def _main(arguments: Sequence[str] | None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m fastattn", description="Exact fused attention for NumPy arrays."
    )
    parser.add_argument("--version", action="version", version=f"fastattn {version('fastattn')}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for name, command in COMMANDS.items():
        one = commands.add_parser(name, help=command.HELP, description=command.HELP)
        command.add_options(one)
        one.set_defaults(run=command.run)
    options = parser.parse_args(arguments)
    try:
        options.run(options)
        sys.stdout.flush()
    except BrokenPipeError:  # `| head` has read enough; the flush at exit is not to fail, too
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + 13  # as a shell says of a program that SIGPIPE ends
    # What the user can know.
    except (ImportError, NotImplementedError, ValueError, OSError, WrongAnswer) as error:
        print(f"fastattn: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0
