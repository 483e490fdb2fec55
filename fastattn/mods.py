"""Score and mask modifiers, and the words they are written in.

A modifier is a plain function, written once and run by every backend:

    score_mod(score, b, h, i, j, aux) -> score     after scale and softcap, before mask and softmax
    mask_mod(b, h, i, j, aux) -> bool              True where query i may attend to key j

b is the batch, h the query head, i the query row and j the key row. As in FlexAttention, i and j
are the places in the arrays, counted from 0 on both sides: where the queries are the last rows of a
longer sequence, the position of query i is i plus an offset (`causal=True` and `window` of
attention() know it; a modifier can take it from aux). `aux` is a tuple of arrays and numbers, given
with the call, which a modifier indexes by b, h, i, j or anything computed from them. An index
outside its array reads the nearest element.

A modifier may use operators and the functions below, or NumPy's ufuncs of the same names; no `if`
on its arguments, since they may be many at once: that is what where() is for. Python runs it once
with stand-ins to see what it does, so helpers, closures and loops over constants are free. Numbers
that it closes over are constants of the compiled kernel, and if they change later, the same
function does not see it: pass what changes from call to call in aux.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .arguments import count
from .trace import apply

__all__ = [
    "abs",
    "alibi",
    "and_masks",
    "causal",
    "dilated_window",
    "document_mask",
    "exp",
    "floor",
    "log",
    "logical_not",
    "maximum",
    "minimum",
    "or_masks",
    "prefix_lm",
    "relative_bias",
    "sliding_window",
    "softcap",
    "sqrt",
    "t5_bias",
    "t5_buckets",
    "t5_table",
    "tanh",
    "where",
]

MaskMod = Callable[..., Any]
ScoreMod = Callable[..., Any]

# The vocabulary. On arrays and numbers these are NumPy's functions of the same names.


def abs(x: Any) -> Any:
    """Return |x|."""
    return apply("abs", x)


def exp(x: Any) -> Any:
    """Return e ** x."""
    return apply("exp", x)


def floor(x: Any) -> Any:
    """Return the largest integer that is at most x, as a float."""
    return apply("floor", x)


def log(x: Any) -> Any:
    """Return the natural logarithm: -inf at 0, NaN below."""
    return apply("log", x)


def logical_not(x: Any) -> Any:
    """Return True where x is False or 0."""
    return apply("logical_not", x)


def maximum(x: Any, y: Any) -> Any:
    """Return the larger one; NaN where either is NaN."""
    return apply("maximum", x, y)


def minimum(x: Any, y: Any) -> Any:
    """Return the smaller one; NaN where either is NaN."""
    return apply("minimum", x, y)


def sqrt(x: Any) -> Any:
    """Return the square root; NaN below 0."""
    return apply("sqrt", x)


def tanh(x: Any) -> Any:
    """Return the hyperbolic tangent."""
    return apply("tanh", x)


def where(condition: Any, x: Any, y: Any) -> Any:
    """Return x where the condition holds, else y."""
    return apply("where", condition, x, y)


# Ready-made mask modifiers.


def causal(b: Any, h: Any, i: Any, j: Any, aux: tuple) -> Any:
    """j <= i: a row sees the keys up to its own place, counted from the first (top-left)."""
    return j <= i


def sliding_window(left: int | None, right: int | None) -> MaskMod:
    """i - left <= j <= i + right; None is unlimited.

    Source: Beltagy et al. 2020, Longformer, arXiv:2004.05150, section 3.1.
    """
    _check_radii(left, right)

    def sliding_window(b: Any, h: Any, i: Any, j: Any, aux: tuple) -> Any:
        return _inside(j - i, left, right)

    return sliding_window


def dilated_window(left: int | None, right: int | None, dilation: int) -> MaskMod:
    """Every dilation-th key: (j - i) % dilation == 0, `left` of them before and `right` after i.

    Source: Beltagy et al. 2020, Longformer, arXiv:2004.05150, section 3.1.
    """
    _check_radii(left, right)
    count("dilation", dilation, 1)
    before = None if left is None else left * dilation
    after = None if right is None else right * dilation

    def dilated_window(b: Any, h: Any, i: Any, j: Any, aux: tuple) -> Any:
        return _inside(j - i, before, after) & ((j - i) % dilation == 0)

    return dilated_window


def prefix_lm(length: int | None = None, *, slot: int = 0) -> MaskMod:
    """j <= i or j < length: causal, but the first `length` keys are seen by all rows.

    With length None, the lengths are aux[slot]: an integer, or (batch,) integers.

    Source: Raffel et al. 2020, T5, arXiv:1910.10683, section 3.2.1 ("causal with prefix").
    """

    def prefix_lm(b: Any, h: Any, i: Any, j: Any, aux: tuple) -> Any:
        if length is not None:
            return (j <= i) | (j < length)
        lengths = aux[slot]
        return (j <= i) | (j < (lengths[b] if np.ndim(lengths) else lengths))

    return prefix_lm


def document_mask(*, query: int = 0, key: int | None = None) -> MaskMod:
    """ids[i] == ids[j]: rows see the keys of their own document.

    aux[query] holds an integer for each query row, (seqlen_q,) or (batch, seqlen_q), and aux[key],
    by default the same array, for each key.

    Source: Krell et al. 2021, arXiv:2107.02027, section 3.2.2 (packed sequences).
    """
    key = query if key is None else key

    def document_mask(b: Any, h: Any, i: Any, j: Any, aux: tuple) -> Any:
        ids_q, ids_k = aux[query], aux[key]
        mine = ids_q[b, i] if ids_q.ndim == 2 else ids_q[i]
        return mine == (ids_k[b, j] if ids_k.ndim == 2 else ids_k[j])

    return document_mask


def and_masks(*masks: MaskMod) -> MaskMod:
    """A key is visible where all masks say so; without any, everywhere."""

    def and_masks(b: Any, h: Any, i: Any, j: Any, aux: tuple) -> Any:
        visible = j == j
        for mask in masks:
            visible = visible & mask(b, h, i, j, aux)
        return visible

    return and_masks


def or_masks(*masks: MaskMod) -> MaskMod:
    """A key is visible where any mask says so; without any, nowhere."""

    def or_masks(b: Any, h: Any, i: Any, j: Any, aux: tuple) -> Any:
        visible = j != j
        for mask in masks:
            visible = visible | mask(b, h, i, j, aux)
        return visible

    return or_masks


def _inside(distance: Any, left: int | None, right: int | None) -> Any:
    """-left <= distance <= right, None unlimited."""
    if left is None:
        return distance == distance if right is None else distance <= right
    return distance >= -left if right is None else (distance >= -left) & (distance <= right)


def _check_radii(left: int | None, right: int | None) -> None:
    for name, radius in (("left", left), ("right", right)):
        if radius is not None:
            count(name, radius, 0)


# Ready-made score modifiers.


def softcap(cap: float) -> ScoreMod:
    """cap * tanh(score / cap): scores stay within (-cap, cap).

    Source: Gemma Team 2024, Gemma 2, arXiv:2408.00118, section 2 ("logit soft-capping").
    """
    if not 0 < cap < float("inf"):
        raise ValueError(f"cap must be positive and finite, got {cap}")
    inverse = 1.0 / cap  # a division of registers costs as much as the tanh

    def softcap(score: Any, b: Any, h: Any, i: Any, j: Any, aux: tuple) -> Any:
        return cap * tanh(score * inverse)

    return softcap


def alibi(*, slot: int = 0) -> ScoreMod:
    """score - slope * |i - j|, the slopes in aux[slot]: (heads_q,) or (batch, heads_q) floats.

    Source: Press et al. 2022, ALiBi, arXiv:2108.12409, section 3.
    """

    def alibi(score: Any, b: Any, h: Any, i: Any, j: Any, aux: tuple) -> Any:
        slopes = aux[slot]
        return score - (slopes[b, h] if slopes.ndim == 2 else slopes[h]) * abs(i - j)

    return alibi


def relative_bias(*, table: int = 0, zero: int = 1) -> ScoreMod:
    """score + bias[h, j - i + zero]: a learned bias for each head and distance.

    aux[table] is (heads_q, distances), aux[zero] the integer place of distance 0 in a row of it.

    Source: Shaw et al. 2018, arXiv:1803.02155, section 3.2, in the scalar form of T5.
    """

    def relative_bias(score: Any, b: Any, h: Any, i: Any, j: Any, aux: tuple) -> Any:
        return score + aux[table][h, j - i + aux[zero]]

    return relative_bias


def t5_bias(*, table: int = 0, zero: int = 1) -> ScoreMod:
    """score + weight[bucket(j - i), h]: aux[table] and aux[zero] are what t5_table() returns.

    Source: Raffel et al. 2020, T5, arXiv:1910.10683, section 2.1.
    """
    return relative_bias(table=table, zero=zero)


def t5_table(
    weight: np.ndarray,
    seqlen_q: int,
    seqlen_k: int,
    *,
    bidirectional: bool = True,
    max_distance: int = 128,
    offset: int | None = None,
) -> tuple[np.ndarray, int]:
    """Return the aux of t5_bias(): the bias of every distance, and the place of distance 0.

    Parameters
    ----------
    weight : (num_buckets, heads) float
        T5's relative_attention_bias.
    bidirectional : bool
        Half of the buckets are for keys after the query (encoders); else those share bucket 0.
    max_distance : int
        Distances from here on share the last bucket.
    offset : int
        Position of query 0 among the keys. Default seqlen_k - seqlen_q.

    Returns
    -------
    table : (heads, seqlen_q + seqlen_k - 1), dtype of weight
    zero : int, such that table[h, j - i + zero] is the bias of query i and key j
    """
    offset = seqlen_k - seqlen_q if offset is None else offset
    distance = np.arange(-(offset + seqlen_q - 1), seqlen_k - offset)
    buckets = t5_buckets(distance, len(weight), bidirectional, max_distance)
    return np.ascontiguousarray(np.asarray(weight)[buckets].T), seqlen_q - 1


def t5_buckets(
    distance: np.ndarray, num_buckets: int, bidirectional: bool = True, max_distance: int = 128
) -> np.ndarray:
    """Return T5's bucket, int64, of each distance j - i.

    Half of the buckets of a side hold one distance each, the others grow with its logarithm, which
    is taken in float32 as T5 does: in float64 some distances would fall into another bucket.
    """
    if bidirectional:
        num_buckets //= 2
        first = np.where(distance > 0, num_buckets, 0)
        distance = np.abs(distance)
    else:
        first = np.zeros_like(distance)
        distance = np.maximum(-distance, 0)
    exact = num_buckets // 2
    ratio = np.log(np.maximum(distance, 1).astype(np.float32) / np.float32(exact))
    share = ratio / np.float32(np.log(max_distance / exact)) * np.float32(num_buckets - exact)
    far = np.minimum(exact + share.astype(np.int64), num_buckets - 1)
    return first + np.where(distance < exact, distance, far)
