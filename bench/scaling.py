"""How time grows with the number of keys, and what a second thread gives.

python bench/scaling.py
python bench/scaling.py --seqlens 1024,65536 --rounds 15 --json

Of the rounds: medians and quartiles. The contenders of a table take turns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import repository
from rich.table import Table

import fastattn
from fastattn.benchmark import record, summary
from fastattn.benchmark.cases import CASES, Case
from fastattn.benchmark.contest import calls_per_sample, paired, sample
from fastattn.commands import terminal

HEADS, SEQLEN_Q, HEAD_DIM = 4, 256, 64
SEQLENS = "1024,2048,4096,8192,16384,32768,65536"
TWICE = ("bert-512", "causal-1k", "gpt2-1k-causal", "seqlen-1024", "seqlen-2048", "dense-4k")


def call_of(case: Case, num_threads: int) -> Callable[[], Any]:
    """The call of a case on so many threads."""
    x = case.inputs()

    def run() -> np.ndarray:
        with fastattn.num_threads(num_threads):
            return fastattn.attention(x.q, x.k, x.v, causal=case.causal, backend="cpu")

    run()
    return run


def growth(seqlens: list[int], rounds: int) -> dict[str, dict[str, list[float]]]:
    """{keys: {"seconds": [per round]}} of one thread, for the same queries."""
    runs = {
        f"{n} keys": call_of(Case("keys", 1, HEADS, HEADS, SEQLEN_Q, n, HEAD_DIM), 1)
        for n in seqlens
    }
    calls = {name: calls_per_sample(run) for name, run in runs.items()}
    found: dict[str, dict[str, list[float]]] = {name: {"seconds": []} for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            found[name]["seconds"].append(sample(run, calls[name]))
    return found


def growth_table(found: dict[str, dict[str, list[float]]]) -> Table:
    """A line for each number of keys; the last column is their mean's, key by key."""
    shown = Table(title=f"{HEADS} heads × {SEQLEN_Q} queries × {HEAD_DIM}, one thread")
    for heading in ("keys", "time", "ns a key", "of the mean (quartiles)"):
        shown.add_column(heading, justify="right")
    each = {int(name.split()[0]): row["seconds"] for name, row in found.items()}
    per_keys = np.array([np.divide(seconds, n) for n, seconds in each.items()])
    shares = per_keys / per_keys.mean(0)
    for n, per_key, share in zip(each, per_keys, shares, strict=True):
        low, middle, high = np.percentile(share, (25, 50, 75))
        time = summary.time_text(float(np.median(per_key)) * n)
        cells = (time, f"{np.median(per_key) * 1e9:.1f}", f"{middle:.3f} ({low:.3f}–{high:.3f})")
        shown.add_row(str(n), *cells)
    return shown


def threads(rounds: int) -> dict[str, dict[str, list[float]]]:
    """{case: {"one" and "two": [seconds per round]}}."""
    found = {}
    for name in TWICE:
        one, two = paired(call_of(CASES[name], 1), call_of(CASES[name], 2), rounds)
        found[name] = {"one": one, "two": two}
    return found


def threads_table(found: dict[str, dict[str, list[float]]]) -> Table:
    """A line for each workload."""
    shown = Table(title="one thread over two")
    for heading in ("workload", "one", "two", "ratio (quartiles)"):
        shown.add_column(heading, justify="right" if shown.columns else "left")
    for name, row in found.items():
        low, middle, high = np.percentile(np.divide(row["one"], row["two"]), (25, 50, 75))
        times = (summary.time_text(float(np.median(row[which]))) for which in ("one", "two"))
        shown.add_row(name, *times, f"{middle:.2f} ({low:.2f}–{high:.2f})")
    return shown


def numbers(text: str) -> list[int]:
    """Ints by a comma-separated list."""
    return [terminal.count(word) for word in text.split(",")]


def main() -> None:
    parser = repository.parser(__doc__)
    repository.add_json(parser)
    parser.add_argument("--seqlens", type=numbers, default=SEQLENS, help="comma-separated")
    parser.add_argument("--rounds", type=terminal.count, default=7, help="default 7")
    options = parser.parse_args()
    console = terminal.console()
    grown = growth(options.seqlens, options.rounds)
    console.print(growth_table(grown))
    doubled = threads(options.rounds)
    console.print(threads_table(doubled))
    if options.json:
        record.save(options.json, "keys", repository.setting(1), grown)
        record.save(options.json, "threads", repository.setting(2), doubled)


if __name__ == "__main__":
    main()
