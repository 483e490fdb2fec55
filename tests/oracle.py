"""Attention from its definition, with the whole score matrix. Imports nothing from fastattn.

In a wider dtype it is the truth; in the dtype of the inputs it is the plain NumPy formula, whose
own error is the measure of what an implementation may err.
"""

from __future__ import annotations

import numpy as np

# What is exact enough to judge each dtype. Where long double is no wider, the floor has to be.
WIDER = {"float64": np.longdouble}
NO_WIDER = np.finfo(np.longdouble).eps == np.finfo(np.float64).eps
# Distance of 1 from the next number, and of 0: rounding to nearest errs by half of it.
EPS = {"float16": 2.0**-10, "bfloat16": 2.0**-7, "float32": 2.0**-23, "float64": 2.0**-52}
TINY = {"float16": 2.0**-24, "bfloat16": 2.0**-133, "float32": 2.0**-149, "float64": 0.0}


def attention(
    q,
    k,
    v,
    *,
    scale=None,
    causal=False,
    align="bottom_right",
    window=(None, None),
    chunk=0,
    softcap=None,
    bias=None,
    mask=None,
    alibi=None,
    sinks=None,
    q_len=None,
    kv_len=None,
    kv_start=None,
    change=None,
    keep=None,
    dropout_p=0.0,
    dtype=np.float64,
):
    """Return (out, lse) in `dtype`. Shapes and meanings as in fastattn.attention.

    `change` is a score_mod, of all scores at once: (..., heads_q, seqlen_q, seqlen_k) to the same.
    `keep` is what dropout leaves, bool (..., heads_q, seqlen_q, seqlen_k).
    """
    q, k, v = (np.asarray(a).astype(dtype) for a in (q, k, v))
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
            keep = np.take_along_axis(*np.broadcast_arrays(keep, np.maximum(j, 0)), axis=-1)
            p = p * keep * dtype(0 if dropout_p == 1 else 1 / (1 - dropout_p))
        out = _product(p, visible, v)
    return (out[0], lse[0]) if matrices else (out, lse)


def judge(q, k, v, **flags):
    """Return ((out, lse) exact, (out, lse) by the formula in the dtype of q, float32 for halves).

    The formula's own error depends on the order in which a dot product is summed, by a factor of
    ten where the scores are large: it is evaluated for four orders of head_dim, and the worst is
    returned.
    """
    exact = attention(q, k, v, **flags, dtype=WIDER.get(q.dtype.name, np.float64))
    dtype = np.float64 if q.dtype == np.float64 else np.float32
    rng = np.random.default_rng(0)
    orders = [np.arange(q.shape[-1])] + [rng.permutation(q.shape[-1]) for _ in range(3)]
    formulas = [attention(q[..., o], k[..., o], v, **flags, dtype=dtype) for o in orders]
    return exact, tuple(
        max((f[n] for f in formulas), key=lambda result, n=n: error_of(result, exact[n]))
        for n in range(2)
    )


def error_of(result, exact):
    finite = np.isfinite(exact) & np.isfinite(result)
    return np.abs(result[finite] - exact[finite]).max(initial=0.0)


def visible_keys(seqlen_q, seqlen_k, causal, align, window):
    """Return (seqlen_q, seqlen_k) bool: what the window lets each row see."""
    return positions(seqlen_q, seqlen_k, causal, align, window)[2]


def positions(
    seqlen_q, seqlen_k, causal, align, window, chunk=0, q_len=None, kv_len=None, kv_start=None
):
    """Return (p, j, visible) that broadcast to the scores: positions of rows and keys, and bool."""

    def per_batch(value):
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


def softmax(s, sinks):
    """Return (p, lse) of masked scores; rows without a key are 0 and -inf, or the sink."""
    row_max = np.maximum(s.max(axis=-1, keepdims=True, initial=-np.inf), sinks)
    safe_max = np.where(row_max == -np.inf, 0, row_max).astype(s.dtype)
    e = np.exp(s - safe_max)
    row_sum = e.sum(axis=-1, keepdims=True) + np.exp(sinks - safe_max)
    p = e / np.where(row_sum == 0, 1, row_sum).astype(s.dtype)
    return p, (row_max + np.log(row_sum))[..., 0]


def _product(p, visible, v):
    """Return p @ v; what a row does not see contributes nothing, whatever its v."""
    if np.isfinite(v).all():
        return p @ v
    out = np.zeros((*p.shape[:-1], v.shape[-1]), p.dtype)
    for row in np.ndindex(p.shape[:-1]):
        keys = visible[row]
        out[row] = p[row][keys] @ v[row[:-1]][keys]
    return out


def assert_within_budget(ours, exact, formula, floor=2.0):
    """Fail unless `ours` errs at most twice as much as `formula`, plus `floor` roundings.

    And, where `ours` is of a narrower dtype, plus the rounding to it, once. NaNs and infinities
    must stand where `exact` has them. Errors are taken over the whole array.
    """
    ours, exact, formula = np.asarray(ours), np.asarray(exact), np.asarray(formula)
    assert ours.shape == exact.shape
    storage, ours = ours.dtype.name, ours.astype(formula.dtype)
    finite = np.isfinite(exact)
    np.testing.assert_array_equal(ours[~finite], exact[~finite].astype(ours.dtype))
    assert np.isfinite(ours[finite]).all(), "NaN or infinity where the oracle has a number"
    if not finite.any():
        return
    exact = exact[finite]
    error = np.abs(ours[finite] - exact)
    allowed = 2 * np.abs(formula[finite] - exact).max()
    if ours.dtype == np.float64 and NO_WIDER:
        floor *= 8
    allowed += floor * EPS[ours.dtype.name] * max(1.0, np.abs(exact).max())
    if storage != ours.dtype.name:
        # To the nearest, at most half a unit in the last place, of the next power of two at worst.
        allowed = allowed + EPS[storage] * (np.abs(exact) + allowed) / 2 + TINY[storage] / 2
    excess = np.argmax(error - allowed)
    assert (error <= allowed).all(), (
        f"error {error[excess]:.3g}, allowed {np.broadcast_to(allowed, error.shape)[excess]:.3g}"
    )
