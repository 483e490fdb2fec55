"""Rotary embeddings of arrays (..., tokens, heads, head_dim), at positions of their own."""

from __future__ import annotations

import numpy as np

from ..arrays import FLOAT_RULE, float_name
from ..nn.positions import apply_rotary


def table_of(name: str, table: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Return cos or sin, (positions, rotary_dim / 2), if it has this dtype."""
    if table.dtype != dtype:
        raise TypeError(f"{name} must have the dtype of what it turns, {dtype}, got {table.dtype}")
    if table.ndim != 2:
        raise ValueError(f"{name} must have shape (positions, rotary_dim / 2), got {table.shape}")
    return table


def turned(
    x: np.ndarray,
    cos: np.ndarray,
    sin: np.ndarray,
    positions: np.ndarray,
    interleaved: bool,
    names: tuple[str, str, str] = ("x", "cos", "sin"),
) -> np.ndarray:
    """Return x (..., tokens, heads, head_dim) turned, C-contiguous.

    positions : (..., tokens) ints, or (..., 1) for all. Computed in float32, or float64 for
    float64, and rounded once. Raises if a table has no such position.
    """
    if not float_name(x.dtype):
        raise TypeError(f"{names[0]} must be {FLOAT_RULE}, got {x.dtype}")
    cos, sin = table_of(names[1], cos, x.dtype), table_of(names[2], sin, x.dtype)
    if cos.shape != sin.shape or 2 * cos.shape[1] > x.shape[-1]:
        rule = f"{names[1]} and {names[2]} must have the same shape, of at most half the head_dim"
        raise ValueError(f"{rule} {x.shape[-1]}, got {cos.shape} and {sin.shape}")
    if positions.size and not 0 <= positions.min() <= positions.max() < len(cos):
        rule = f"{names[1]} must have a row for each position from 0 to {positions.max()}"
        raise ValueError(f"{rule}, got {len(cos)} and positions from {positions.min()}")
    dtype = np.dtype(np.float64 if x.dtype == np.float64 else np.float32)
    cos, sin = (table[positions][..., None, :, :].astype(dtype, copy=False) for table in (cos, sin))
    out = np.empty(x.shape, dtype)
    rows = x.astype(dtype, copy=False).swapaxes(-2, -3)
    apply_rotary(rows, cos, sin, interleaved=interleaved, out=out.swapaxes(-2, -3))
    if x.dtype == dtype:
        return out
    with np.errstate(over="ignore"):
        return out.astype(x.dtype)
