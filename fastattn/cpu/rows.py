"""Query rows in, finished rows out: what a work item does before its first key and after its last.

The rows that share a key head are ordered (query, head in group): row = query * group + head.
"""

from __future__ import annotations

import functools

import numpy as np

from ..problem import Variant
from .fields import BATCH, FIRST_QUERY, HEAD, batch_offset, field, next_row
from .job import LINE, LOG2_E
from .memory import at, element_loader, element_storer, pointer_to, prefetch
from .microkernel import ROWS_AHEAD
from .registers import ITEMSIZE, jit
from .simd import operations


@functools.cache
def pack_q(variant: Variant, lanes: int):
    """Kernel: `count` rows as (count, head_dim) of dtype, times the sign of the scale.

    With the sign in q, the largest product is the largest score.
    """
    dtype, storage = variant.dtype, variant.storage
    simd = operations(dtype, lanes)
    load, store, element = simd.loader(storage), simd.store, element_loader(storage, dtype)
    scalar, stored = getattr(np, dtype), pointer_to(storage)
    line = LINE // ITEMSIZE[storage]

    @jit
    def run(job, item, row, count, q_rows):
        head_dim, group = field(job, "head_dim"), field(job, "group")
        sign = scalar(field(job, "q_sign"))
        base = batch_offset(field(job, "q_table"), field(job, "q_batch"), item[BATCH])
        base += item[FIRST_QUERY] * field(job, "q_row")
        col = field(job, "q_col")
        whole = head_dim // lanes * lanes if col == 1 else 0
        ahead = (ROWS_AHEAD + group - 1) // group * field(job, "q_row")
        i, r = row // group, row % group
        for m in range(count):
            h = item[HEAD] * group + r
            place = base + h * field(job, "q_head") + i * field(job, "q_row")
            q, to = at(stored(field(job, "q")), place), at(q_rows, m * head_dim)
            for d in range(0, whole, line):
                prefetch(q, ahead + d)
            for d in range(0, whole, lanes):
                store(to, d, load(q, d) * sign)
            for d in range(whole, head_dim):
                to[d] = element(q, d * col) * sign
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
def add_sink(dtype: str, lanes: int):
    """Kernel: let a sink, one more score without a value, take part in a finished row's softmax.

    It takes part in the maximum: added at the end alone, a large one would overflow.
    """
    simd = operations(dtype, lanes)
    load, store, splat, exp2, first = (
        simd.load,
        simd.store,
        simd.splat,
        simd.exp2,
        simd.reduce_max,
    )
    scalar = getattr(np, dtype)
    neg_inf, largest = scalar(-np.inf), scalar(np.finfo(dtype).max)

    @jit
    def run(sink, acc, row_max, row_sum, acc_stride):
        base_2 = sink * scalar(LOG2_E)
        if abs(sink) <= largest:  # what is finite must stay so in base 2
            base_2 = min(max(base_2, -largest), largest)
        new_max = max(row_max[0], base_2)
        reference = splat(scalar(0) if new_max == neg_inf else new_max)
        alpha, weight = exp2(splat(row_max[0]) - reference), exp2(splat(base_2) - reference)
        for d in range(0, acc_stride, lanes):
            store(acc, d, load(acc, d) * alpha)
        row_sum[0] = row_sum[0] * first(alpha) + first(weight)
        row_max[0] = new_max

    return run


@functools.cache
def write_rows(variant: Variant, lanes: int):
    """Kernel: normalise `count` finished rows and write out and lse."""
    dtype, storage = variant.dtype, variant.storage
    simd = operations(dtype, lanes)
    load, store, element = simd.load, simd.storer(storage), element_storer(storage, dtype)
    scalar, real, stored = getattr(np, dtype), pointer_to(dtype), pointer_to(storage)
    sink = add_sink(dtype, lanes)

    @jit
    def run(job, item, row, count, acc, row_max, row_sum):
        group = field(job, "group")
        head_dim_v, acc_stride = field(job, "head_dim_v"), field(job, "acc_stride")
        base = batch_offset(field(job, "out_table"), field(job, "out_batch"), item[BATCH])
        base += item[FIRST_QUERY] * field(job, "out_row")
        col = field(job, "out_col")
        whole = head_dim_v // lanes * lanes if col == 1 else 0
        i, r = row // group, row % group
        for m in range(count):
            h = item[HEAD] * group + r
            of = at(acc, m * acc_stride)
            if field(job, "sinks") != 0:
                score = real(field(job, "sinks"))[h]
                sink(score, of, at(row_max, m), at(row_sum, m), acc_stride)
            # Exactly 0: a row that saw nothing, whose acc is 0. A NaN is not swallowed.
            total = row_sum[m]
            divisor = scalar(1) if total == scalar(0) else total
            place = base + h * field(job, "out_head") + i * field(job, "out_row")
            out = at(stored(field(job, "out")), place)
            factor = scalar(field(job, "dropout_factor"))
            for d in range(0, whole, lanes):
                store(out, d, load(of, d) / divisor * factor)
            for d in range(whole, head_dim_v):
                element(out, d * col, of[d] / divisor * factor)
            if field(job, "lse") != 0:
                place = item[BATCH] * field(job, "lse_batch") + h * field(job, "lse_head")
                state = at(real(field(job, "lse")), 2 * (place + item[FIRST_QUERY] + i))
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
    def run(job, item, row, count, split, acc, row_max, row_sum):
        acc_stride, num_splits = field(job, "acc_stride"), field(job, "num_splits")
        first = (item[BATCH] * field(job, "heads_kv") + item[HEAD]) * field(job, "rows") + row
        for m in range(count):
            place = ((first + m) * num_splits + split) * (acc_stride + 2)
            to = at(real(field(job, "partial")), place)
            for d in range(0, acc_stride, lanes):
                store(to, d, load(acc, m * acc_stride + d))
            to[acc_stride] = row_max[m]
            to[acc_stride + 1] = row_sum[m]

    return run
