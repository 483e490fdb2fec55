"""Query rows in, finished rows out: what a work item does before its first key and after its last.

The rows that share a key head are ordered (query, head in group): row = query * group + head.
"""

from __future__ import annotations

import functools

import numpy as np

from .fields import batch_offset, field, next_row
from .simd import at, jit, operations, pointer_to


@functools.cache
def pack_q(dtype: str, lanes: int):
    """Kernel: `count` rows as (count, head_dim), times the sign of the scale.

    With the sign in q, the largest product is the largest score.
    """
    simd = operations(dtype, lanes)
    load, store = simd.load, simd.store
    scalar, real = getattr(np, dtype), pointer_to(dtype)

    @jit
    def run(job, b, g, row, count, q_rows):
        head_dim, group = field(job, "head_dim"), field(job, "group")
        sign = scalar(field(job, "q_sign"))
        start = batch_offset(field(job, "q_table"), field(job, "q_batch"), b)
        base = at(real(field(job, "q")), start)
        col = field(job, "q_col")
        whole = head_dim // lanes * lanes if col == 1 else 0
        i, r = row // group, row % group
        for m in range(count):
            q = at(base, (g * group + r) * field(job, "q_head") + i * field(job, "q_row"))
            to = at(q_rows, m * head_dim)
            for d in range(0, whole, lanes):
                store(to, d, load(q, d) * sign)
            for d in range(whole, head_dim):
                to[d] = q[d * col] * sign
            i, r = next_row(i, r, group)

    return run


@functools.cache
def clear(dtype: str, lanes: int):
    """Kernel: the state of `count` rows that have seen nothing."""
    simd = operations(dtype, lanes)
    store, splat = simd.store, simd.splat
    scalar = getattr(np, dtype)
    neg_inf = scalar(-np.inf)

    @jit
    def run(acc, row_max, row_sum, count, acc_stride):
        zero = splat(scalar(0))
        for d in range(0, count * acc_stride, lanes):
            store(acc, d, zero)
        for m in range(count):
            row_max[m] = neg_inf
            row_sum[m] = scalar(0)

    return run


@functools.cache
def write_rows(dtype: str, lanes: int):
    """Kernel: normalise `count` finished rows and write out and lse."""
    simd = operations(dtype, lanes)
    load, store = simd.load, simd.store
    scalar, real = getattr(np, dtype), pointer_to(dtype)

    @jit
    def run(job, b, g, row, count, acc, row_max, row_sum):
        group, heads_kv = field(job, "group"), field(job, "heads_kv")
        head_dim_v, acc_stride = field(job, "head_dim_v"), field(job, "acc_stride")
        start = batch_offset(field(job, "out_table"), field(job, "out_batch"), b)
        base = at(real(field(job, "out")), start)
        col = field(job, "out_col")
        whole = head_dim_v // lanes * lanes if col == 1 else 0
        seqlen_q = field(job, "rows") // group
        i, r = row // group, row % group
        for m in range(count):
            h = g * group + r
            out = at(base, h * field(job, "out_head") + i * field(job, "out_row"))
            total = row_sum[m]
            # Exactly 0: a row that saw nothing, whose acc is 0. A NaN is not swallowed.
            divisor = scalar(1) if total == scalar(0) else total
            of = at(acc, m * acc_stride)
            for d in range(0, whole, lanes):
                store(out, d, load(of, d) / divisor)
            for d in range(whole, head_dim_v):
                out[d * col] = of[d] / divisor
            if field(job, "lse") != 0:
                place = (b * heads_kv * group + h) * seqlen_q + i
                state = at(real(field(job, "lse")), 2 * place)
                state[0] = row_max[m]
                state[1] = total
            i, r = next_row(i, r, group)

    return run


@functools.cache
def keep_partial(dtype: str, lanes: int):
    """Kernel: leave one split's rows, not normalised, for combine()."""
    simd = operations(dtype, lanes)
    load, store, real = simd.load, simd.store, pointer_to(dtype)

    @jit
    def run(job, b, g, row, count, split, acc, row_max, row_sum):
        acc_stride, num_splits = field(job, "acc_stride"), field(job, "num_splits")
        first = (b * field(job, "heads_kv") + g) * field(job, "rows") + row
        for m in range(count):
            place = ((first + m) * num_splits + split) * (acc_stride + 2)
            to = at(real(field(job, "partial")), place)
            for d in range(0, acc_stride, lanes):
                store(to, d, load(acc, m * acc_stride + d))
            to[acc_stride] = row_max[m]
            to[acc_stride + 1] = row_sum[m]

    return run
