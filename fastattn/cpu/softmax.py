"""The row update of the online softmax, and the merge of two partial results. Base 2 throughout.

Source: Dao 2023, FlashAttention-2, arXiv:2307.08691, algorithm 1; Milakov and Gimelshein 2018, arXiv:1805.02867.
"""

from __future__ import annotations

import functools

import numpy as np

from .simd import jit, operations


@functools.cache
def row_update(dtype: str, lanes: int, nv: int):
    """Kernel: fold one row of scores into its running softmax.

    s    (stop,) base-2 logits in [start, stop), multiples of lanes and start of nr = nv * lanes; they become p
    acc  (acc_stride,) running output, rescaled when the maximum moved
    row_max, row_sum  pointers to the row's state
    exclude  p of -inf becomes -0.0, which marks the key as excluded (see careful_product)
    """
    simd = operations(dtype, lanes)
    load, store, splat, exp2, where = simd.load, simd.store, simd.splat, simd.exp2, simd.where
    vmax, reduce_max, reduce_add = simd.vmax, simd.reduce_max, simd.reduce_add
    scalar = getattr(np, dtype)
    nr = nv * lanes
    neg_inf = scalar(-np.inf)

    @jit
    def run(s, start, stop, acc, acc_stride, row_max, row_sum, exclude):
        top = load(s, start)
        for n in range(start + lanes, stop, lanes):
            top = vmax(load(s, n), top)
        old_max = row_max[0]
        new_max = max(old_max, reduce_max(top))
        # exp2(-inf - -inf) would be NaN: while nothing is visible, measure from 0
        reference = splat(scalar(0) if new_max == neg_inf else new_max)
        total = splat(scalar(0))
        other = splat(scalar(0))
        n = start
        while n + 2 * lanes <= stop:
            x, y = load(s, n), load(s, n + lanes)
            p, r = exp2(x - reference), exp2(y - reference)
            if exclude:
                p, r = where(x == neg_inf, scalar(-0.0), p), where(y == neg_inf, scalar(-0.0), r)
            store(s, n, p)
            store(s, n + lanes, r)
            total, other = total + p, other + r
            n += 2 * lanes
        if n < stop:
            x = load(s, n)
            p = exp2(x - reference)
            if exclude:
                p = where(x == neg_inf, scalar(-0.0), p)
            store(s, n, p)
            total = total + p
        if new_max > old_max:
            alpha = exp2(splat(old_max) - reference)
            row_sum[0] = reduce_max(alpha) * row_sum[0]
            for d in range(0, acc_stride, lanes):
                store(acc, d, load(acc, d) * alpha)
            row_max[0] = new_max
        row_sum[0] += reduce_add(total + other)

    return run


@functools.cache
def merge(dtype: str, lanes: int):
    """Kernel: fold a later partial result of one row into an earlier one; both stay unnormalised.

    acc, row_max, row_sum        the earlier keys; overwritten with the union
    part, part_max, part_sum     the later keys. A part that saw nothing (maximum -inf, sum 0) changes no bit.
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
