"""Between the products of the gradients' kernel: p and ds from scores, and what else takes ds."""

from __future__ import annotations

import functools

import numpy as np

from ..large_rows import LARGEST
from ..problem import Variant
from .fields import (
    BATCH,
    FIRST_BIAS,
    HEAD,
    INTEGERS,
    KEYS,
    OFFSET_IN_KEYS,
    batch_offset,
    field,
    next_row,
)
from .job import LN_2, LOG2_E
from .memory import at, pointer_to
from .modifiers import score_mod
from .random import kept, row_key
from .registers import jit
from .simd import operations


@functools.cache
def probabilities_row(dtype: str, lanes: int):
    """Kernel: one row of scores becomes p, as it weighs dout; one of dp = dout · v becomes ds.

    p = exp2(scale * s - lse);  ds = p * (dp - delta), with p and dp dropped alike

    partial  scores may be -inf, which makes p = ds = 0 whatever lse and dp are
    drops    whether there is dropout; first_j, key and threshold as random.kept() wants them
    factor   what it multiplies what is kept by
    """
    simd = operations(dtype, lanes)
    load, store, splat, exp2, fma = simd.load, simd.store, simd.splat, simd.exp2, simd.fma
    where, keep = simd.where, kept(dtype, lanes)
    scalar = getattr(np, dtype)
    neg_inf, zero = scalar(-np.inf), scalar(0)

    @jit
    def run(s, dp, start, stop, scale, lse, delta, partial, drops, first_j, key, threshold, factor):
        lse_everywhere, delta_everywhere = splat(-lse), splat(delta)
        factor_everywhere, scale_everywhere = splat(factor), splat(scale)
        for n in range(start, stop, lanes):
            x, weighed = load(s, n), load(dp, n)
            p = exp2(fma(x, scale_everywhere, lse_everywhere))
            used = p
            if drops:
                keeps = keep(key, first_j + n, threshold)
                used = where(keeps, p * factor_everywhere, zero)
                weighed = where(keeps, weighed * factor_everywhere, zero)
            ds = p * (weighed - delta_everywhere)
            if partial:
                used = where(x == neg_inf, zero, used)
                ds = where(x == neg_inf, zero, ds)
            store(s, n, used)
            store(dp, n, ds)

    return run


@functools.cache
def shift_large_rows(variant: Variant, lanes: int):
    """Kernel: take lse from the scores of large rows, and leave 0 for it.

    The products are scaled and rounded as in the forward pass: what fma() spares is as large as the
    differences of such scores.
    """
    simd = operations(variant.dtype, lanes)
    load, store = simd.load, simd.store
    scalar = getattr(np, variant.dtype)
    largest, inf = scalar(LARGEST * LOG2_E), scalar(np.inf)

    @jit
    def run(job, count, s, start, stop, lse):
        scale, s_stride = scalar(field(job, "scale_log2")), field(job, "s_stride")
        for m in range(count):
            if largest < abs(lse[m]) < inf:
                for n in range(m * s_stride + start, m * s_stride + stop, lanes):
                    store(s, n, (load(s, n) * scale - lse[m]) / scale)
                lse[m] = scalar(0)

    return run


@functools.cache
def probabilities_block(variant: Variant, lanes: int):
    """Kernel: probabilities_row() on `count` rows of one key block, columns [start, stop)."""
    apply = probabilities_row(variant.dtype, lanes)
    scalar = getattr(np, variant.dtype)

    @jit
    def run(job, item, row, count, n_start, s, dp, start, stop, lse, delta, partial):
        group, s_stride = field(job, "group"), field(job, "s_stride")
        scaled = field(job, "changes_scores") != 0
        scale = scalar(1) if scaled else scalar(field(job, "scale_log2"))
        keys, factor = INTEGERS(field(job, "dropout_keys")), scalar(field(job, "dropout_factor"))
        drops, threshold = field(job, "dropout_keys") != 0, field(job, "dropout_threshold")
        head = item[BATCH] * group * field(job, "heads_kv") + item[HEAD] * group
        first_j = n_start + field(job, "keys_before")
        i, r = row // group, row % group
        key = row_key(0, 0)
        for m in range(count):
            if drops:
                key = row_key(keys[head + r], i)
            apply(
                at(s, m * s_stride),
                at(dp, m * s_stride),
                start,
                stop,
                scale,
                lse[m],
                delta[m],
                partial,
                drops,
                first_j,
                key,
                threshold,
                factor,
            )
            i, r = next_row(i, r, group)

    return run


@functools.cache
def slopes_block(variant: Variant, lanes: int):
    """Kernel: multiply ds by the derivative of softcap and score_mod.

    products  of q and k, before anything was done to them
    """
    dtype, modifier = variant.dtype, variant.score_mod_grad
    simd = operations(dtype, lanes)
    load, store, where, tanh, splat = simd.load, simd.store, simd.where, simd.tanh, simd.splat
    scalar, modified = getattr(np, dtype), modifier is not None
    slope_of = score_mod(modifier, dtype, lanes) if modifier is not None else None

    @jit
    def run(job, item, row, count, n_start, products, ds, start, stop):
        group, s_stride = field(job, "group"), field(job, "s_stride")
        natural = scalar(field(job, "scale_log2")) * scalar(LN_2)
        softcap, aux = scalar(field(job, "softcap")), field(job, "score_aux")
        first_j = n_start + item[FIRST_BIAS] + field(job, "first_key")
        i, r = row // group, row % group
        for m in range(count):
            h = item[HEAD] * group + r
            for n in range(start, stop, lanes):
                place = m * s_stride + n
                x, slope = load(products, place) * natural, splat(scalar(1))
                if softcap != scalar(0):
                    t = tanh(x / softcap)
                    x, slope = t * softcap, slope - t * t
                if modified:
                    (bent,) = slope_of((x,), item[BATCH], h, i, first_j + n, aux)
                    slope = slope * bent
                old = load(ds, place)
                # A hidden key keeps its 0, also where the slope is no number.
                store(ds, place, where(old == scalar(0), old, old * slope))
            i, r = next_row(i, r, group)

    return run


@functools.cache
def bias_block(variant: Variant, lanes: int):
    """Kernel: add ds of `count` rows to dbias, columns [start, stop) that exist.

    Where all keys share an element, a row is added up first: one by one, thousands of keys would
    each round a sum that is larger than what comes out.
    """
    simd = operations(variant.dtype, lanes)
    load, store, splat, reduce_add = simd.load, simd.store, simd.splat, simd.reduce_add
    real, scalar = pointer_to(variant.dtype), getattr(np, variant.dtype)

    @jit
    def run(job, item, row, count, n_start, ds, start, stop):
        group, s_stride = field(job, "group"), field(job, "s_stride")
        col = field(job, "dbias_col")
        base = batch_offset(field(job, "dbias_table"), field(job, "dbias_batch"), item[BATCH])
        base += (n_start + item[FIRST_BIAS]) * col
        stop = min(stop, item[KEYS] - n_start)
        i, r = row // group, row % group
        for m in range(count):
            h = item[HEAD] * group + r
            to = at(real(field(job, "dbias")), base + h * field(job, "dbias_head"))
            to, x = at(to, i * field(job, "dbias_row")), at(ds, m * s_stride)
            whole = start + (stop - start) // lanes * lanes if col in (0, 1) else start
            total = splat(scalar(0))
            for n in range(start, whole, lanes):
                if col == 0:
                    total = total + load(x, n)
                else:
                    store(to, n, load(to, n) + load(x, n))
            for n in range(whole, stop):
                to[n * col] += x[n]
            if col == 0:
                to[0] += reduce_add(total)
            i, r = next_row(i, r, group)

    return run


@functools.cache
def alibi_block(variant: Variant, lanes: int):
    """Kernel: take ds * distance of `count` rows from dalibi's element of this key block.

    The terms are large and cancel: rows are added up in float64.
    """
    simd = operations(variant.dtype, lanes)
    load, splat, fabs, iota, fma = simd.load, simd.splat, simd.fabs, simd.iota, simd.fma
    reduce_add, real, scalar = simd.reduce_add, pointer_to("float64"), getattr(np, variant.dtype)

    @jit
    def run(job, item, row, count, n_start, ds, start, stop):
        group, s_stride = field(job, "group"), field(job, "s_stride")
        n_block, n_blocks = n_start // field(job, "block_n"), field(job, "n_blocks")
        head = (item[BATCH] * field(job, "heads_kv") + item[HEAD]) * group
        i, r = row // group, row % group
        for m in range(count):
            distance = scalar(i + item[OFFSET_IN_KEYS] - n_start)
            total = splat(scalar(0))
            for n in range(start, stop, lanes):
                far = fabs(iota(n) * scalar(1) - distance)
                total = fma(far, load(ds, m * s_stride + n), total)
            to = at(real(field(job, "dalibi")), (head + r) * n_blocks + n_block)
            to[0] -= np.float64(reduce_add(total))
            i, r = next_row(i, r, group)

    return run
