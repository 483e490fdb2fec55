"""Attention from its definition, with the whole score matrix. Uses nothing else of fastattn.

In a wider dtype it is the truth; in the dtype of the inputs it is the plain NumPy formula, whose
own error is the measure of what an implementation may err.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

# What is exact enough to judge each dtype. Where long double is no wider, the floor has to be.
WIDER = {"float64": np.longdouble}
NO_WIDER = np.finfo(np.longdouble).eps == np.finfo(np.float64).eps
# Distance of 1 from the next number, and of 0: rounding to nearest errs by half of it.
EPS = {"float16": 2.0**-10, "bfloat16": 2.0**-7, "float32": 2.0**-23, "float64": 2.0**-52}
TF32_EPS = 2.0**-10
TINY = {"float16": 2.0**-24, "bfloat16": 2.0**-133, "float32": 2.0**-149, "float64": 0.0}


class WrongAnswer(AssertionError):
    """A result that is not attention."""


def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    scale: float | None = None,
    causal: bool = False,
    align: Any = "bottom_right",
    window: tuple[int | None, int | None] = (None, None),
    chunk: int = 0,
    softcap: float | None = None,
    bias: Any = None,
    mask: Any = None,
    alibi: Any = None,
    sinks: Any = None,
    q_len: Any = None,
    kv_len: Any = None,
    kv_start: Any = None,
    change: Callable[[Any], Any] | None = None,
    keep: Any = None,
    dropout_p: float = 0.0,
    tf32: bool = False,
    dtype: Any = np.float64,
) -> tuple[np.ndarray, np.ndarray]:
    """Return (out, lse) in `dtype`. Shapes and meanings as in fastattn.attention.

    `tf32` rounds the factors of both products, as tensor cores do.
    `change` is a score_mod, of all scores at once: (..., heads_q, seqlen_q, seqlen_k) to the same.
    `keep` is what dropout leaves, bool (..., heads_q, seqlen_q, seqlen_k).
    """
    q, k, v = (np.asarray(a).astype(dtype) for a in (q, k, v))
    if tf32:
        q, k, v = map(rounded_to_tf32, (q, k, v))
    matrices = q.ndim == k.ndim == v.ndim == 2
    q, k, v = (a if a.ndim > 2 else a[None] for a in (q, k, v))
    lead = np.broadcast_shapes(q.shape[:-3], k.shape[:-3], v.shape[:-3])
    q, k, v = (np.broadcast_to(a, lead + a.shape[-3:]) for a in (q, k, v))
    group = q.shape[-3] // max(k.shape[-3], 1)
    k, v = (np.repeat(a, group, axis=-3) for a in (k, v))
    seqlen_q, seqlen_k = q.shape[-2], k.shape[-2]
    p, j, visible = positions(
        seqlen_q, seqlen_k, causal, align, window, chunk, q_len, kv_len, kv_start
    )
    with np.errstate(all="ignore"):
        s = q @ k.swapaxes(-1, -2)
        s *= (q.shape[-1] ** -0.5 if q.shape[-1] else 1.0) if scale is None else scale
        if softcap is not None and softcap > 0:
            s = dtype(softcap) * np.tanh(s / dtype(softcap))
        if change is not None:
            s = np.broadcast_to(change(s), s.shape).astype(dtype)
            visible = visible & (s != -np.inf)
        if bias is not None:
            bias = np.asarray(bias).astype(dtype)
            s += bias
            visible = visible & (bias != -np.inf)
        if alibi is not None:
            s -= np.asarray(alibi).astype(dtype)[..., None, None] * np.abs(p - j).astype(dtype)
        if mask is not None:
            visible = visible & np.asarray(mask)
        visible = np.broadcast_to(visible, s.shape)
        s = np.where(visible, s, -np.inf).astype(dtype)
        sinks = np.full(q.shape[-3], -np.inf) if sinks is None else np.asarray(sinks)
        p, lse = softmax(s, sinks.astype(dtype)[:, None, None])
        if keep is not None:
            # `keep` counts keys as j does, from kv_start.
            keep, place = np.broadcast_arrays(keep, np.maximum(j, 0))
            keep = np.take_along_axis(keep, place, axis=-1)
            p = p * keep * dtype(0 if dropout_p == 1 else 1 / (1 - dropout_p))
        out = _product(rounded_to_tf32(p) if tf32 else p, visible, v)
    return (out[0], lse[0]) if matrices else (out, lse)


def rounded_to_tf32(x: np.ndarray) -> np.ndarray:
    """Return the nearest numbers that have 11 significant bits, halves away from 0, and the
    exponent of a float32. Infinities and NaNs stay.
    """
    bits = np.array(x, np.float32).view(np.uint32)
    bits = np.where(np.isfinite(x), (bits + np.uint32(0x1000)) & ~np.uint32(0x1FFF), bits)
    return bits.view(np.float32).astype(x.dtype)


def judge(
    q: Any, k: Any, v: Any, *, orders: int = 4, tf32: bool = False, **flags: Any
) -> tuple[Any, Any]:
    """Return ((out, lse) exact, (out, lse) by the formula in the dtype of q, float32 for halves).
    With `tf32`, the formula rounds the factors of its products.

    The formula's own error depends on the order in which a dot product is summed, by a factor of
    ten where the scores are large: it is evaluated for several orders of head_dim, and the worst is
    returned.
    """
    exact = attention(q, k, v, **flags, dtype=WIDER.get(q.dtype.name, np.float64))
    dtype = np.float64 if q.dtype == np.float64 else np.float32
    rng = np.random.default_rng(0)
    places = [np.arange(q.shape[-1])] + [rng.permutation(q.shape[-1]) for _ in range(orders - 1)]
    flags |= {"tf32": tf32, "dtype": dtype}
    formulas = [attention(q[..., o], k[..., o], v, **flags) for o in places]
    pairs = [[(error_of(f[n], exact[n]), f[n]) for f in formulas] for n in range(2)]
    return exact, tuple(max(pair, key=lambda entry: entry[0])[1] for pair in pairs)


def error_of(result: np.ndarray, exact: np.ndarray) -> float:
    """Return the largest error where both are numbers."""
    finite = np.isfinite(exact) & np.isfinite(result)
    return np.abs(result[finite] - exact[finite]).max(initial=0.0)


def visible_keys(
    seqlen_q: int, seqlen_k: int, causal: bool, align: Any, window: tuple[int | None, int | None]
) -> np.ndarray:
    """Return (seqlen_q, seqlen_k) bool: what the window lets each row see."""
    return positions(seqlen_q, seqlen_k, causal, align, window)[2]


def positions(
    seqlen_q: int,
    seqlen_k: int,
    causal: bool,
    align: Any,
    window: tuple[int | None, int | None],
    chunk: int = 0,
    q_len: Any = None,
    kv_len: Any = None,
    kv_start: Any = None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return (p, j, visible) that broadcast to the scores: positions of rows and keys, and bool."""

    def per_batch(value: Any) -> np.ndarray:
        value = np.asarray(value)
        return value[..., None, None, None] if value.ndim else value

    q_len = per_batch(seqlen_q if q_len is None else q_len)
    kv_len = per_batch(seqlen_k if kv_len is None else kv_len)
    kv_start = per_batch(0 if kv_start is None else kv_start)
    if isinstance(align, str):
        offset = {"bottom_right": kv_len - kv_start - q_len, "top_left": 0}[align]
    else:
        offset = per_batch(align)
    i, j = np.arange(seqlen_q)[:, None], np.arange(seqlen_k) - kv_start
    p = i + offset
    left, right = window
    right = 0 if causal else right
    visible = (i < q_len) & (j >= 0) & (j < kv_len - kv_start)
    if left is not None:
        visible = visible & (j >= p - left)
    if right is not None:
        visible = visible & (j <= p + right)
    if chunk:
        visible = visible & (np.floor_divide(j, chunk) == np.floor_divide(p, chunk))
    return p, j, visible


def softmax(s: np.ndarray, sinks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return (p, lse) of masked scores; rows without a key are 0 and -inf, or the sink."""
    row_max = np.maximum(s.max(axis=-1, keepdims=True, initial=-np.inf), sinks)
    safe_max = np.where(row_max == -np.inf, 0, row_max).astype(s.dtype)
    e = np.exp(s - safe_max)
    row_sum = e.sum(axis=-1, keepdims=True) + np.exp(sinks - safe_max)
    p = e / np.where(row_sum == 0, 1, row_sum).astype(s.dtype)
    return p, (row_max + np.log(row_sum))[..., 0]


def _product(p: np.ndarray, visible: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Return p @ v; what a row does not see contributes nothing, whatever its v."""
    if np.isfinite(v).all():
        return p @ v
    out = np.zeros((*p.shape[:-1], v.shape[-1]), p.dtype)
    for row in np.ndindex(p.shape[:-1]):
        keys = visible[row]
        out[row] = p[row][keys] @ v[row[:-1]][keys]
    return out


def errors(ours: Any, exact: Any, formula: Any, floor: float = 2.0) -> tuple[Any, Any]:
    """Return (error, what is allowed) of each element that is a number.

    Allowed is twice what `formula` errs anywhere in the array, plus `floor` roundings; and, where
    `ours` is of a narrower dtype, plus the rounding to it, once. Raises WrongAnswer unless shapes
    agree, and NaNs and infinities stand where `exact` has them.
    """
    ours, exact, formula = np.asarray(ours), np.asarray(exact), np.asarray(formula)
    if ours.shape != exact.shape:
        raise WrongAnswer(f"shape must be {exact.shape}, got {ours.shape}")
    storage, ours = ours.dtype.name, ours.astype(formula.dtype)
    finite = np.isfinite(exact)
    if not np.array_equal(ours[~finite], exact[~finite].astype(ours.dtype), equal_nan=True):
        raise WrongAnswer("a number, or another infinity, where the oracle has NaN or infinity")
    if not np.isfinite(ours[finite]).all():
        raise WrongAnswer("NaN or infinity where the oracle has a number")
    exact = exact[finite]
    error = np.abs(ours[finite] - exact)
    allowed = 2 * np.abs(formula[finite] - exact).max(initial=0)
    if ours.dtype == np.float64 and NO_WIDER:
        floor *= 8
    allowed += floor * EPS[ours.dtype.name] * max(1.0, np.abs(exact).max(initial=0))
    if storage != ours.dtype.name:
        # To the nearest, at most half a unit in the last place, of the next power of two at worst.
        allowed = allowed + EPS[storage] * (np.abs(exact) + allowed) / 2 + TINY[storage] / 2
    return error, np.broadcast_to(allowed, error.shape)


def assert_within_budget(ours: Any, exact: Any, formula: Any, floor: float = 2.0) -> None:
    """Raise WrongAnswer unless `ours` errs as little as errors() allows."""
    error, allowed = errors(ours, exact, formula, floor)
    if not (error <= allowed).all():
        worst = np.argmax(error - allowed)
        raise WrongAnswer(f"error {error[worst]:.3g}, allowed {allowed[worst]:.3g}")
