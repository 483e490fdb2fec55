"""The tables of how far prefill is from what the machine allows; bench/report.py writes them.

"At most": per cent of the multiply-add peak that a call would reach in the least time of inside.py.
"""

from __future__ import annotations

import inside

from fastattn.benchmark import peers, plots, summary

PIECES = ["workload", "products at the peak", *inside.SUMS]
PARTS = ["at most", "one thread", "two"]
PEERS = [
    *("workload", "fastattn, two threads", "at most", "fastest peer", "reaches"),
    *("its time over fastattn's", "over the least"),
]


def pieces_table(results: dict, lesser: dict) -> tuple[list[str], list[list[str]]]:
    """Heading and rows: ns a pair of each piece, per cent of the peak here and as `lesser`."""
    rows, others = [], measured(lesser)
    for name, ns in measured(results).items():
        cells = [f"{each:.2f}" for each in (ns["peak"], *inside.sums(ns))]
        beside = others.get(name)
        shares = [*inside.percents(ns), *(inside.percents(beside) if beside else ["–"] * 3)]
        rows.append([name, *cells, *shares])
    return [*PIECES, *PARTS, *(f"AVX2: {part}" for part in PARTS)], rows


def peers_table(results: dict) -> tuple[list[str], list[list[str]]]:
    """Heading and rows: the fastest peer of each prefill, what it reaches of the peak, how many
    times longer it takes than fastattn, and than the least time.
    """
    rows = []
    least = {name: 100 * ns["peak"] / ns["least"] for name, ns in measured(results).items()}
    for name, found in plots.rows_by_case(results["forward"], list(least)).items():
        ours, others = found[peers.OURS], [row for row in found.values() if is_peer(row)]
        if ours.percent is None or not others:
            continue
        peer = min(others, key=lambda row: row.ratio)
        shares = [f"{each:.0f} %" for each in (ours.percent, least[name], peer.percent)]
        over = [f"{peer.ratio:.2f}", f"{least[name] / peer.percent:.2f}"]
        rows.append([name, *shares[:2], peer.contender, shares[2], *over])
    return PEERS, rows


def is_peer(row: summary.Row) -> bool:
    """Whether it is the time of another library, or of the formula in NumPy."""
    return not row.contender.startswith("fastattn")


def measured(results: dict) -> dict[str, dict[str, float]]:
    """ns of each piece of each case of inside.py."""
    return {name: result["ns"] for name, result in results.get("inside", {}).items()}
