"""The row update of the online softmax, and the merge of two partial results. Base 2 throughout.

Source: Dao 2023, FlashAttention-2, arXiv:2307.08691, algorithm 1; Milakov and Gimelshein 2018,
arXiv:1805.02867.
"""

from __future__ import annotations

import functools

import numpy as np

from .random import kept
from .registers import jit
from .simd import operations

# The reference that exponents are measured from lags behind the maximum by at most this much (base
# 2): p stays below 2**8, which costs no digit, and after a row's first keys it hardly ever moves
# (1024 keys, causal: 1.38 -> 1.31 of the ideal time).
SLACK = 8.0


@functools.cache
def row_top(dtype: str, lanes: int):
    """Kernel: the largest of s in [start, stop), multiples of lanes."""
    simd = operations(dtype, lanes)
    load, vmax, reduce_max = simd.load, simd.vmax, simd.reduce_max

    @jit
    def run(s, start, stop):
        top = load(s, start)
        for n in range(start + lanes, stop, lanes):
            top = vmax(load(s, n), top)
        return reduce_max(top)

    return run


@functools.cache
def weigh_fours(dtype: str, lanes: int):
    """Kernel: the loop of row_update() on four registers at a time, as far as they go (0.94 of the
    softmax's time on AVX2, whole calls 0.98 to 0.99 on AVX-512 of Zen 5).

    Returns (n, total, other), n where it stopped.
    """
    simd = operations(dtype, lanes)
    load, store, exp2_of_some, where = simd.load, simd.store, simd.exp2_of_some, simd.where
    scalar = getattr(np, dtype)
    neg_inf, hidden = scalar(-np.inf), scalar(-0.0)

    @jit
    def run(s, n, stop, factor, reference, total, other, exclude):
        while n + 4 * lanes <= stop:
            one, two, three = n + lanes, n + 2 * lanes, n + 3 * lanes
            a, b, c, d = load(s, n), load(s, one), load(s, two), load(s, three)
            x, y, z, w = a * factor, b * factor, c * factor, d * factor
            x, y, z, w = x - reference, y - reference, z - reference, w - reference
            x, y, z, w = exp2_of_some((x, y, z, w))
            if exclude:
                x, y = where(a == neg_inf, hidden, x), where(b == neg_inf, hidden, y)
                z, w = where(c == neg_inf, hidden, z), where(d == neg_inf, hidden, w)
            store(s, n, x)
            store(s, one, y)
            store(s, two, z)
            store(s, three, w)
            total, other = total + x + z, other + y + w
            n += 4 * lanes
        return n, total, other

    return run


@functools.cache
def row_update(dtype: str, lanes: int):
    """Kernel: fold one row of scores into its running softmax.

    s    (stop,) products q·k in [start, stop), start a multiple of 2 * lanes, stop of lanes; they
         become p
    top  the largest of them
    scale  >= 0, takes them to base-2 logits. Rounded before the reference is subtracted, so that
           the largest weighs exactly 1 and a row that sees one key returns its value to the bit.
    acc  (acc_stride,) running output, rescaled when the reference moves
    row_max, row_sum  pointers to the row's state: the reference, at most SLACK below the maximum,
                      and the sum
    exclude  p of -inf becomes -0.0, which marks the key as excluded (see careful_product)
    """
    simd = operations(dtype, lanes)
    load, store, splat, exp2, where = simd.load, simd.store, simd.splat, simd.exp2, simd.where
    reduce_max, reduce_add = simd.reduce_max, simd.reduce_add
    fours = weigh_fours(dtype, lanes)
    scalar = getattr(np, dtype)
    neg_inf, slack = scalar(-np.inf), scalar(SLACK)

    @jit
    def run(s, start, stop, top, scale, acc, acc_stride, row_max, row_sum, exclude):
        old_max, new_max = row_max[0], top * scale
        if new_max > old_max + slack:
            row_max[0] = new_max
            if old_max > neg_inf:  # else acc and sum are still 0
                alpha = exp2(splat(old_max - new_max))
                row_sum[0] = reduce_max(alpha) * row_sum[0]
                for d in range(0, acc_stride, lanes):
                    store(acc, d, load(acc, d) * alpha)
        # exp2(-inf - -inf) would be NaN: while nothing is visible, measure from 0
        reference = splat(scalar(0) if row_max[0] == neg_inf else row_max[0])
        factor = splat(scale)
        total = splat(scalar(0))
        other = splat(scalar(0))
        n, total, other = fours(s, start, stop, factor, reference, total, other, exclude)
        while n + 2 * lanes <= stop:
            x, y = load(s, n), load(s, n + lanes)
            p, r = exp2(x * factor - reference), exp2(y * factor - reference)
            if exclude:
                p, r = where(x == neg_inf, scalar(-0.0), p), where(y == neg_inf, scalar(-0.0), r)
            store(s, n, p)
            store(s, n + lanes, r)
            total, other = total + p, other + r
            n += 2 * lanes
        if n < stop:
            x = load(s, n)
            p = exp2(x * factor - reference)
            if exclude:
                p = where(x == neg_inf, scalar(-0.0), p)
            store(s, n, p)
            total = total + p
        row_sum[0] += reduce_add(total + other)

    return run


@functools.cache
def drop_row(dtype: str, lanes: int):
    """Kernel: dropout on one row of p, [start, stop), after it went into the sum.

    A dropped p becomes 0, or stays -0.0 where the key is excluded.

    first_j  key index, from kv_start, of s[0]
    key, threshold  as random.kept() wants them
    """
    simd = operations(dtype, lanes)
    load, store, where, keep = simd.load, simd.store, simd.where, kept(dtype, lanes)
    zero = getattr(np, dtype)(0)

    @jit
    def run(s, start, stop, first_j, key, threshold):
        for n in range(start, stop, lanes):
            p = load(s, n)
            store(s, n, where(keep(key, first_j + n, threshold), p, p * zero))

    return run


@functools.cache
def merge(dtype: str, lanes: int):
    """Kernel: fold a later partial result of one row into an earlier one; both stay unnormalised.

    acc, row_max, row_sum        the earlier keys; overwritten with the union
    part, part_max, part_sum     the later keys. A part that saw nothing (maximum -inf, sum 0)
                                 changes no bit.
    """
    simd = operations(dtype, lanes)
    load, store, splat, exp2, fma, first = (
        simd.load,
        simd.store,
        simd.splat,
        simd.exp2,
        simd.fma,
        simd.reduce_max,
    )
    scalar = getattr(np, dtype)
    neg_inf = scalar(-np.inf)

    @jit
    def run(acc, row_max, row_sum, part, part_max, part_sum, acc_stride):
        new_max = max(row_max[0], part_max)
        reference = splat(scalar(0) if new_max == neg_inf else new_max)
        alpha, beta = exp2(splat(row_max[0]) - reference), exp2(splat(part_max) - reference)
        for d in range(0, acc_stride, lanes):
            store(acc, d, fma(load(part, d), beta, load(acc, d) * alpha))
        row_sum[0] = row_sum[0] * first(alpha) + part_sum * first(beta)
        row_max[0] = new_max

    return run
