"""Decoding from pages of keys, beside the same keys in one piece, interleaved.

python bench/paged.py
python bench/paged.py --threads 1 --rounds 41
"""

from __future__ import annotations

from functools import partial

import numpy as np
import repository
from rich.table import Table

import fastattn
from fastattn.benchmark import cases, summary
from fastattn.benchmark.contest import paired
from fastattn.commands import terminal
from fastattn.machine import default_num_threads

PAGES = (1, 8, 16, 64, 256)  # keys of one


def on_pages(a: np.ndarray, size: int, order: np.ndarray) -> np.ndarray:
    """(num_pages, heads, size, dim), the pages of all in this order."""
    batch, heads, seqlen, dim = a.shape
    cut = a.reshape(batch, heads, seqlen // size, size, dim).swapaxes(1, 2)
    pages = np.empty((batch * seqlen // size, heads, size, dim), a.dtype)
    pages[order] = cut.reshape(pages.shape)
    return pages


def main() -> None:
    parser = repository.parser(__doc__)
    parser.add_argument("--threads", type=terminal.count, default=default_num_threads())
    parser.add_argument("--rounds", type=terminal.count, default=11, help="of each pair of calls")
    options = parser.parse_args()
    fastattn.set_num_threads(options.threads)
    table = Table("workload", "keys of a page", "on pages", "in one piece", "ratio")
    rng = np.random.default_rng(0)
    for case in cases.DECODE:
        q, k, v = case.inputs()[:3]
        kv_len = np.full(case.batch, case.seqlen_k)
        whole = partial(fastattn.attention, q, k, v, kv_len=kv_len)
        for size in PAGES:
            order = rng.permutation(case.batch * case.seqlen_k // size)
            pages = on_pages(k, size, order), on_pages(v, size, order)
            places = {"block_table": order.reshape(case.batch, -1), "kv_len": kv_len}
            call = partial(fastattn.attention, q, *pages, **places)
            np.testing.assert_array_equal(call(), whole())
            ours, theirs = paired(call, whole, options.rounds)
            low, ratio, high = np.percentile(np.array(ours) / np.array(theirs), (25, 50, 75))
            times = (summary.time_text(float(np.median(seconds))) for seconds in (ours, theirs))
            table.add_row(case.name, str(size), *times, f"{ratio:.2f} ({low:.2f}–{high:.2f})")
    terminal.console().print(table)


if __name__ == "__main__":
    main()
