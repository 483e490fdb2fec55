"""The gradients in NumPy: the fallback, and the meaning of the words.

With the scores s of reference.py, their derivative c with respect to scale * q @ k.T (that of
softcap and score_mod), and what dropout makes of 1, D, for every row i

    p[i, j] = exp(s[i, j] - lse[i]);  delta[i] = dout[i] · out[i] - dlse[i]
    ds[i, j] = p[i, j] * (D[i, j] * dout[i] · v[j] - delta[i])
    dv[j] = sum_i D[i, j] * p[i, j] * dout[i]
    dq[i] = scale * sum_j ds[i, j] * c[i, j] * k[j]
    dk[j] = scale * sum_i ds[i, j] * c[i, j] * q[i]

and dbias = ds, dalibi = sum -ds * |position - j|, dsinks = sum_i -exp(sink - lse[i]) * delta[i].

A key that is hidden from a row has ds = p = 0, whatever it holds. Nothing is stored of the forward
pass but out and lse; blocks as there, so O(block_m * block_n) memory.

Source: Dao 2023, FlashAttention-2, arXiv:2307.08691, algorithm 2.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
from numpy.lib.stride_tricks import as_strided

from . import dropout
from .large_rows import is_large, is_ordinary, is_same, weights_of_sinks
from .modified import key_blocks, score_slopes
from .problem import Gradients, Operands, Plan, Problem
from .reference import (
    Member,
    Slots,
    block,
    complete,
    cuts,
    distances,
    leading,
    max_slots,
    members,
    online_update,
    products,
    scores,
    spans,
    split_heads,
    start,
)

SINK_ROWS = 1024  # rows of each head that add_sinks() converts at a time


def run(plan: Plan, problem: Problem, operands: Operands, gradients: Gradients) -> None:
    """Add to all of gradients that is written but dsinks.

    Raises nothing and gives no NumPy warning.
    """
    with np.errstate(all="ignore"):
        for one, part, into in _parts(plan, problem, operands, gradients):
            block_n = max(1, min(plan.block_n, one.seqlen_k))
            for m_start in range(0, one.seqlen_q, plan.block_m):
                m_stop = min(m_start + plan.block_m, one.seqlen_q)
                _differentiate_rows(one, part, into, slice(m_start, m_stop), block_n)


def add_sinks(operands: Operands, gradients: Gradients) -> None:
    """Add to gradients.dsinks, for any backend: it takes no key, only what the rows came to."""
    dtype = gradients.dsinks.dtype  # type: ignore[union-attr]
    seqlen_q = operands.q.shape[-2]
    with np.errstate(all="ignore"):
        for at in np.ndindex(operands.q.shape[:-3]):
            for start in range(0, seqlen_q, SINK_ROWS):
                rows = slice(start, start + SINK_ROWS)
                dout, out = (
                    block(a[at][..., rows, :], dtype) for a in (gradients.dout, operands.out)
                )
                lse = operands.lse[at][..., rows]  # type: ignore[index]
                delta = np.einsum("...d,...d->...", dout, out)
                if gradients.dlse is not None:
                    delta -= gradients.dlse[at][..., rows]
                if gradients.sink_weights is None:
                    delta *= weights_of_sinks(operands.sinks, lse)  # type: ignore[arg-type]
                else:
                    delta *= gradients.sink_weights[at][..., rows]
                gradients.dsinks[...] -= delta.sum(axis=-1)  # type: ignore[index]


# --- slots: see reference.Slots -------------------------------------------------------------------


class _Slots(NamedTuple):
    """Views with slot axes in front, for the slots of a reference.Slots; stride 0 is a sum."""

    dout: np.ndarray  # (*slots, seqlen_q, head_dim_v)
    dlse: np.ndarray | None  # (*slots, seqlen_q)
    dq: np.ndarray  # (*slots, seqlen_q, head_dim)
    dk: np.ndarray  # (*slots, seqlen_k, head_dim)
    dv: np.ndarray  # (*slots, seqlen_k, head_dim_v)
    dbias: np.ndarray | None  # (*slots, seqlen_q, seqlen_k)
    dalibi: np.ndarray | None  # (*slots)
    sink_weights: np.ndarray | None  # (*slots, seqlen_q)

    def cut(self, at: tuple[slice, ...]) -> _Slots:
        """Return those of the slots `at`."""
        return _Slots(*(a if a is None else a[at] for a in self))  # type: ignore[arg-type]


def _parts(plan: Plan, problem: Problem, operands: Operands, gradients: Gradients) -> Any:
    """Yield (problem without ranges, slots, the same slots of the gradients)."""
    whole = _grouped(problem, operands, gradients)
    pairs = zip(members(problem, operands), spans(problem, operands), strict=True)
    for (one, slots), (_, member) in pairs:
        if not one.seqlen_q or not one.seqlen_k:
            continue
        into = whole if member is None else _member(whole, member)
        for at in cuts(slots.q.shape[:-2], max_slots(plan, one)):
            yield one, slots.cut(at), into.cut(at)


def _grouped(problem: Problem, operands: Operands, gradients: Gradients) -> _Slots:
    """Return views with slot axes (*lead, heads_kv, group); those of a group share dk and dv."""
    heads = problem.heads_kv, problem.group
    lead = leading(problem, operands)

    def split(a: np.ndarray | None, axis: int) -> Any:
        return None if a is None else split_heads(a, axis, heads)

    def repeat(a: np.ndarray) -> np.ndarray:
        shape = a.shape[:-3] + heads + a.shape[-2:]
        return as_strided(a, shape, (*a.strides[:-2], 0, *a.strides[-2:]))

    dalibi = gradients.dalibi
    return _Slots(
        dout=split(gradients.dout, -3),
        dlse=split(gradients.dlse, -2),
        dq=split(gradients.dq, -3),
        dk=repeat(gradients.dk),
        dv=repeat(gradients.dv),
        dbias=split(gradients.dbias, -3),
        dalibi=None if dalibi is None else dalibi.reshape(*lead, *heads),
        sink_weights=split(gradients.sink_weights, -2),
    )


def _member(slots: _Slots, member: Member) -> _Slots:
    """Return the slots of one batch entry."""
    place, at, rows, keys = member
    dout, dlse, dq, dk, dv, dbias, dalibi, sink_weights = slots
    return _Slots(
        dout[place][..., rows, :],
        None if dlse is None else dlse[place][..., rows],
        dq[place][..., rows, :],
        dk[place][..., keys, :],
        dv[place][..., keys, :],
        None if dbias is None else dbias[place][..., rows, keys],
        None if dalibi is None else dalibi[at],
        None if sink_weights is None else sink_weights[place][..., rows],
    )


def add_to(target: np.ndarray, values: np.ndarray) -> None:
    """Add to a view in which stride 0 stands for the sum along an axis."""
    pairs = zip(target.strides, target.shape, strict=True)
    summed = tuple(n for n, (stride, size) in enumerate(pairs) if stride == 0 and size > 1)
    if summed:
        values = values.sum(axis=summed, keepdims=True)
        target = target[tuple(slice(1 if n in summed else None) for n in range(target.ndim))]
    target += values


# --- one block of queries -------------------------------------------------------------------------


class _Rows(NamedTuple):
    """What is known of a block of query rows before their keys are differentiated."""

    at: slice
    q: np.ndarray  # (*slots, block_m, head_dim)
    dout: np.ndarray  # (*slots, block_m, head_dim_v)
    # (*slots, block_m); inf for a row that sees nothing, so that p = 0. Of a large row it is the
    # largest score, and dout and delta have been divided by the sum of exponentials.
    lse: np.ndarray
    delta: np.ndarray  # (*slots, block_m)


def _rows(problem: Problem, part: Slots, into: _Slots, at: slice) -> _Rows:
    """Read rows; q and dout of those whose gradient is all 0 or all NaN become 0.

    For what is no number must not reach, as 0 * NaN, keys that such a row does not see. lse = NaN
    makes the gradients NaN for those that it does see.
    """
    dtype = problem.variant.dtype
    q, dout = block(part.q[..., at, :], dtype), block(into.dout[..., at, :], dtype)
    out, lse = block(part.out[..., at, :], dtype), part.lse[..., at]  # type: ignore[index]
    delta = np.einsum("...d,...d->...", dout, out)
    if into.dlse is not None:
        delta -= into.dlse[..., at]
    bad = ~(np.isfinite(q).all(-1) & np.isfinite(dout).all(-1)) | ~(lse < np.inf)
    empty = lse == -np.inf
    lse = np.where(empty, np.inf, np.where(bad, np.nan, lse)).astype(dtype)
    if (bad | empty).any():
        q, dout = (np.where((bad | empty)[..., None], 0, a).astype(dtype) for a in (q, dout))
        delta[empty] = 0
    return _Rows(at, q, dout, lse, delta)


def _normalised(
    problem: Problem, part: Slots, into: _Slots, rows: _Rows, blocks: Iterable[slice]
) -> _Rows:
    """Return rows of which the large ones are measured from their largest score."""
    state = start(part, rows.q)
    for keys in blocks:
        online_update(state, scores(problem, part, rows.q, rows.at, keys)[0])
    own = state.row_max + np.log(state.row_sum)
    chosen = is_large(rows.lse) & is_same(rows.lse, own)
    weight = np.where(chosen, 1 / state.row_sum, 1).astype(own.dtype)
    if into.sink_weights is not None:
        shares = np.exp(part.sinks[..., None] - state.row_max) * weight  # type: ignore[index]
        np.copyto(into.sink_weights[..., rows.at], shares, where=chosen)
    return rows._replace(
        dout=rows.dout * weight[..., None],
        lse=np.where(chosen, state.row_max, rows.lse),
        delta=rows.delta * weight,
    )


def _differentiate_rows(
    problem: Problem, part: Slots, into: _Slots, at: slice, block_n: int
) -> None:
    """Run the rows `at` of every slot against the key blocks that they see."""
    rows = _rows(problem, part, into, at)
    i = np.arange(at.start, at.stop)
    row_keys = None
    if part.dropout_keys is not None:
        row_keys = dropout.chained(part.dropout_keys[..., None], i)
    first, stop = problem.key_range(i)
    seen = slice(int(first.min()), int(stop.max()))
    blocks = list(key_blocks(problem, part.places, at, seen, block_n))
    if not is_ordinary(rows.lse):
        rows = _normalised(problem, part, into, rows, blocks)
    dq = np.zeros_like(rows.q)
    for keys in blocks:
        dq += _differentiate_block(problem, part, into, rows, keys, row_keys)
    dq *= problem.scale
    add_to(into.dq[..., at, :], dq)


def _differentiate_block(
    problem: Problem,
    part: Slots,
    into: _Slots,
    rows: _Rows,
    keys: slice,
    row_keys: np.ndarray | None,
) -> np.ndarray:
    """Add what these rows and keys give to all but dq; return what dq is to be scaled from."""
    s = products(problem, part, rows.q, keys)
    slopes = score_slopes(problem, part.places, s, _range(rows.at), _range(keys))
    hidden = complete(problem, part, s, rows.at, keys)
    p = np.exp(s - rows.lse[..., None])
    v = block(part.v[..., :1, keys, :], p.dtype)
    ds = rows.dout @ v.swapaxes(-1, -2)  # dp, until delta is taken from it
    kept_p = p
    if row_keys is not None:
        keep = dropout.kept(row_keys, _range(keys) + problem.keys_before, problem.dropout_p)
        factor = keep * p.dtype.type(dropout.factor(problem.dropout_p))
        kept_p = p * factor
        ds = np.where(keep, ds * factor, 0)
    ds -= rows.delta[..., None]
    ds *= p
    if hidden is not None:
        for a in (ds, kept_p) if slopes is None else (ds, kept_p, slopes):
            np.copyto(a, 0, where=hidden)  # also where p, v or k is NaN
    add_to(into.dv[..., keys, :], kept_p.swapaxes(-1, -2) @ rows.dout)
    if into.dbias is not None:
        add_to(into.dbias[..., rows.at, keys], ds)
    if into.dalibi is not None:
        distance = distances(problem, _range(rows.at), _range(keys), ds.dtype)
        add_to(into.dalibi, -(ds * distance).sum(axis=(-2, -1)))
    if slopes is not None:
        ds *= slopes
    # Scaled here, and not at the end, as dk is shared by all rows.
    add_to(into.dk[..., keys, :], (ds.swapaxes(-1, -2) @ rows.q) * ds.dtype.type(problem.scale))
    # A key that is no number has made the rows that see it NaN through lse.
    k = block(part.k[..., :1, keys, :], ds.dtype)
    return ds @ np.where(np.isfinite(k), k, 0)


def _range(at: slice) -> np.ndarray:
    return np.arange(at.start, at.stop)
