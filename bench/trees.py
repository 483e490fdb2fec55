"""Times of two trees of this repository, interleaved: what a change did to the suite.

python bench/trees.py HEAD~1                              # that commit, and these files
python bench/trees.py main some/folder --cases 'bert*,decode-*' --threads 1 --rounds 21 --json

Each tree is a commit or a folder and runs in a process of its own, with its own cases and checks.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import repository
from rich.table import Table

from fastattn.benchmark import cases, record, summary
from fastattn.commands import terminal
from fastattn.machine import default_num_threads

# Runs in a tree: a case's name in, the mean seconds of one call out. The answer is checked first.
CHILD = """
import json, sys
from fastattn.benchmark import cases, contest, peers, verify
threads, ready = int(sys.argv[1]), None
for line in sys.stdin:
    case = cases.CASES[line.strip()]
    if ready is None or ready[0] is not case:
        x = case.inputs()
        run, unpack = peers.entry(peers.OURS, case, x, threads)
        verify.error(peers.OURS, case, unpack(run()), verify.exact_rows(case, x))
        ready = case, run, contest.calls_per_sample(run)
    ready[1]()
    print(json.dumps(contest.sample(*ready[1:])), flush=True)
"""


class Tree:
    """A process that times the fastattn of one folder."""

    def __init__(self, folder: Path, num_threads: int):
        self.commit = repository.commit(folder) or str(folder)
        self._process = subprocess.Popen(
            [sys.executable, "-c", CHILD, str(num_threads)],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(folder)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def seconds(self, case: cases.Case) -> float:
        """Mean of one call in a sample.

        Raises
        ------
        ValueError  the tree cannot run the case; why stands on stderr
        """
        to, back = self._process.stdin, self._process.stdout
        try:
            to.write(f"{case}\n")
            to.flush()
        except BrokenPipeError:
            pass
        line = back.readline()
        if not line:
            raise ValueError(f"tree {self.commit} cannot run {case}")
        return json.loads(line)

    def __enter__(self) -> Tree:
        return self

    def __exit__(self, *exception: object) -> None:
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait()


@contextmanager
def folder_of(name: str) -> Iterator[Path]:
    """A folder as it is, or a commit in a temporary worktree."""
    if Path(name).is_dir():
        yield Path(name).resolve()
        return
    git = ["git", "-C", str(repository.ROOT), "worktree"]
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / "tree"
        subprocess.run([*git, "add", "--quiet", "--detach", str(folder), name], check=True)
        try:
            yield folder
        finally:
            subprocess.run([*git, "remove", "--force", str(folder)], check=True)


def measure(trees: Sequence[Tree], case: cases.Case, rounds: int) -> dict[str, list]:
    """{"trees": commits, "first" and "second": [seconds per round]}: turns, also at going first."""
    samples: tuple[list[float], list[float]] = ([], [])
    for tree in trees:
        tree.seconds(case)
    for turn in range(rounds):
        for which in (0, 1) if turn % 2 == 0 else (1, 0):
            samples[which].append(trees[which].seconds(case))
    first, second = samples
    return {"trees": [tree.commit for tree in trees], "first": first, "second": second}


def table(results: dict[str, dict], num_threads: int) -> Table:
    """A line for each case."""
    commits = next(iter(results.values()))["trees"]
    shown = Table(
        title=f"{record.machine_text(record.setting(num_threads))}",
        caption="ratio: time of the second over that of the first, median and quartiles of the "
        "rounds; marked where both quartiles lie on one side of 1.",
    )
    shown.add_column("workload")
    for heading in (*commits, "ratio"):
        shown.add_column(heading, justify="right")
    for name, row in results.items():
        times = (summary.time_text(float(np.median(row[which]))) for which in ("first", "second"))
        shown.add_row(name, *times, ratio_text(row))
    return shown


def ratio_text(row: dict[str, list]) -> str:
    """Median and quartiles of the rounds."""
    ratios = np.divide(row["second"], row["first"])
    low, ratio, high = np.percentile(ratios, (25, 50, 75))
    text = f"{ratio:.3f} ({low:.3f}–{high:.3f})"
    color = "green" if high < 1 else "red" if low > 1 else ""
    return f"[{color}]{text}[/{color}]" if color else text


def main() -> None:
    parser = repository.parser(__doc__)
    repository.add_json(parser)
    parser.add_argument("first", help="commit or folder")
    parser.add_argument("second", nargs="?", default=str(repository.ROOT), help="default: this")
    several = "names, patterns or groups (" + ", ".join(cases.GROUPS) + "), comma-separated"
    parser.add_argument(
        "--cases", type=terminal.checked(cases.select), default="suite", help=several
    )
    number = default_num_threads()
    parser.add_argument("--threads", type=terminal.count, default=number, help=f"default {number}")
    parser.add_argument("--rounds", type=terminal.count, default=11, help="default 11")
    options = parser.parse_args()
    results = {}
    with ExitStack() as stack:
        folders = [stack.enter_context(folder_of(n)) for n in (options.first, options.second)]
        trees = [stack.enter_context(Tree(folder, options.threads)) for folder in folders]
        for case in terminal.each(options.cases, str):
            results[case.name] = measure(trees, case, options.rounds)
    terminal.console().print(table(results, options.threads))
    if options.json:
        named = {f"{name}, {options.threads} threads": row for name, row in results.items()}
        record.save(options.json, "trees", repository.setting(options.threads), named)


if __name__ == "__main__":
    main()
