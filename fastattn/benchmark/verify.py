"""Every contender is checked before it is timed, against the definition in float64."""

from __future__ import annotations

import numpy as np

from ..verifying import oracle
from ..verifying.oracle import WrongAnswer
from .cases import Case, Inputs

ROWS = 32  # of each of three places; whole rows of scores are held in float64

# A contender may round as it likes, but must compute attention: this is for wrong answers. What
# fastattn promises about its error is tested by error budgets in its tests.
TOLERANCE_EPS = 2000


def exact_rows(case: Case, x: Inputs) -> list[tuple[slice, np.ndarray]]:
    """(rows, exact output of these rows) at the start, the middle and the end of the queries."""
    starts = {0, max(0, case.seqlen_q // 2 - ROWS // 2), max(0, case.seqlen_q - ROWS)}
    chosen = (slice(start, min(start + ROWS, case.seqlen_q)) for start in sorted(starts))
    return [(rows, _exact(case, x, rows)) for rows in chosen]


def _exact(case: Case, x: Inputs, rows: slice) -> np.ndarray:
    """The definition of some query rows."""
    # Masks and biases have a row for each query, or one for all.
    mask, bias = (a if a is None or a.shape[-2] == 1 else a[..., rows, :] for a in (x.mask, x.bias))
    offset = rows.start + case.seqlen_k - case.seqlen_q
    out, _ = oracle.attention(
        x.q[..., rows, :], x.k, x.v, causal=case.causal, align=offset, mask=mask, bias=bias
    )
    return out


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
