"""Every contender is checked against the oracle before it is timed."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
from cases import Case, Inputs

ROWS = 32  # of each of three places; the oracle holds whole rows of scores in float64

# A contender may round as it likes, but must compute attention: this is for wrong answers. What
# fastattn promises about its error is tested by error budgets in tests/.
TOLERANCE_EPS = 2000


def _load_oracle():
    path = Path(__file__).parents[1] / "tests" / "oracle.py"
    spec = importlib.util.spec_from_file_location("oracle", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


oracle = _load_oracle()


class WrongAnswer(AssertionError):
    """A contender that does not compute what the oracle does."""


def exact_rows(case: Case, x: Inputs) -> list[tuple[slice, np.ndarray]]:
    """(rows, exact output of these rows) at the start, the middle and the end of the queries.

    Under bottom-right alignment the rows [start, stop) of a causal problem are the last rows of the
    problem that ends with the last key they see, so the oracle needs no notion of row offsets.
    """
    starts = {0, max(0, case.seqlen_q // 2 - ROWS // 2), max(0, case.seqlen_q - ROWS)}
    exact = []
    for start in sorted(starts):
        stop = min(start + ROWS, case.seqlen_q)
        keys = case.seqlen_k - case.seqlen_q + stop if case.causal else case.seqlen_k
        rows = slice(start, stop)
        out, _ = oracle.attention(
            x.q[:, :, rows],
            x.k[:, :, :keys],
            x.v[:, :, :keys],
            causal=case.causal,
            mask=_rows_of(x.mask, rows),
            bias=_rows_of(x.bias, rows),
        )
        exact.append((rows, out))
    return exact


def _rows_of(masking: np.ndarray | None, rows: slice) -> np.ndarray | None:
    if masking is None or masking.shape[-2] == 1:
        return masking
    return masking[:, :, rows]


def error(name: str, case: Case, result: np.ndarray, exact) -> float:
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
