"""The public functions. Each does three things: check the arguments, plan, run the plan."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from .check import Names, check, check_backend, plain
from .plan import plan
from .problem import Operands, Plan, Problem

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

TORCH_NAMES = Names("query", "key", "value", "attn_mask", "attn_mask", "is_causal")


def attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    *,
    scale: float | None = None,
    causal: bool = False,
    align: str | int = "bottom_right",
    window: tuple[int | None, int | None] = (None, None),
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    return_lse: bool = False,
    out: np.ndarray | None = None,
    backend: str = "auto",
) -> Any:
    """Return softmax(scale * q @ k.T + bias) @ v without storing the score matrix.

    Parameters
    ----------
    q : (..., heads_q, seqlen_q, head_dim) float32 or float64
        Rank 2 and up; (seqlen_q, head_dim) is one head. Any strides and byte order; never written.
    k, v : (..., heads_kv, seqlen_k, head_dim) and (..., heads_kv, seqlen_k, head_dim_v), dtype of q
        heads_kv must divide heads_q; query head h reads key head h // (heads_q // heads_kv).
        Axes before the heads broadcast, as do missing ones.
    scale : finite float, applied before the maximum. Default head_dim ** -0.5.
    causal : bool
        Row i sees keys j <= i + offset: the same as window=(left, 0).
    align : "bottom_right", "top_left" or int
        Query row i stands at key position i + offset: seqlen_k - seqlen_q, 0, or the int given.
        PyTorch's is_causal is "top_left".
    window : (left, right), ints >= 0 or None for no limit
        Row i sees keys i + offset - left <= j <= i + offset + right.
    bias : float16, float32 or float64, broadcastable to (..., heads_q, seqlen_q, seqlen_k)
        Added to the scaled scores; -inf hides a key.
    mask : bool, broadcastable likewise. True = may attend.
    return_lse : bool
    out : array of the shape and dtype of the result, written in place; may not overlap an input.
    backend : "auto", "numpy" or "cpu". Only "auto" falls back; explain() says to what, and why.

    Returns
    -------
    out : (..., heads_q, seqlen_q, head_dim_v), dtype of q, C-contiguous unless given.
        A row that sees no key is 0. A hidden key contributes nothing, even if it holds NaN or inf.
    lse : (..., heads_q, seqlen_q), dtype of q. Only if return_lse.
        Natural log of the sum of exp(score) over the keys that a row sees; -inf if there are none.

    Raises
    ------
    ValueError   shapes or values that do not fit together
    TypeError    dtypes that differ or are not supported
    ImportError  the named backend is not installed

    Notes
    -----
    Sums in the dtype of q. Memory beyond the output is O(block_m * block_n) per thread, never
    O(seqlen_q * seqlen_k).

    References
    ----------
    Dao 2023, FlashAttention-2, arXiv:2307.08691, algorithm 1.
    """
    check_backend(backend)
    problem, operands = check(
        q,
        k,
        v,
        scale=scale,
        causal=causal,
        align=align,
        window=window,
        bias=bias,
        mask=mask,
        return_lse=return_lse,
        out=out,
    )
    _run(problem, operands, backend)
    result, lse = operands.out, operands.lse
    if result.ndim == 3 and np.ndim(q) == np.ndim(k) == np.ndim(v) == 2:
        result, lse = result[0], None if lse is None else lse[0]
    if out is not None:
        result = out
    return (result, lse) if return_lse else result


def explain(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    *,
    scale: float | None = None,
    causal: bool = False,
    align: str | int = "bottom_right",
    window: tuple[int | None, int | None] = (None, None),
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    return_lse: bool = False,
    out: np.ndarray | None = None,
    backend: str = "auto",
) -> Plan:
    """Return how attention() would run these arguments, and why. Print it.

    Parameters and errors are those of attention(). Nothing is computed and `out` is not written.
    """
    check_backend(backend)
    problem, _ = check(
        q,
        k,
        v,
        scale=scale,
        causal=causal,
        align=align,
        window=window,
        bias=bias,
        mask=mask,
        return_lse=return_lse,
        out=out,
    )
    return plan(problem, backend)


def scaled_dot_product_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    attn_mask: ArrayLike | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> np.ndarray:
    """Return what torch.nn.functional.scaled_dot_product_attention returns, for NumPy arrays.

    Parameters
    ----------
    query : (..., heads_q, seqlen_q, head_dim) float32 or float64, rank 2 and up
    key, value : (..., heads_kv, seqlen_k, head_dim) and (..., heads_kv, seqlen_k, head_dim_v)
        dtype of query. Leading axes broadcast, and so do heads of 1.
    attn_mask : bool, True = may attend; or float32 or the dtype of query, added to the scores
        Broadcastable to (..., heads_q, seqlen_q, seqlen_k). Not together with is_causal.
    dropout_p : 0.0
        A probability; other values than 0 are not implemented.
    is_causal : bool
        Row i sees keys j <= i: **top-left** alignment, unlike attention(causal=True).
    scale : finite float. Default head_dim ** -0.5.
    enable_gqa : bool
        Let heads_kv divide heads_q; without it they must be equal, or 1.

    Returns
    -------
    out : (..., heads_q, seqlen_q, head_dim_v), dtype of query, C-contiguous

    Raises
    ------
    ValueError           shapes or values that do not fit together
    TypeError            dtypes that differ or are not supported
    NotImplementedError  dropout_p > 0

    Notes
    -----
    NaN and infinity in a masked key do not reach the result, which in PyTorch they do.
    """
    _check_dropout(dropout_p)
    query, key, value = map(plain, TORCH_NAMES[:3], (query, key, value))
    mask, bias = _mask_or_bias(attn_mask, is_causal, query)
    if not enable_gqa:
        query, key, value = _broadcast_heads(query, key, value)
    problem, operands = check(
        query,
        key,
        value,
        scale=scale,
        causal=is_causal,
        align="top_left",
        bias=bias,
        mask=mask,
        names=TORCH_NAMES,
    )
    _run(problem, operands, "auto")
    is_one_head = query.ndim == key.ndim == value.ndim == 2
    return operands.out[0] if is_one_head else operands.out


def _run(problem: Problem, operands: Operands, backend: str) -> None:
    """Plan and run; a call without scores is answered here, so that backends always have some."""
    chosen = plan(problem, backend)
    if problem.batch * problem.heads_q * problem.seqlen_q * problem.seqlen_k:
        _launcher(chosen.backend)(chosen, problem, operands)
        return
    operands.out[...] = 0
    if operands.lse is not None:
        operands.lse[...] = -np.inf


@cache
def _launcher(backend: str) -> Callable[[Plan, Problem, Operands], None]:
    """Import and return one backend's run(); only the chosen one is ever imported."""
    if backend == "cpu":
        from .cpu.run import run
    else:
        from .reference import run
    return run


# --- PyTorch's rules ----------------------------------------------------------------------------


def _check_dropout(dropout_p: float) -> None:
    if not 0 <= dropout_p <= 1:
        raise ValueError(f"dropout_p must be between 0 and 1, got {dropout_p}")
    if dropout_p:
        raise NotImplementedError(
            f"dropout_p must be 0, got {dropout_p}: dropout is not implemented"
        )


def _mask_or_bias(
    attn_mask: Any, is_causal: bool, query: np.ndarray
) -> tuple[np.ndarray | None, np.ndarray | None]:
    """Return attn_mask as (mask, bias), one of them None."""
    if attn_mask is None:
        return None, None
    if is_causal:
        raise ValueError("attn_mask must be None if is_causal is True, got both")
    attn_mask = plain(TORCH_NAMES.mask, attn_mask)
    if attn_mask.dtype.char == "?":
        return attn_mask, None
    if attn_mask.dtype.char not in ("f", query.dtype.char):
        rule = "attn_mask must be bool, float32 or of the dtype of query"
        raise TypeError(f"{rule} ({query.dtype}), got {attn_mask.dtype}")
    return None, attn_mask


def _broadcast_heads(
    query: np.ndarray, key: np.ndarray, value: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return views with the same heads, or key and value with one; rank 2 counts as one head."""
    heads_q, heads_k, heads_v = (a.shape[-3] if a.ndim > 2 else 1 for a in (query, key, value))
    is_rank_1 = min(query.ndim, key.ndim, value.ndim) < 2  # check() refuses it
    if is_rank_1 or heads_q == heads_k == heads_v or heads_k == heads_v == 1:
        return query, key, value
    counts = {heads_q, heads_k, heads_v} - {1}
    if len(counts) > 1:
        rule = "query, key and value must have the same heads, or 1, unless enable_gqa is True"
        raise ValueError(f"{rule}, got {heads_q}, {heads_k} and {heads_v}")
    heads = counts.pop()
    query, key, value = (
        np.broadcast_to(a, (*a.shape[:-3], heads, *a.shape[-2:])) for a in (query, key, value)
    )
    return query, key, value
