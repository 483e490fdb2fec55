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

    Returns (n, total, other, high), n where it stopped, high the largest of `ahead` in each lane:
    amid the exponentials its steps cost next to nothing, in a loop of their own as much as these
    (softmax of 256 keys 0.107 -> 0.097 ns a score on AVX-512, 0.204 -> 0.185 on AVX2).
    """
    simd = operations(dtype, lanes)
    load, store, vmax, exp2_of_some = simd.load, simd.store, simd.vmax, simd.exp2_of_some

    @jit
    def run(s, ahead, n, stop, factor, reference, total, other, high):
        while n + 4 * lanes <= stop:
            one, two, three = n + lanes, n + 2 * lanes, n + 3 * lanes
            a, b, c, d = load(s, n), load(s, one), load(s, two), load(s, three)
            x, y, z, w = a * factor, b * factor, c * factor, d * factor
            x, y, z, w = x - reference, y - reference, z - reference, w - reference
            high = vmax(load(ahead, one), vmax(load(ahead, n), high))
            x, y, z, w = exp2_of_some((x, y, z, w))
            high = vmax(load(ahead, three), vmax(load(ahead, two), high))
            store(s, n, x)
            store(s, one, y)
            store(s, two, z)
            store(s, three, w)
            total, other = total + x + z, other + y + w
            n += 4 * lanes
        return n, total, other, high

    return run


@functools.cache
def row_update(dtype: str, lanes: int):
    """Kernel: fold one row of scores into its running softmax; return the largest of another row.

    s    (stop,) products q·k in [start, stop), start a multiple of 2 * lanes, stop of lanes; they
         become p
    ahead  the other row, one that is yet to come; s where there is none
    top  the largest of s
    scale  >= 0, takes them to base-2 logits. Rounded before the reference is subtracted, so that
           the largest weighs exactly 1 and a row that sees one key returns its value to the bit.
    acc  (acc_stride,) running output, rescaled when the reference moves
    row_max, row_sum  pointers to the row's state: the reference, at most SLACK below the maximum,
                      and the sum
    exclude  p of -inf becomes -0.0, which marks the key as excluded (see careful_product)
    """
    simd = operations(dtype, lanes)
    load, store, splat, exp2, where = simd.load, simd.store, simd.splat, simd.exp2, simd.where
    reduce_max, reduce_add, vmax = simd.reduce_max, simd.reduce_add, simd.vmax
    fours = weigh_fours(dtype, lanes)
    scalar = getattr(np, dtype)
    neg_inf, slack = scalar(-np.inf), scalar(SLACK)
    lowest = scalar(np.finfo(dtype).min)

    @jit
    def run(s, ahead, start, stop, top, scale, acc, acc_stride, row_max, row_sum, exclude):
        old_max, new_max = row_max[0], top * scale
        latest = old_max  # in a register: read back, it would come 10 cycles later
        if new_max > old_max + slack:
            row_max[0] = latest = new_max
            if old_max > neg_inf:  # else acc and sum are still 0
                alpha = exp2(splat(old_max - new_max))
                row_sum[0] = reduce_max(alpha) * row_sum[0]
                for d in range(0, acc_stride, lanes):
                    store(acc, d, load(acc, d) * alpha)
        # exp2(-inf - -inf) would be NaN: while nothing is visible, measure from the lowest number
        reference = splat(max(latest, lowest))
        factor = splat(scale)
        total, other, high = splat(scalar(0)), splat(scalar(0)), splat(neg_inf)
        n = start
        if not exclude:
            n, total, other, high = fours(s, ahead, n, stop, factor, reference, total, other, high)
        while n < stop:
            x = load(s, n)
            p = exp2(x * factor - reference)
            if exclude:
                p = where(x == neg_inf, scalar(-0.0), p)
            high = vmax(load(ahead, n), high)
            store(s, n, p)
            total, other = other, total + p  # in turns, as in fours()
            n += lanes
        row_sum[0] += reduce_add(total + other)
        return reduce_max(high)

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
