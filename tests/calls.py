"""Calls that leave nothing of what stood in the output, for tests of the edges."""

from __future__ import annotations

import numpy as np
import oracle
import pytest

import fastattn

F4 = np.float32


def attend(backend, q, k, v, **flags):
    """Return (out, lse), written into an output full of NaN."""
    shape = (*np.broadcast_shapes(q.shape[:-2], (*v.shape[:-3], 1)), q.shape[-2], v.shape[-1])
    out = np.full(shape, np.nan, q.dtype)
    return fastattn.attention(q, k, v, **flags, return_lse=True, out=out, backend=backend)


def assert_exact(backend, q, k, v, **flags):
    out, lse = attend(backend, q, k, v, **flags)
    exact, formula = oracle.judge(q, k, v, **flags)
    oracle.assert_within_budget(out, exact[0], formula[0], floor=8)
    oracle.assert_within_budget(lse, exact[1], formula[1], floor=8)
    return out


def column(*values, dtype=F4):
    """Return values as (1, 1, n, 1)."""
    return np.array(values, dtype).reshape(1, 1, -1, 1)


def case_id(rows):
    """Return rows for parametrize(); the first of each is its id."""
    return [pytest.param(*row[1:], id=row[0]) for row in rows]
