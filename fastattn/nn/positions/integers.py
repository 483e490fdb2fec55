"""The rules of positions, shared by all encodings."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike


def positions_of(name: str, positions: ArrayLike, stop: int | None = None) -> np.ndarray:
    """Return positions as int64, or raise unless all lie in [0, stop)."""
    array = np.asarray(positions)
    if array.size == 0 and array.dtype.kind == "f":  # NumPy's dtype of an empty list
        array = array.astype(np.int64)
    if array.dtype.kind not in "iu":
        raise TypeError(f"{name} must be integers, got {array.dtype}")
    low, high = int(array.min(initial=0)), int(array.max(initial=0))
    if low < 0 or (stop is not None and array.size and high >= stop):
        rule = "at 0 or above" if stop is None else f"from 0 to {stop - 1}"
        raise ValueError(f"{name} must lie {rule}, got {low if low < 0 else high}")
    return array.astype(np.int64)
