"""Absolute encodings: a vector for each position, added to the token before the first layer."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from ...arguments import count
from ..linear import check_float_array
from .integers import positions_of
from .scaling import check_positive


def sinusoidal(
    positions: ArrayLike,
    dim: int,
    *,
    base: float = 10000.0,
    interleaved: bool = True,
    dtype: Any = np.float32,
) -> np.ndarray:
    """Return sines and cosines of position / base ** (2t / dim).

    Parameters
    ----------
    positions : (...,) ints, 0 and up
    dim : int. Features of a token.
    interleaved : bool
        Feature 2t is the sine and 2t + 1 the cosine, as published; else all sines come first, as in
        Marian. With an odd dim there is one sine more.
    dtype : float32 or float64. Computed in float64 and rounded once.

    Returns
    -------
    (..., dim)

    References
    ----------
    Vaswani et al. 2017, Attention Is All You Need, arXiv:1706.03762, section 3.5.
    """
    count("dim", dim, 1)
    check_positive("base", base)
    where = positions_of("positions", positions)
    angles = where[..., None] * float(base) ** (-np.arange(0, dim, 2) / dim)
    encodings = np.empty((*where.shape, dim), dtype)
    sines = slice(0, None, 2) if interleaved else slice(0, angles.shape[-1])
    cosines = slice(1, None, 2) if interleaved else slice(angles.shape[-1], None)
    encodings[..., sines] = np.sin(angles)
    encodings[..., cosines] = np.cos(angles[..., : dim // 2])
    return encodings


def learned(table: np.ndarray, positions: ArrayLike) -> np.ndarray:
    """Return rows of a learned table.

    Parameters
    ----------
    table : (max_positions, dim) float32 or float64
    positions : (...,) ints from 0 to max_positions - 1

    Returns
    -------
    (..., dim), dtype of table: a copy

    Raises
    ------
    ValueError  a position outside the table, which has none to give

    References
    ----------
    Gehring et al. 2017, Convolutional Sequence to Sequence Learning, arXiv:1705.03122, section 3.1.
    """
    check_float_array("table", table)
    if table.ndim != 2:
        raise ValueError(f"table must have shape (max_positions, dim), got {table.shape}")
    return table[positions_of("positions", positions, len(table))]
