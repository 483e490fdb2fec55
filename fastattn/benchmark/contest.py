"""One workload, all contenders, interleaved: A B C A B C ..., each beside the machine's limit."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable
from typing import Any

from . import limits as machine_limits
from . import peers, verify, work
from .cases import OVERHEAD, Case

# A sample is as many calls as fill this, so that the clock and one slow call do not matter.
SAMPLE_SECONDS = 0.02

# Thread pools spin for a while after their work (OpenMP, ONNX Runtime, OpenBLAS for some 0.1 s) and
# would take the cores of the next contender: give them time to fall asleep. With 5 ms, fastattn had
# one core of two after NumPy (causal-1k 12.7 ms instead of 7.0).
SETTLE_SECONDS = 0.15


def contest(
    case: Case, names: list[str], rounds: int, num_threads: int, tick: Callable[[], None]
) -> dict[str, Any]:
    """Return the raw samples of every contender on one case, as bench/results/ keeps them.

    {"flop", "nbytes", "bound", "least_seconds": [per round], "absent": {name: why},
     "contenders": {name: {"error", "calls", "seconds": [per round]}}}
    tick() is called after each contender's turn.

    Raises
    ------
    WrongAnswer  a contender that does not compute attention
    """
    runs, result = _checked(case, names, num_threads, tick)
    contenders = result["contenders"]
    # Where there is next to nothing to compute, no limit of the hardware is near.
    limits = None if case in OVERHEAD else machine_limits.measure(case.dtype, num_threads)
    bound = work.bound(case, limits) if limits else ""
    least: list[float] = []
    for _ in range(rounds):
        if limits:
            limits = machine_limits.measure_again(limits, bound, case.dtype, num_threads)
            least.append(work.least_seconds(case, limits))
        for name, run in runs.items():
            time.sleep(SETTLE_SECONDS)
            run()  # wakes its threads and brings its data back into the caches
            contenders[name]["seconds"].append(sample(run, contenders[name]["calls"]))
            tick()
    counted = {"flop": work.flop(case), "nbytes": work.nbytes(case)}
    return {**counted, "bound": bound, "least_seconds": least, **result}


def _checked(
    case: Case, names: list[str], num_threads: int, tick: Callable[[], None]
) -> tuple[dict[str, Callable[[], Any]], dict[str, dict]]:
    """The calls of those that take part, checked, and what is known of all before any is timed."""
    x = case.inputs()
    exact = verify.exact_rows(case, x)
    runs: dict[str, Callable[[], Any]] = {}
    contenders: dict[str, dict] = {}
    absent: dict[str, str] = {}
    for name in names:
        entry = peers.entry(name, case, x, num_threads)
        if isinstance(entry, str):
            absent[name] = entry
        else:
            error = verify.error(name, case, entry.unpack(entry.run()), exact)
            calls = calls_per_sample(entry.run)
            runs[name] = entry.run
            contenders[name] = {"error": error, "calls": calls, "seconds": []}
        tick()
    return runs, {"absent": absent, "contenders": contenders}


def calls_per_sample(run: Callable[[], Any]) -> int:
    """As many calls as fill SAMPLE_SECONDS."""
    start = time.perf_counter()
    run()
    once = time.perf_counter() - start
    return max(1, math.ceil(SAMPLE_SECONDS / once))


def sample(run: Callable[[], Any], calls: int) -> float:
    """Mean seconds of one call."""
    gc.disable()
    try:
        start = time.perf_counter()
        for _ in range(calls):
            run()
        return (time.perf_counter() - start) / calls
    finally:
        gc.enable()


def paired(
    first: Callable[[], Any], second: Callable[[], Any], rounds: int
) -> tuple[list[float], list[float]]:
    """Seconds of each of two calls in every round: they take turns, and turns at going first.

    For two ways through fastattn, which share their threads: nobody has to fall asleep between.
    """
    runs = (first, second)
    calls = [calls_per_sample(run) for run in runs]
    samples: tuple[list[float], list[float]] = ([], [])
    for turn in range(rounds):
        for which in (0, 1) if turn % 2 == 0 else (1, 0):
            samples[which].append(sample(runs[which], calls[which]))
    return samples
