"""Models with one attention and with another, in turn: what the scripts that compare them share."""

from __future__ import annotations

import argparse
import fnmatch
from collections.abc import Callable, Sequence

import numpy as np
import repository
import torch
from rich.table import Table

import fastattn
from fastattn.benchmark import contest, summary
from fastattn.commands import terminal
from fastattn.machine import default_num_threads


def options(doc: str, rounds: int) -> argparse.Namespace:
    """What was asked for: only, threads and rounds. The threads are set."""
    parser = repository.parser(doc)
    parser.add_argument("--only", default="*", help="cases or patterns, comma-separated")
    parser.add_argument("--threads", type=terminal.count, default=default_num_threads())
    text = f"default {rounds}"
    parser.add_argument("--rounds", type=terminal.count, default=rounds, help=text)
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    fastattn.set_num_threads(asked.threads)
    return asked


def compare(
    title: str,
    names: Sequence[str],
    cases: Sequence[str],
    calls: Callable[[str], Sequence[Callable]],
    asked: argparse.Namespace,
) -> None:
    """Print how long the two calls of each case take, and the first over the second."""
    table = Table(title, *names, f"{' / '.join(names)} (quartiles)")
    for name in cases:
        if not any(fnmatch.fnmatch(name, pattern) for pattern in asked.only.split(",")):
            continue
        first, second = contest.paired(*calls(name), asked.rounds)
        low, ratio, high = np.percentile(np.array(first) / second, (25, 50, 75))
        times = (summary.time_text(float(np.median(seconds))) for seconds in (first, second))
        table.add_row(name, *times, f"{ratio:.2f} ({low:.2f}–{high:.2f})")
    terminal.console().print(table)
