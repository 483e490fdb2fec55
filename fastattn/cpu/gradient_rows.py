"""What the gradients' kernel reads and writes: rows of queries and of keys.

Rows are ordered (query, head in group), as in rows.py.
"""

from __future__ import annotations

import functools

import numpy as np

from ..problem import Variant
from .fields import BATCH, FIRST_KEY, FIRST_QUERY, HEAD, batch_offset, field, next_row
from .job import LOG2_E
from .memory import at, element_loader, pointer_to
from .registers import jit
from .simd import operations


@functools.cache
def copy_row(variant: Variant, lanes: int):
    """Kernel: one row as dtype, times `sign`, with zeros up to a whole register.

    Returns 0 if all of it is finite, else NaN.
    """
    dtype, storage = variant.dtype, variant.storage
    simd = operations(dtype, lanes)
    load_stored, load, store, fma = simd.loader(storage), simd.load, simd.store, simd.fma
    splat, reduce_add, element = simd.splat, simd.reduce_add, element_loader(storage, dtype)
    scalar = getattr(np, dtype)

    @jit
    def run(x, col, dim, sign, to):
        zero = splat(scalar(0))
        check = zero  # 0 * inf and 0 * NaN are NaN
        whole = dim // lanes * lanes if col == 1 else 0
        for d in range(0, whole, lanes):
            value = load_stored(x, d)
            store(to, d, value * sign)
            check = fma(value, zero, check)
        for d in range(whole, dim, lanes):
            for i in range(d, d + lanes):
                to[i] = element(x, i * col) * sign if i < dim else scalar(0)
            check = fma(load(to, d), zero, check)
        return reduce_add(check)

    return run


@functools.cache
def dot_row(variant: Variant, lanes: int):
    """Kernel: x · y, x packed with zeros behind it, y as it lies."""
    dtype, storage = variant.dtype, variant.storage
    simd = operations(dtype, lanes)
    load_stored, load, fma = simd.loader(storage), simd.load, simd.fma
    splat, reduce_add, element = simd.splat, simd.reduce_add, element_loader(storage, dtype)
    scalar = getattr(np, dtype)

    @jit
    def run(x, y, col, dim):
        total = splat(scalar(0))
        whole = dim // lanes * lanes if col == 1 else 0
        for d in range(0, whole, lanes):
            total = fma(load(x, d), load_stored(y, d), total)
        rest = scalar(0)
        for d in range(whole, dim):
            rest += x[d] * element(y, d * col)
        return reduce_add(total) + rest

    return run


@functools.cache
def pack_rows(variant: Variant, lanes: int):
    """Kernel: `count` query rows as (count, q_stride), times the sign of the scale, and those of
    dout as (count, d_stride), times the row's weight; lse in base 2; delta = dout · out - dlse, of
    that dout, and dlse times the weight.

    A row that sees nothing gets lse = inf, so that p = 0. One that is not finite, or whose lse is
    not, gets NaN. Both become 0: what is no number must not reach, as 0 * NaN, keys that the row
    does not see.
    """
    dtype = variant.dtype
    simd = operations(dtype, lanes)
    store, splat = simd.store, simd.splat
    copy, dot = copy_row(variant, lanes), dot_row(variant, lanes)
    stored, real, scalar = pointer_to(variant.storage), pointer_to(dtype), getattr(np, dtype)
    inf, nan, largest = scalar(np.inf), scalar(np.nan), scalar(np.finfo(dtype).max)

    @jit
    def clear(x, dim):
        for d in range(0, dim, lanes):
            store(x, d, splat(scalar(0)))

    @jit
    def run(job, item, row, count, q_rows, d_rows, lse, delta):
        head_dim, head_dim_v = field(job, "head_dim"), field(job, "head_dim_v")
        q_stride, d_stride = field(job, "q_stride"), field(job, "d_stride")
        group, sign = field(job, "group"), scalar(field(job, "q_sign"))
        q_at = batch_offset(field(job, "q_table"), field(job, "q_batch"), item[BATCH])
        d_at = batch_offset(field(job, "dout_table"), field(job, "dout_batch"), item[BATCH])
        o_at = batch_offset(field(job, "out_table"), field(job, "out_batch"), item[BATCH])
        lse_at = item[BATCH] * field(job, "lse_batch") + item[FIRST_QUERY]
        weights, weight, unit = field(job, "row_weight"), scalar(1), scalar(LOG2_E)
        if weights != 0:
            unit = scalar(1)
        i, r = row // group, row % group
        for m in range(count):
            h, place = item[HEAD] * group + r, item[FIRST_QUERY] + i
            x = at(stored(field(job, "q")), q_at + h * field(job, "q_head"))
            x = at(x, place * field(job, "q_row"))
            y = at(stored(field(job, "dout")), d_at + h * field(job, "dout_head"))
            y = at(y, place * field(job, "dout_row"))
            z = at(stored(field(job, "out")), o_at + h * field(job, "out_head"))
            z = at(z, place * field(job, "out_row"))
            where = lse_at + h * field(job, "lse_head") + i
            if weights != 0:
                weight = real(weights)[where]
            q, d = at(q_rows, m * q_stride), at(d_rows, m * d_stride)
            check = copy(x, field(job, "q_col"), head_dim, sign, q)
            check += copy(y, field(job, "dout_col"), head_dim_v, weight, d)
            total = dot(d, z, field(job, "out_col"), head_dim_v)
            if field(job, "dlse") != 0:
                total -= real(field(job, "dlse"))[where] * weight
            own = real(field(job, "row_lse"))[where]
            empty = own == -inf
            if empty or check != scalar(0) or not own < inf:
                clear(q, head_dim)
                clear(d, head_dim_v)
                lse[m], delta[m] = inf if empty else nan, scalar(0)
            else:
                # What is finite stays so in base 2.
                lse[m] = min(max(own * unit, -largest), largest)
                delta[m] = total
            i, r = next_row(i, r, group)

    return run


@functools.cache
def pack_finite_keys(variant: Variant, lanes: int):
    """Kernel: keys as rows (count, q_stride), zeros for what is not finite.

    A row that sees such a key has lse = NaN; one that does not must not notice it.
    """
    dtype = variant.dtype
    simd = operations(dtype, lanes)
    load, store, where = simd.load, simd.store, simd.where
    copy, scalar = copy_row(variant, lanes), getattr(np, dtype)

    @jit
    def run(k, rs_k, cs_k, count, head_dim, rows, stride):
        for n in range(count):
            to = at(rows, n * stride)
            if copy(at(k, n * rs_k), cs_k, head_dim, scalar(1), to) != scalar(0):
                for d in range(0, head_dim, lanes):
                    x = load(to, d)
                    store(to, d, where(x * scalar(0) == scalar(0), x, scalar(0)))

    return run


@functools.cache
def add_row(dtype: str, lanes: int):
    """Kernel: to[:dim] += factor * x[:dim]."""
    simd = operations(dtype, lanes)
    load, store, fma, splat = simd.load, simd.store, simd.fma, simd.splat

    @jit
    def run(to, x, dim, factor):
        whole = dim // lanes * lanes
        for d in range(0, whole, lanes):
            store(to, d, fma(load(x, d), splat(factor), load(to, d)))
        for d in range(whole, dim):
            to[d] += x[d] * factor

    return run


@functools.cache
def add_to_queries(variant: Variant, lanes: int):
    """Kernel: add `count` rows (count, stride), scaled, to dq."""
    add, real = add_row(variant.dtype, lanes), pointer_to(variant.dtype)
    scalar = getattr(np, variant.dtype)

    @jit
    def run(job, item, row, count, rows, stride):
        group, head_dim = field(job, "group"), field(job, "head_dim")
        factor = scalar(field(job, "scale")) * scalar(field(job, "q_sign"))
        base = batch_offset(field(job, "dq_table"), field(job, "dq_batch"), item[BATCH])
        i, r = row // group, row % group
        for m in range(count):
            place = base + (item[HEAD] * group + r) * field(job, "dq_head")
            place += (item[FIRST_QUERY] + i) * field(job, "dq_row")
            add(at(real(field(job, "dq")), place), at(rows, m * stride), head_dim, factor)
            i, r = next_row(i, r, group)

    return run


@functools.cache
def write_keys(variant: Variant, lanes: int):
    """Kernel: add `count` rows of one key block to the zeros of dk and dv."""
    add, real = add_row(variant.dtype, lanes), pointer_to(variant.dtype)
    scalar = getattr(np, variant.dtype)

    @jit
    def run(job, item, n_start, count, dk, k_stride, dv, v_stride):
        k_at = batch_offset(field(job, "dk_table"), field(job, "dk_batch"), item[BATCH])
        v_at = batch_offset(field(job, "dv_table"), field(job, "dv_batch"), item[BATCH])
        k_at += item[HEAD] * field(job, "dk_head")
        v_at += item[HEAD] * field(job, "dv_head")
        factor = scalar(field(job, "scale"))
        for n in range(count):
            key = item[FIRST_KEY] + n_start + n
            to = at(real(field(job, "dk")), k_at + key * field(job, "dk_row"))
            add(to, at(dk, n * k_stride), field(job, "head_dim"), factor)
            to = at(real(field(job, "dv")), v_at + key * field(job, "dv_row"))
            add(to, at(dv, n * v_stride), field(job, "head_dim_v"), scalar(1))

    return run
