"""Transformer-XL's relative encodings: a term of the query and of the distance in each score."""

from __future__ import annotations

from functools import partial
from math import prod
from typing import Any

import numpy as np

from ...api import attention
from ..linear import check_float_array

# Of the terms that exist at once. 1, 4, 8, 16, 32, 64 MiB, 8 heads: 24, 21, 25, 32, 28, 32 ms at
# 1024 tokens, 136, 83, 78, 80, 80, 81 ms at 2048.
TABLE_BYTES = 8 << 20


def transformer_xl_attention(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    r: np.ndarray,
    u: np.ndarray,
    w: np.ndarray,
    *,
    zero: int = 0,
    scale: float | None = None,
    causal: bool = True,
    left: int | None = None,
    offset: int | None = None,
    mask: np.ndarray | None = None,
    backend: str = "auto",
) -> np.ndarray:
    """Return softmax(scale * ((q_i + u) · k_j + (q_i + w) · r_d)) v with d = i + offset - j.

    Parameters
    ----------
    q : (..., heads, seqlen_q, head_dim) float32 or float64
    k, v : (..., heads_kv, seqlen_k, head_dim) and (..., heads_kv, seqlen_k, head_dim_v), dtype of q
    r : (heads, distances, head_dim), dtype of q
        The encodings of consecutive distances, projected (W_kR R in the paper). Distances outside
        have the nearest one's.
    u, w : (heads, head_dim), dtype of q. The biases of content and of position (u and v there).
    zero : int. Where in r distance 0 stands: 0 if all keys come before their queries.
    scale : float. Default head_dim ** -0.5.
    causal : bool. Row i sees keys j <= i + offset.
    left : int. Row i sees keys j >= i + offset - left. Default all.
    offset : int. Position of query 0 among the keys. Default seqlen_k - seqlen_q, with the memory
        of earlier segments before the keys of this one.
    mask : bool, broadcastable to (..., heads, seqlen_q, seqlen_k). True = may attend.
    backend : as in fastattn.attention()

    Returns
    -------
    (..., heads, seqlen_q, head_dim_v), dtype of q

    Raises
    ------
    ValueError  shapes that do not fit together
    TypeError   dtypes that differ or are not supported

    Notes
    -----
    The terms of position of a block of rows are one matrix product; a score_mod looks them up, so
    that nothing has to be shifted. Memory is that of TABLE_BYTES, or of one row of them.

    References
    ----------
    Dai et al. 2019, Transformer-XL, arXiv:1901.02860, section 3.3.
    """
    _check(q, k, r, u, w)
    seqlen_q, seqlen_k = q.shape[-2], k.shape[-2]
    offset = seqlen_k - seqlen_q if offset is None else offset
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    out = np.empty((*q.shape[:-1], v.shape[-1]), q.dtype)
    options: dict[str, Any] = {"scale": scale, "window": (left, 0 if causal else None)}
    options |= {"backend": backend, "score_mod": _add_position}
    content, position = q + u[:, None], (q + w[:, None]) * q.dtype.type(scale)
    spans = partial(_span, seqlen_k=seqlen_k, causal=causal, left=left)
    whole = spans(offset, seqlen_q)
    places = np.clip(np.arange(*whole) + zero, 0, r.shape[-2] - 1)
    encodings = r[:, places].swapaxes(-1, -2)  # (heads, head_dim, distances)
    per_row = prod(q.shape[:-2]) * len(places)
    rows = max(min(TABLE_BYTES // max(per_row * q.itemsize, 1), seqlen_q), 1)
    # One for all blocks: fresh pages would cost as much as the product.
    memory = np.empty(per_row * rows, q.dtype)
    for start in range(0, seqlen_q, rows):
        block, here = slice(start, min(start + rows, seqlen_q)), offset + start
        first, stop = spans(here, block.stop - start)
        first = min(max(first, whole[0]), whole[1] - 1)  # rows that see nothing have no span
        stop = min(max(stop, first + 1), whole[1])
        terms = position[..., block, :], encodings[..., first - whole[0] : stop - whole[0]]
        shape = (*terms[0].shape[:-1], stop - first)
        table = np.matmul(*terms, out=memory[: prod(shape)].reshape(shape))
        attention(
            content[..., block, :],
            k,
            v,
            align=here,
            mask=None if mask is None else _rows_of(mask, block, seqlen_q),
            aux=(table.reshape(-1, *shape[-3:]), here - first),
            out=out[..., block, :],
            **options,
        )
    return out


def _add_position(score: Any, b: Any, h: Any, i: Any, j: Any, aux: tuple) -> Any:
    """score + the term of query i at distance i - j, where aux[1] is the place of distance 0."""
    return score + aux[0][b, h, i, i - j + aux[1]]


def _span(
    here: int, rows: int, *, seqlen_k: int, causal: bool, left: int | None
) -> tuple[int, int]:
    """Distances (first, stop) that some of the rows may see, of which the first stands at `here`;
    one at least.
    """
    first, last = here - (seqlen_k - 1), here + rows - 1
    if causal:
        first = max(first, 0)
    if left is not None:
        last = min(last, left)
    first = min(first, last)
    return first, last + 1


def _rows_of(mask: np.ndarray, block: slice, seqlen_q: int) -> np.ndarray:
    """The rows of a mask, which may be one for all."""
    mask = np.asarray(mask)
    whole = mask.ndim < 2 or mask.shape[-2] == 1 != seqlen_q
    return mask if whole else mask[..., block, :]


def _check(q: np.ndarray, k: np.ndarray, r: np.ndarray, u: np.ndarray, w: np.ndarray) -> None:
    for name, array in (("q", q), ("k", k), ("r", r), ("u", u), ("w", w)):
        check_float_array(name, array)
        if array.dtype != q.dtype:
            raise TypeError(f"{name} must have the dtype of q, {q.dtype}, got {array.dtype}")
    for name, array in (("q", q), ("k", k)):
        if array.ndim < 3:
            raise ValueError(f"{name} must have shape (..., heads, tokens, dim), got {array.shape}")
    heads, head_dim = q.shape[-3], q.shape[-1]
    if r.ndim != 3 or r.shape[0] != heads or r.shape[2] != head_dim or not r.shape[1]:
        raise ValueError(f"r must have shape ({heads}, distances, {head_dim}), got {r.shape}")
    for name, array in (("u", u), ("w", w)):
        if array.shape != (heads, head_dim):
            raise ValueError(f"{name} must have shape {(heads, head_dim)}, got {array.shape}")
