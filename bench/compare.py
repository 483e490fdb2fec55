"""Time fastattn against its peers, interleaved, and print ratios beside absolute times.

python bench/compare.py --quick
python bench/compare.py --cases suite --rounds 15 --json
"""

from __future__ import annotations

import argparse
import os

import cases
import peers
import record
import summary
from contest import contest
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from threadpoolctl import threadpool_limits

from fastattn.machine import default_num_threads


def arguments() -> argparse.Namespace:
    parser = record.parser(__doc__)
    parser.add_argument("--cases", type=cases.select, default="suite", help="patterns or groups")
    parser.add_argument("--contenders", type=peers.select, default=list(peers.CONTENDERS))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=default_num_threads())
    parser.add_argument("--quick", action="store_true", help="the quick cases, five rounds")
    options = parser.parse_args()
    if options.quick:
        options.cases, options.rounds = cases.select("quick"), 5
    return options


def run(options: argparse.Namespace, console: Console) -> dict[str, dict]:
    """Results by case name; shows a progress bar."""
    results = {}
    turns = len(options.contenders) * (options.rounds + 1)
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("", total=turns * len(options.cases))
        for done, case in enumerate(options.cases):
            progress.update(task, description=case.name, completed=turns * done)
            results[case.name] = contest(
                case,
                options.contenders,
                options.rounds,
                options.threads,
                lambda: progress.advance(task),
            )
    return results


def table(results: dict[str, dict], setting: dict, baseline: str) -> Table:
    """A section for each case, a line for each contender that could run it."""
    shown = Table(
        title=f"{setting['cpu']}, {setting['num_threads']} threads",
        caption="ratio: time over that of the first line, median and quartiles of the rounds.\n"
        "limit: of the multiply-add peak or the read bandwidth measured in the same round.",
    )
    shown.add_column("workload")
    shown.add_column("contender")
    for heading in ("time", "GFLOP/s", "limit", "ratio"):
        shown.add_column(heading, justify="right")
    for name, result in results.items():
        for index, row in enumerate(summary.rows(name, result, baseline)):
            shown.add_row(
                "" if index else name,
                row.contender,
                summary.time_text(row.seconds),
                f"{row.gflop_s:.1f}",
                "–" if row.percent is None else f"{row.percent:.0f} % {result['bound']}",
                f"{row.ratio:.2f} ({row.ratio_low:.2f}–{row.ratio_high:.2f})",
            )
        shown.add_section()
    return shown


def main() -> None:
    options = arguments()
    console = Console(width=None if os.isatty(1) else 110)
    with threadpool_limits(options.threads, "blas"):
        results = run(options, console)
    setting = record.setting(options.threads)
    console.print(table(results, setting, peers.OURS))
    if coretype := os.environ.get("OPENBLAS_CORETYPE"):
        console.print(f"NumPy is held back by OPENBLAS_CORETYPE={coretype}: unset it.")
    if options.json:
        record.save(options.json, "forward", setting, results)


if __name__ == "__main__":
    main()
