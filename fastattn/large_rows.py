"""Rows whose lse is so far from 0 that it has lost the sum of their exponentials in its rounding.

exp(s - lse) is then not normalised: for a row whose keys all have a bias of -1e6, as a mask of
finite numbers makes it, it is off by up to 3 %, and for -1e9 the sum is lost altogether. The
gradients measure such rows from their largest score m instead, p = exp(s - m) / sum, which takes
their scores once more. As dv and ds are linear in dout and delta, the 1 / sum goes into these.
"""

from __future__ import annotations

from typing import Any

import numpy as np

# The rounding of lse, of half eps * |lse|, is common to all p of a row: up to here 512 eps, 6e-5 in
# float32. Scores as large have been rounded as coarsely; the lse of models stays below 100.
LARGEST = 1024.0


def is_ordinary(lse: np.ndarray) -> bool:
    """Whether no row is large."""
    # The sum of squares settles it for small calls, in 1 us; not for rows that see nothing, -inf.
    return bool(np.vdot(lse, lse) <= LARGEST**2) or not is_large(lse).any()


def is_large(lse: np.ndarray) -> Any:
    """Return where lse is finite and too large, bool of its shape."""
    return (np.abs(lse) > LARGEST) & np.isfinite(lse)


def weights_of_sinks(sinks: np.ndarray, lse: np.ndarray) -> np.ndarray:
    """Return exp(sink - lse), (..., heads_q, seqlen_q), for rows that are not large."""
    return np.where(lse == -np.inf, 0, np.exp(sinks[:, None] - lse)).astype(lse.dtype, copy=False)


def is_same(lse: np.ndarray, own: np.ndarray) -> Any:
    """Return where `own`, found from the keys of this call, is lse but for its rounding.

    Elsewhere lse is that of more keys, as after merge(), and all that is known of their sum.
    """
    return np.abs(own - lse) <= 2 * np.finfo(lse.dtype).eps * np.abs(lse)
