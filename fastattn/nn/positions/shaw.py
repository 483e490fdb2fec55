"""Shaw's relative encodings: vectors added to keys and to values, by clipped distance.

Distances of radius and more share a vector on each side, so the keys of a query fall into three
parts. In the two far ones, the vectors are the same for all keys: they add a number to the lse and
a vector to the result. Between them lies a band of 2 * radius - 1 keys, whose indices modulo that
number are all different: the vectors enter as so many more features of q and k, one of which each
key has set, and the same features of v bring out the probabilities. fastattn.merge() joins the
parts. Every score is computed once, and memory is linear in the number of tokens.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ...api import attention
from ...merging import merge
from ..linear import check_float_array


def shaw_attention(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    key_table: np.ndarray | None = None,
    value_table: np.ndarray | None = None,
    *,
    scale: float | None = None,
    causal: bool = False,
    offset: int | None = None,
    mask: np.ndarray | None = None,
    backend: str = "auto",
) -> np.ndarray:
    """Return softmax(scale * q_i · (k_j + a_ij)) (v_j + c_ij), a and c by distance j - i, clipped.

    Parameters
    ----------
    q : (..., heads_q, seqlen_q, head_dim) float32 or float64
    k, v : (..., heads_kv, seqlen_k, head_dim) and (..., heads_kv, seqlen_k, head_dim_v), dtype of q
    key_table, value_table : (2 * radius + 1, head_dim) and (2 * radius + 1, head_dim_v), dtype of q
        Vectors of the distances -radius to radius, which all heads share; a leading axis of
        heads_q gives each its own. Farther keys have those at the ends. None: no such term.
    scale : float. Default head_dim ** -0.5.
    causal : bool. Row i sees keys j <= i + offset.
    offset : int. Position of query 0 among the keys. Default seqlen_k - seqlen_q.
    mask : bool, broadcastable to (..., heads_q, seqlen_q, seqlen_k). True = may attend.
    backend : as in fastattn.attention()

    Returns
    -------
    (..., heads_q, seqlen_q, head_dim_v), dtype of q. A row that sees no key is 0.

    Raises
    ------
    ValueError  shapes that do not fit together
    TypeError   dtypes that differ or are not supported

    References
    ----------
    Shaw, Uszkoreit, Vaswani 2018, Self-Attention with Relative Position Representations,
    arXiv:1803.02155, equations 3 and 4.
    """
    radius = _check(q, k, v, key_table, value_table)
    offset = k.shape[-2] - q.shape[-2] if offset is None else offset
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    options: dict[str, Any] = {"scale": scale, "mask": mask, "return_lse": True, "backend": backend}
    by_key = None if key_table is None else q @ key_table.swapaxes(-1, -2)  # (..., 2 * radius + 1)
    out, lse = _band(q, k, v, by_key, value_table, radius, offset, causal, options)
    sides = [(-radius, (None, 0)), (radius, (0, None))]
    for distance, window in sides[:1] if causal else sides:
        far, far_lse = attention(q, k, v, align=offset + distance, window=window, **options)
        if by_key is not None:
            far_lse += scale * by_key[..., radius + distance]
        if value_table is not None:
            far += value_table[..., radius + distance, None, :]
        out, lse = merge(out, lse, far, far_lse)
    return out


def _band(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    by_key: np.ndarray | None,
    value_table: np.ndarray | None,
    radius: int,
    offset: int,
    causal: bool,
    options: dict[str, Any],
) -> tuple[np.ndarray, np.ndarray]:
    """Result and lse of the keys nearer than radius."""
    width, head_dim_v = 2 * radius - 1, v.shape[-1]
    position = np.arange(q.shape[-2])[:, None] + offset
    feature = np.arange(width)
    chosen = np.eye(width, dtype=k.dtype)[np.arange(k.shape[-2]) % width]  # (seqlen_k, width)
    if by_key is not None:
        # The distance, counted from -radius, of the key in the band whose index has this remainder.
        column = (feature - position + radius - 1) % width + 1
        q = np.concatenate([q, _along_rows(by_key, column)], axis=-1)
        k = np.concatenate([k, np.broadcast_to(chosen, (*k.shape[:-1], width))], axis=-1)
    if value_table is not None:
        v = np.concatenate([v, np.broadcast_to(chosen, (*v.shape[:-1], width))], axis=-1)
    window = (radius - 1, 0 if causal else radius - 1)
    out, lse = attention(q, k, v, align=offset, window=window, **options)
    if value_table is None:
        return out, lse
    remainder = (position + feature - (radius - 1)) % width
    probabilities = _along_rows(out[..., head_dim_v:], remainder)  # by distance
    return out[..., :head_dim_v] + probabilities @ value_table[..., 1:-1, :], lse


def _along_rows(array: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """array[..., i, columns[i]]."""
    lead = (1,) * (array.ndim - columns.ndim)
    return np.take_along_axis(array, columns.reshape(lead + columns.shape), axis=-1)


def _check(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    key_table: np.ndarray | None,
    value_table: np.ndarray | None,
) -> int:
    """Return the radius, or raise."""
    for name, array in (("q", q), ("k", k), ("v", v)):
        check_float_array(name, array)
        if array.ndim < 3:
            raise ValueError(f"{name} must have shape (..., heads, tokens, dim), got {array.shape}")
    tables = (("key_table", key_table, q.shape[-1]), ("value_table", value_table, v.shape[-1]))
    given = [(name, table, width) for name, table, width in tables if table is not None]
    if not given:
        raise ValueError("key_table or value_table must be given: without both, use attention()")
    rows = given[0][1].shape[-2] if given[0][1].ndim > 1 else 0
    for name, table, width in given:
        check_float_array(name, table)
        if table.dtype != q.dtype:
            raise TypeError(f"{name} must have the dtype of q, {q.dtype}, got {table.dtype}")
        shapes = ((rows, width), (q.shape[-3], rows, width))
        if rows < 3 or rows % 2 == 0 or table.shape not in shapes:
            raise ValueError(
                f"{name} must have shape (2 * radius + 1, {width}) with radius >= 1, heads_q = "
                f"{q.shape[-3]} before it or not, and as many rows as the other, got {table.shape}"
            )
    return rows // 2
