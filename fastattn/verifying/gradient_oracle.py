"""Gradients from their definition, with whole matrices. Uses nothing else of fastattn."""

from __future__ import annotations

from typing import Any

import numpy as np

from . import oracle


def gradients(
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    *,
    dlse: Any = 0.0,
    scale: float | None = None,
    softcap: float | None = None,
    bias: Any = None,
    mask: Any = None,
    alibi: Any = None,
    sinks: Any = None,
    change: Any = None,
    slope: Any = None,
    keep: Any = None,
    dropout_p: float = 0.0,
    dtype: Any = np.float64,
    **lengths: Any,
) -> dict[str, np.ndarray]:
    """Return {"dq", "dk", "dv", "dbias", "dalibi", "dsinks"} in `dtype`, of arrays of rank 4.

    Arguments as in oracle.attention(), and `slope`, the derivative of `change`. The last three are
    per pair (batch, heads_q, seqlen_q, seqlen_k), per (batch, heads_q), and per row, not yet summed
    to the shapes of the caller.
    """
    dout, q, k, v = (np.asarray(a).astype(dtype) for a in (dout, q, k, v))
    group = q.shape[1] // k.shape[1]
    wide_k, wide_v = (np.repeat(a, group, axis=1) for a in (k, v))
    scale = dtype(q.shape[-1] ** -0.5 if scale is None else scale)
    s, slopes, visible, distance, keys = _scores(
        scale * (q @ wide_k.swapaxes(-1, -2)), softcap, (change, slope), bias, mask, alibi, lengths
    )
    sinks = np.full(q.shape[1], -np.inf) if sinks is None else np.asarray(sinks)
    sinks = sinks.astype(dtype)[:, None, None]
    # The sink is one more score. Its share is not exp(sink - lse): a large lse is rounded.
    wide = np.concatenate([s, np.broadcast_to(sinks, (*s.shape[:-1], 1))], axis=-1)
    both, _ = oracle.softmax(wide, np.asarray(-np.inf, dtype))
    p, sink_p = both[..., :-1], both[..., -1:]
    kept = np.ones(())
    if keep is not None:
        keep, place = np.broadcast_arrays(keep, np.maximum(keys, 0))
        kept = np.take_along_axis(keep, place, axis=-1)
        kept = kept * dtype(0 if dropout_p == 1 else 1 / (1 - dropout_p))
    dp = kept * (dout @ wide_v.swapaxes(-1, -2))
    delta = (p * dp).sum(-1, keepdims=True) - np.asarray(dlse, dtype)[..., None]
    ds = np.where(visible, p * (dp - delta), 0).astype(dtype)
    scaled = scale * ds * slopes
    return {
        "dq": (scaled @ wide_k).astype(dtype),
        "dk": _per_key_head(scaled.swapaxes(-1, -2) @ q, group),
        "dv": _per_key_head((kept * p).astype(dtype).swapaxes(-1, -2) @ dout, group),
        "dbias": ds,
        "dalibi": -(ds * distance).sum((-1, -2)).astype(dtype),
        "dsinks": -(sink_p * delta)[..., 0].astype(dtype),
    }


def judge(*arrays: Any, orders: int = 4, **flags: Any) -> tuple[dict, dict]:
    """Return the gradients exactly, and by the formula in the dtype of q, float32 for halves.

    The formula is evaluated for several orders of head_dim, keys and rows, as in oracle.judge().
    """
    q = arrays[1]
    dtype = np.float64 if q.dtype == np.float64 else np.float32
    rng = np.random.default_rng(0)
    worst: dict[str, tuple[float, np.ndarray]] = {}
    with np.errstate(all="ignore"):
        exact = gradients(*arrays, **flags, dtype=oracle.WIDER.get(q.dtype.name, np.float64))
        formulas = [_in_order(arrays, flags, dtype, rng if n else None) for n in range(orders)]
    for formula in formulas:
        for name, a in formula.items():
            error = oracle.error_of(a, exact[name])
            if name not in worst or error > worst[name][0]:
                worst[name] = error, a
    return exact, {name: a for name, (_, a) in worst.items()}


def _in_order(
    arrays: tuple[Any, ...], flags: dict[str, Any], dtype: Any, rng: Any
) -> dict[str, np.ndarray]:
    dout, q, k, v = arrays
    if rng is not None:
        order, order_v = (rng.permutation(a.shape[-1]) for a in (q, v))
        dout, v, q, k = dout[..., order_v], v[..., order_v], q[..., order], k[..., order]
    found = gradients(dout, q, k, v, **flags, dtype=dtype)
    if rng is not None:
        for name, places in (("dq", order), ("dk", order), ("dv", order_v)):
            found[name] = found[name][..., np.argsort(places)]
    return found


def _scores(
    s: np.ndarray,
    softcap: float | None,
    modifier: tuple[Any, Any],
    bias: Any,
    mask: Any,
    alibi: Any,
    lengths: dict[str, Any],
) -> tuple[np.ndarray, ...]:
    """Return (scores, -inf where hidden; d scores / d s; visible; distance; index of the key)."""
    dtype = s.dtype.type
    slope = np.ones((), dtype)
    if softcap is not None and softcap > 0:
        t = np.tanh(s / dtype(softcap))
        s, slope = dtype(softcap) * t, 1 - t * t
    change, slope_of = modifier
    if change is not None:
        s, slope = change(s), slope * slope_of(s)
    positions: dict[str, Any] = {
        "causal": False,
        "align": "bottom_right",
        "window": (None, None),
    } | lengths
    p, j, visible = oracle.positions(*s.shape[-2:], **positions)
    if change is not None:
        visible = visible & (s != -np.inf)
    distance = np.abs(p - j).astype(dtype)
    if bias is not None:
        bias = np.asarray(bias).astype(dtype)
        s, visible = s + bias, visible & (bias != -np.inf)
    if alibi is not None:
        s = s - np.asarray(alibi).astype(dtype)[..., None, None] * distance
    if mask is not None:
        visible = visible & mask
    visible = np.broadcast_to(visible, s.shape)
    return np.where(visible, s, -np.inf).astype(dtype), slope, visible, distance, j


def _per_key_head(a: np.ndarray, group: int) -> np.ndarray:
    """Return the sum over the query heads of a group."""
    batch, heads, *rest = a.shape
    return a.reshape(batch, heads // group, group, *rest).sum(2)
