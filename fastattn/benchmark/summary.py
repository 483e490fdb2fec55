"""From raw samples to the figures that are printed and plotted."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np


class Row(NamedTuple):
    """One contender on one case. Ratios are formed round by round, then summarised."""

    case: str
    contender: str
    seconds: float  # median
    gflop_s: float
    percent: float | None  # of the machine's limit in the same round; None if it was not measured
    ratio: float  # its time over the baseline's: above 1 the baseline is faster
    ratio_low: float  # quartiles of the rounds
    ratio_high: float


def rows(case: str, result: dict[str, Any], baseline: str) -> list[Row]:
    """The rows of one contest, in the order of its contenders."""
    contenders = result["contenders"]
    if not contenders:
        return []
    if baseline not in contenders:
        baseline = next(iter(contenders))
    base = np.array(contenders[baseline]["seconds"])
    least = np.array(result["least_seconds"])
    found = []
    for name, contender in contenders.items():
        seconds = np.array(contender["seconds"])
        low, ratio, high = np.percentile(seconds / base, (25, 50, 75))
        median = float(np.median(seconds))
        percent = float(np.median(100 * least / seconds)) if least.size else None
        gflop_s = result["flop"] / median * 1e-9
        found.append(Row(case, name, median, gflop_s, percent, ratio, low, high))
    return found


def time_text(seconds: float) -> str:
    """Three digits and a unit."""
    for limit, unit in ((1e-3, 1e6), (1.0, 1e3)):
        if seconds < limit:
            return f"{seconds * unit:.3g} {'µs' if unit == 1e6 else 'ms'}"
    return f"{seconds:.3g} s"
