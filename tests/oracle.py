"""Attention from its definition, with the whole score matrix. Imports nothing from fastattn.

In a wider dtype it is the truth; in the dtype of the inputs it is the plain NumPy formula, whose
own error is the measure of what an implementation may err.
"""

from __future__ import annotations

import numpy as np

# What is exact enough to judge each dtype. Where long double is no wider, the floor has to be.
WIDER = {"float32": np.float64, "float64": np.longdouble}
NO_WIDER = np.finfo(np.longdouble).eps == np.finfo(np.float64).eps


def attention(
    q,
    k,
    v,
    *,
    scale=None,
    causal=False,
    align="bottom_right",
    window=(None, None),
    bias=None,
    mask=None,
    dtype=np.float64,
):
    """Return (out, lse) in `dtype`. Shapes and meanings as in fastattn.attention."""
    q, k, v = (np.asarray(a).astype(dtype) for a in (q, k, v))
    matrices = q.ndim == k.ndim == v.ndim == 2
    q, k, v = (a if a.ndim > 2 else a[None] for a in (q, k, v))
    lead = np.broadcast_shapes(q.shape[:-3], k.shape[:-3], v.shape[:-3])
    q, k, v = (np.broadcast_to(a, lead + a.shape[-3:]) for a in (q, k, v))
    group = q.shape[-3] // max(k.shape[-3], 1)
    k, v = (np.repeat(a, group, axis=-3) for a in (k, v))

    visible = visible_keys(q.shape[-2], k.shape[-2], causal, align, window)
    with np.errstate(all="ignore"):
        s = q @ k.swapaxes(-1, -2)
        s *= (q.shape[-1] ** -0.5 if q.shape[-1] else 1.0) if scale is None else scale
        if bias is not None:
            bias = np.asarray(bias)
            s += bias.astype(dtype)
            visible = visible & (bias != -np.inf)
        if mask is not None:
            visible = visible & np.asarray(mask)
        visible = np.broadcast_to(visible, s.shape)
        out, lse = _softmax_product(np.where(visible, s, -np.inf).astype(dtype), visible, v)
    return (out[0], lse[0]) if matrices else (out, lse)


def judge(q, k, v, **flags):
    """Return ((out, lse) exact, (out, lse) by the formula in the dtype of q).

    The formula's own error depends on the order in which a dot product is summed, by a factor of
    ten where the scores are large: it is evaluated for four orders of head_dim, and the worst is
    returned.
    """
    exact = attention(q, k, v, **flags, dtype=WIDER[q.dtype.name])
    rng = np.random.default_rng(0)
    orders = [np.arange(q.shape[-1])] + [rng.permutation(q.shape[-1]) for _ in range(3)]
    formulas = [attention(q[..., o], k[..., o], v, **flags, dtype=q.dtype) for o in orders]
    return exact, tuple(
        max((f[n] for f in formulas), key=lambda result, n=n: _error(result, exact[n]))
        for n in range(2)
    )


def _error(result, exact):
    finite = np.isfinite(exact) & np.isfinite(result)
    return np.abs(result[finite] - exact[finite]).max(initial=0.0)


def visible_keys(seqlen_q, seqlen_k, causal, align, window):
    """Return (seqlen_q, seqlen_k) bool: what the window lets each row see."""
    offset = {"bottom_right": seqlen_k - seqlen_q, "top_left": 0}.get(align, align)
    left, right = window
    right = 0 if causal else right
    position = np.arange(seqlen_q)[:, None] + offset
    j = np.arange(seqlen_k)
    visible = np.ones((seqlen_q, seqlen_k), bool)
    if left is not None:
        visible &= j >= position - left
    if right is not None:
        visible &= j <= position + right
    return visible


def _softmax_product(s, visible, v):
    """Return (out, lse) of masked scores; rows without a key are 0 and -inf."""
    row_max = s.max(axis=-1, keepdims=True, initial=-np.inf)
    e = np.exp(s - np.where(row_max == -np.inf, 0, row_max).astype(s.dtype))
    row_sum = e.sum(axis=-1, keepdims=True)
    p = e / np.where(row_sum == 0, 1, row_sum).astype(s.dtype)
    lse = (row_max + np.log(row_sum))[..., 0]
    if np.isfinite(v).all():
        return p @ v, lse
    out = np.zeros((*s.shape[:-1], v.shape[-1]), s.dtype)
    for row in np.ndindex(s.shape[:-1]):
        keys = visible[row]
        out[row] = p[row][keys] @ v[row[:-1]][keys]
    return out, lse


def assert_within_budget(ours, exact, formula, floor=2.0):
    """Fail unless `ours` errs at most twice as much as `formula`, plus `floor` roundings.

    NaNs and infinities must stand where `exact` has them. Errors are taken over the whole array.
    """
    ours, exact, formula = np.asarray(ours), np.asarray(exact), np.asarray(formula)
    assert ours.shape == exact.shape
    finite = np.isfinite(exact)
    np.testing.assert_array_equal(ours[~finite], exact[~finite].astype(ours.dtype))
    assert np.isfinite(ours[finite]).all(), "NaN or infinity where the oracle has a number"
    if not finite.any():
        return
    error = np.abs(ours[finite] - exact[finite]).max()
    allowed = 2 * np.abs(formula[finite] - exact[finite]).max()
    if ours.dtype == np.float64 and NO_WIDER:
        floor *= 8
    allowed += floor * np.finfo(ours.dtype).eps * max(1.0, np.abs(exact[finite]).max())
    assert error <= allowed, f"error {error:.3g}, allowed {allowed:.3g}"
