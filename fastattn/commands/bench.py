"""Time fastattn against its peers, interleaved, and print ratios beside absolute times."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..benchmark import cases, contest, peers, plots, record, summary
from ..machine import default_num_threads
from ..optional import missing
from .terminal import check_writable, checked, console, count

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

HELP = "time fastattn against NumPy and whatever else is installed"
QUICK_ROUNDS = 5


def add_options(parser: argparse.ArgumentParser, json_path: Path | None = None) -> None:
    """The options; json_path is where --json writes if it is given no path."""
    several = "names, patterns or groups (" + ", ".join(cases.GROUPS) + "), comma-separated"
    among = "parts of " + ", ".join(peers.CONTENDERS) + ", comma-separated"
    number = default_num_threads()
    parser.add_argument("--quick", action="store_true", help="six workloads, five rounds")
    parser.add_argument("--cases", type=checked(cases.select), default="suite", help=several)
    parser.add_argument(
        "--peers", type=checked(peers.select), default=list(peers.CONTENDERS), help=among
    )
    parser.add_argument("--rounds", type=count, default=9, help="of all contenders (default 9)")
    parser.add_argument(
        "--threads", type=count, default=number, help=f"of every contender (default {number})"
    )
    path = json_path or Path(record.file_name())
    optional: dict[str, Any] = {"type": Path, "nargs": "?", "metavar": "PATH"}
    parser.add_argument(
        "--json", **optional, const=path, help=f"keep the samples (default path: {path.name})"
    )
    picture = Path(path.name).with_suffix(".png")
    parser.add_argument(
        "--plot", **optional, const=picture, help=f"draw the results (default path: {picture})"
    )


def run(options: argparse.Namespace, commit: str = "") -> None:
    """Measure, print, and keep what was asked for."""
    screen = console()
    peers.match_target()
    # What could not be kept is refused now, not after minutes.
    for path in filter(None, (options.json, options.plot)):
        check_writable(path)
    if options.plot:
        plots.check(options.plot)
    if options.json:
        record.read(options.json)
    if options.quick:
        options.cases, options.rounds = cases.select("quick"), QUICK_ROUNDS
    results = measure(options, screen)
    setting = record.setting(options.threads, commit)
    screen.print(table(results, setting))
    if coretype := os.environ.get("OPENBLAS_CORETYPE"):
        screen.print(f"NumPy is held back by OPENBLAS_CORETYPE={coretype}: unset it.")
    if options.json:
        record.save(options.json, "forward", setting, results)
    if options.plot:
        plots.draw({"forward": results}, options.plot)


def measure(options: argparse.Namespace, screen: Console) -> dict[str, dict]:
    """Results by case name; shows a progress bar."""
    from rich.progress import Progress

    try:
        from threadpoolctl import threadpool_limits
    except ImportError as error:
        extra = "'fastattn[bench]'"
        raise missing("the number of NumPy's threads", "threadpoolctl", extra) from error
    results = {}
    turns = len(options.peers) * (options.rounds + 1)
    progress = Progress(console=screen, transient=True, disable=not screen.is_terminal)
    with threadpool_limits(options.threads, "blas"), progress as p:
        task = p.add_task("", total=turns * len(options.cases))
        for done, case in enumerate(options.cases):
            p.update(task, description=case.name, completed=turns * done)
            results[case.name] = contest.contest(
                case, options.peers, options.rounds, options.threads, lambda: p.advance(task)
            )
    return results


def table(results: dict[str, dict], setting: dict[str, Any]) -> Table:
    """A section for each case, a line for each contender."""
    from rich.table import Table

    shown = Table(
        title=record.machine_text(setting),
        caption="ratio: time over that of the first line, median and quartiles of the rounds.\n"
        "limit: of the multiply-add peak or the read bandwidth measured in the same round.\n"
        "–: takes no part, for the reason given.",
    )
    shown.add_column("workload")
    shown.add_column("contender")
    for heading in ("time", "GFLOP/s", "limit", "ratio"):
        shown.add_column(heading, justify="right")
    for name, result in results.items():
        first = name
        for row in summary.rows(name, result, peers.OURS):
            shown.add_row(first, row.contender, *row_cells(row, result["bound"]))
            first = ""
        for contender, reason in result["absent"].items():
            shown.add_row(first, contender, "–", "–", "–", reason, style="dim")
            first = ""
        shown.add_section()
    return shown


def row_cells(row: summary.Row, bound: str) -> list[str]:
    """Time, GFLOP/s, limit and ratio of one contender."""
    return [
        summary.time_text(row.seconds),
        f"{row.gflop_s:.1f}",
        "–" if row.percent is None else f"{row.percent:.0f} % {bound}",
        f"{row.ratio:.2f} ({row.ratio_low:.2f}–{row.ratio_high:.2f})",
    ]
