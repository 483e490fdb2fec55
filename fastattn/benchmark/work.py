"""How much work a workload is, and the least time that this machine's limits allow for it.

flop    counts the multiplies and the adds of the two products q·k and p·v over visible (query, key)
        pairs: causal work is counted pair by pair, not as "half". Not counted: the softmax, scale,
        mask and bias. Pairs that a mask hides are counted, since a mask is data.
nbytes  counts every input read once and the output written once, each at its own itemsize; grouped
        heads read a key head once. Masks are counted as they are stored, not broadcast.
"""

from __future__ import annotations

from typing import NamedTuple

from .cases import Case


class Limits(NamedTuple):
    """What was measured of this machine, with the number of threads in use."""

    gflop_s: float  # multiply-add peak of all threads together, in the dtype of the case
    gb_s: float  # read bandwidth


def flop(case: Case) -> int:
    """Multiplies and adds; the count that fastattn.explain() shows."""
    return case.problem.flop


def nbytes(case: Case) -> int:
    """Bytes that must move at least once."""
    itemsize = 8 if case.dtype == "float64" else 4
    q = out = case.heads_q * case.seqlen_q
    k = v = case.heads_kv * case.seqlen_k
    masking = {
        "": 0,
        "padding": case.batch * case.seqlen_k,
        "mask": case.seqlen_q * case.seqlen_k,
        "bias": case.heads_q * case.seqlen_q * case.seqlen_k * itemsize,
    }
    return case.batch * (q + k + v + out) * case.head_dim * itemsize + masking[case.masking]


def bound(case: Case, limits: Limits) -> str:
    """Which limit is the nearer one: "compute" or "memory"."""
    compute = flop(case) / limits.gflop_s
    return "compute" if compute >= nbytes(case) / limits.gb_s else "memory"


def least_seconds(case: Case, limits: Limits) -> float:
    """The time that a perfect program would take: the roofline model of Williams et al. 2009."""
    return max(flop(case) / limits.gflop_s, nbytes(case) / limits.gb_s) * 1e-9
