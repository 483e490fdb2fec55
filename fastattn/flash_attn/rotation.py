"""Rotary embeddings of arrays (..., tokens, heads, head_dim), at positions of their own."""

from __future__ import annotations

import numpy as np

from ..arrays import FLOAT_RULE, all_below, float_name
from ..nn.positions import rotary

Pair = tuple[np.ndarray, np.ndarray]
NAMES = ("x", "cos", "sin")


def check_tables(
    x: np.ndarray, cos: np.ndarray, sin: np.ndarray, names: tuple[str, str, str] = NAMES
) -> None:
    """Raise unless cos and sin, (positions, rotary_dim / 2), are angles for x."""
    if not float_name(x.dtype):
        raise TypeError(f"{names[0]} must be {FLOAT_RULE}, got {x.dtype}")
    for name, table in zip(names[1:], (cos, sin), strict=True):
        if table.dtype != x.dtype:
            rule = f"{name} must have the dtype of what it turns, {x.dtype}"
            raise TypeError(f"{rule}, got {table.dtype}")
        if table.ndim != 2:
            rule = f"{name} must have shape (positions, rotary_dim / 2)"
            raise ValueError(f"{rule}, got {table.shape}")
    if cos.shape != sin.shape or 2 * cos.shape[1] > x.shape[-1]:
        rule = f"{names[1]} and {names[2]} must have the same shape, of at most half the head_dim"
        raise ValueError(f"{rule} {x.shape[-1]}, got {cos.shape} and {sin.shape}")


def angles_at(cos: np.ndarray, sin: np.ndarray, positions: np.ndarray, name: str = "cos") -> Pair:
    """Return the rows of both at positions (..., tokens) int64, for turned(); raise, with the name
    of cos, if there is no such row.
    """
    if not all_below(len(cos), positions):
        rule = f"{name} must have a row for each position from 0 to {positions.max()}"
        raise ValueError(f"{rule}, got {len(cos)} and positions from {positions.min()}")
    dtype = np.result_type(cos.dtype, np.float32)
    cos, sin = (table.take(positions, axis=0)[..., None, :] for table in (cos, sin))
    return cos.astype(dtype, copy=False), sin.astype(dtype, copy=False)


def turned(x: np.ndarray, angles: Pair, interleaved: bool) -> np.ndarray:
    """Return x turned, C-contiguous; angles of one token are for all.

    Computed in float32, or float64 for float64, and rounded once.
    """
    # One angle for all heads of a token: to apply_rotary(), heads are the tokens of many rows.
    return rotary.turned(x, *angles, interleaved=interleaved)
