"""Where the scripts keep their results, and which commit they measured."""

from __future__ import annotations

import argparse
import subprocess
from pathlib import Path
from typing import Any

from fastattn.benchmark import record

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench" / "results" / record.file_name()


def parser(doc: str) -> argparse.ArgumentParser:
    """A parser whose help is the script's docstring, line by line."""
    raw = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(description=doc, formatter_class=raw)


def add_json(parser: argparse.ArgumentParser) -> None:
    """The option --json of a script that measures."""
    text = "keep the samples; without a path in bench/results/<processor>.json"
    parser.add_argument("--json", type=Path, nargs="?", const=RESULTS, metavar="PATH", help=text)


def setting(num_threads: int) -> dict[str, Any]:
    """What a figure depends on, the commit included."""
    return record.setting(num_threads, commit())


def commit(folder: Path = ROOT) -> str:
    """The commit of a folder, with "+" if files differ from it; "" outside a repository."""
    described = subprocess.run(
        ["git", "describe", "--always", "--dirty=+", "--abbrev=12", "--exclude=*"],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    return described.stdout.strip()
