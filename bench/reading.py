"""Decoding beside loops that only read the same keys and values, interleaved.

python bench/reading.py
python bench/reading.py --cases decode-mha --threads 1 --rounds 41

GB/s, and time over that of a plain read: each head's keys from first to last, then its values. "in
blocks": as the kernel goes through them, BLOCK_N keys and as many values in turn; "asking": with
lines asked for ahead, in level 2. "call": fastattn.attention, arithmetic and Python
included. All start their threads alike.
"""

from __future__ import annotations

import functools
from ctypes import addressof, c_int64
from typing import NamedTuple

import numpy as np
import repository
from rich.table import Table

import fastattn
from fastattn.benchmark import cases
from fastattn.benchmark.contest import calls_per_sample, sample
from fastattn.commands import terminal
from fastattn.cpu import compile, threads
from fastattn.machine import default_num_threads
from fastattn.plan import BLOCK_N

FURTHER = 8192  # bytes: about as far as the kernel


class Order(NamedTuple):
    """How keys and values are read."""

    name: str
    block_n: int  # keys, then values in turn; 0 for all of a head
    further: int = 0  # bytes to ask for ahead


ORDERS = (
    Order("plain", 0),
    Order("plain, asking", 0, FURTHER),
    Order("in blocks", BLOCK_N["float32"]),
    Order("in blocks, asking", BLOCK_N["float32"], FURTHER),
)


def read_kernel(unit, further: int):
    """Kernel: draw heads and read them; job: (k, v, counter, heads, floats of a head, of a block,
    sums).
    """
    from fastattn.cpu.memory import address, at, fetch_add, pointer_to, prefetch
    from fastattn.cpu.registers import jit
    from fastattn.cpu.simd import operations

    simd = operations("float32", unit.lanes(4))
    load, store, lanes, vmax = simd.load, simd.store, simd.lanes, simd.vmax
    real, integers = pointer_to("float32"), pointer_to("int64")
    step, ahead, line = 4 * lanes, further // 4, 16

    @jit
    def read(x, count, sums):
        a, b = load(sums, 0), load(sums, lanes)
        c, d = a, b
        for i in range(0, count, step):
            if ahead != 0:
                for place in range(0, step, line):
                    prefetch(x, i + ahead + place)
            a, b = vmax(load(x, i), a), vmax(load(x, i + lanes), b)
            c, d = vmax(load(x, i + 2 * lanes), c), vmax(load(x, i + 3 * lanes), d)
        store(sums, 0, vmax(a, c))
        store(sums, lanes, vmax(b, d))

    def read_heads(job, scratch, quota):
        fields = integers(address(job))
        counter, heads, size, block = integers(fields[2]), fields[3], fields[4], fields[5]
        while True:
            head = fetch_add(counter, 1)
            if head >= heads:
                return 0
            k, v = at(real(fields[0]), head * size), at(real(fields[1]), head * size)
            sums = at(real(fields[6]), head * 64)
            start = 0
            while start < size:  # range() of a step that may be 0 could raise
                read(at(k, start), block, sums)
                read(at(v, start), block, sums)
                start += block

    return read_heads


def reader(order: Order, k: np.ndarray, v: np.ndarray, num_threads: int):
    """A call that reads k and v, (batch, heads, seqlen, head_dim) float32 each."""
    name = ("bench.reading", order.further)
    kernel = compile.kernel(name, functools.partial(read_kernel, further=order.further))
    heads, size = k.shape[0] * k.shape[1], k[0, 0].size
    counter, sums = c_int64(), np.zeros(64 * heads, np.float32)
    block = order.block_n * k.shape[-1] or size
    places = k.ctypes.data, v.ctypes.data, addressof(counter), heads, size, block, sums.ctypes.data
    job = np.array(places, np.int64)

    def run() -> None:
        counter.value, sums[:] = 0, 0
        threads.run_on_threads(lambda: kernel(job.ctypes.data, 0, 1), num_threads)

    return run


def measure(case: cases.Case, num_threads: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of each contender in every round."""
    q, k, v = case.inputs()[:3]
    runs = {order.name: reader(order, k, v, num_threads) for order in ORDERS}
    runs["call"] = functools.partial(fastattn.attention, q, k, v)
    calls = {name: calls_per_sample(run) for name, run in runs.items()}
    found: dict[str, list[float]] = {name: [] for name in runs}
    names = list(runs)
    for turn in range(rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            found[name].append(sample(runs[name], calls[name]))
    return found


def main() -> None:
    parser = repository.parser(__doc__)
    several = terminal.checked(cases.select)
    parser.add_argument("--cases", type=several, default="decode-*", help="names or patterns")
    parser.add_argument("--threads", type=terminal.count, default=default_num_threads())
    parser.add_argument("--rounds", type=terminal.count, default=21)
    options = parser.parse_args()
    fastattn.set_num_threads(options.threads)
    table = Table("workload", "contender", "GB/s", "time over plain")
    for case in terminal.each(options.cases, str):
        nbytes = 8 * case.batch * case.heads_kv * case.seqlen_k * case.head_dim
        found = measure(case, options.threads, options.rounds)
        for name, seconds in found.items():
            ratios = np.divide(seconds, found["plain"])
            low, ratio, high = np.percentile(ratios, (25, 50, 75))
            speed = f"{nbytes / np.median(seconds) * 1e-9:.1f}"
            table.add_row(case.name, name, speed, f"{ratio:.3f} ({low:.3f}–{high:.3f})")
    terminal.console().print(table)


if __name__ == "__main__":
    main()
