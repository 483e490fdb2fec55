"""One workload, all contenders, interleaved: A B C A B C ..., each beside the machine's limit."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterator

import limits as machine_limits
import peers
import verify
import work
from cases import OVERHEAD, Case

# A sample is as many calls as fill this, so that the clock and one slow call do not matter.
SAMPLE_SECONDS = 0.02

# Thread pools spin for a while after their work (OpenMP, ONNX Runtime, OpenBLAS for some 0.1 s) and
# would take the cores of the next contender: give them time to fall asleep. With 5 ms, fastattn had
# one core of two after NumPy (causal-1k 12.7 ms instead of 7.0).
SETTLE_SECONDS = 0.15


def contest(
    case: Case, names: list[str], rounds: int, num_threads: int, tick: Callable[[], None]
) -> dict:
    """Return the raw samples of every contender on one case, as bench/results/ keeps them.

    {"flop", "nbytes", "bound", "least_seconds": [per round],
     "contenders": {name: {"error", "calls", "seconds": [per round]}}}
    Contenders that do not apply are left out. tick() is called after each contender's turn.
    """
    entries = dict(_checked_entries(case, names, num_threads, tick))
    calls = {name: calls_per_sample(run) for name, (run, _) in entries.items()}
    result = {
        "flop": work.flop(case),
        "nbytes": work.nbytes(case),
        "bound": "",
        "least_seconds": [],
        "contenders": {
            name: {"error": error, "calls": calls[name], "seconds": []}
            for name, (_, error) in entries.items()
        },
    }
    # Where there is next to nothing to compute, no limit of the hardware is near.
    idle = case in OVERHEAD
    limits = None if idle else machine_limits.measure(case.dtype, num_threads)
    if limits:
        result["bound"] = work.bound(case, limits)
    for _ in range(rounds):
        if limits:
            limits = machine_limits.measure_again(limits, result["bound"], case.dtype, num_threads)
            result["least_seconds"].append(work.least_seconds(case, limits))
        for name, (run, _) in entries.items():
            time.sleep(SETTLE_SECONDS)
            run()  # wakes its threads and brings its data back into the caches
            result["contenders"][name]["seconds"].append(sample(run, calls[name]))
            tick()
    return result


def _checked_entries(
    case: Case, names: list[str], num_threads: int, tick: Callable[[], None]
) -> Iterator[tuple[str, tuple[Callable, float]]]:
    """(name, (call, error against the oracle)) of those that apply."""
    x = case.inputs()
    exact = verify.exact_rows(case, x)
    for name in names:
        entry = peers.entry(name, case, x, num_threads)
        if entry is not None:
            yield name, (entry.run, verify.error(name, case, entry.unpack(entry.run()), exact))
        tick()


def calls_per_sample(run: Callable) -> int:
    """As many calls as fill SAMPLE_SECONDS."""
    start = time.perf_counter()
    run()
    once = time.perf_counter() - start
    return max(1, math.ceil(SAMPLE_SECONDS / once))


def sample(run: Callable, calls: int) -> float:
    """Mean seconds of one call."""
    gc.disable()
    start = time.perf_counter()
    for _ in range(calls):
        run()
    seconds = time.perf_counter() - start
    gc.enable()
    return seconds / calls
