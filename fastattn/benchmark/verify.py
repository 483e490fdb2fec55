"""Every contender is checked before it is timed, against the definition in float64."""

from __future__ import annotations

import numpy as np

from .cases import Case, Inputs

ROWS = 32  # of each of three places; whole rows of scores are held in float64

# A contender may round as it likes, but must compute attention: this is for wrong answers. What
# fastattn promises about its error is tested by error budgets in its tests.
TOLERANCE_EPS = 2000


class WrongAnswer(AssertionError):
    """A contender that does not compute attention."""


def exact_rows(case: Case, x: Inputs) -> list[tuple[slice, np.ndarray]]:
    """(rows, exact output of these rows) at the start, the middle and the end of the queries."""
    starts = {0, max(0, case.seqlen_q // 2 - ROWS // 2), max(0, case.seqlen_q - ROWS)}
    chosen = (slice(start, min(start + ROWS, case.seqlen_q)) for start in sorted(starts))
    return [(rows, _attention(case, x, rows)) for rows in chosen]


def _attention(case: Case, x: Inputs, rows: slice) -> np.ndarray:
    """softmax(scale * q @ k.T + bias) @ v of some query rows, from the definition."""
    q, k, v = (array.astype(np.float64) for array in (x.q[:, :, rows], x.k, x.v))
    k, v = k.repeat(case.group, axis=1), v.repeat(case.group, axis=1)
    s = case.head_dim**-0.5 * q @ k.swapaxes(-1, -2)
    if x.bias is not None:
        s += x.bias[:, :, rows]
    if x.mask is not None:
        mask = np.broadcast_to(x.mask, (*x.mask.shape[:-2], case.seqlen_q, case.seqlen_k))
        s = np.where(mask[:, :, rows], s, -np.inf)
    if case.causal:
        last = np.arange(rows.start, rows.stop)[:, None] + case.seqlen_k - case.seqlen_q
        s = np.where(np.arange(case.seqlen_k) <= last, s, -np.inf)
    p = np.exp(s - s.max(axis=-1, keepdims=True))
    return p / p.sum(axis=-1, keepdims=True) @ v


def error(
    name: str, case: Case, result: np.ndarray, exact: list[tuple[slice, np.ndarray]]
) -> float:
    """Largest error of the checked rows, relative to the largest exact value.

    Raises WrongAnswer if it is beyond rounding.
    """
    shape = (case.batch, case.heads_q, case.seqlen_q, case.head_dim)
    if result.shape != shape:
        raise WrongAnswer(f"{name} on {case}: shape must be {shape}, got {result.shape}")
    largest = max(np.abs(out).max() for _, out in exact)
    worst = max(np.abs(result[:, :, rows] - out).max() for rows, out in exact) / largest
    limit = TOLERANCE_EPS * np.finfo(case.dtype).eps
    if not worst <= limit:  # NaN fails too
        raise WrongAnswer(f"{name} on {case}: error must be at most {limit:.1e}, got {worst:.1e}")
    return float(worst)
