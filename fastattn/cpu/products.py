"""The two products of a block, s = q · k and acc += p · v, and the order in which they add.

A score is a sum of chains of KC dimensions, an output element a sum of one chain a key block. Which
kernel computes them does not matter: all here add the same numbers in the same order.
"""

from __future__ import annotations

import functools

import numpy as np

from ..machine import VectorUnit
from .memory import at, element_loader, prefetch
from .microkernel import LINE, ROWS_AHEAD, dot_square, panel_product, tile_shape
from .registers import ITEMSIZE, jit
from .simd import operations

# Dimensions that one chain of a score adds up. A chain of 224 errs 2.7 times as much as NumPy's
# small products do, one of 64 at most 1.9 times; shorter ones cost more than they give.
KC = 64
FEW_ROWS = 4  # at most so many rows are worth computing without packing the keys


@functools.cache
def score_block(dtype: str, unit: VectorUnit):
    """Kernel: s[m, n] = q_rows[m] · k[n] for n in [start, stop), from packed keys.

    start a multiple of nr, stop of lanes.
    """
    product = panel_product(dtype, unit)
    nr = np.int64(tile_shape(unit)[1] * unit.lanes(ITEMSIZE[dtype]))

    @jit
    def run(q_rows, q_stride, count, head_dim, k_panels, start, stop, s, s_stride):
        for n in range(start, stop, nr):
            panel, to, wide = at(k_panels, n * head_dim), at(s, n), n + nr <= stop
            for d in range(0, max(head_dim, 1), KC):  # once without dims: the scores are then 0
                q, part, depth = at(q_rows, d), at(panel, d * nr), min(KC, head_dim - d)
                product(wide, count, q, q_stride, part, nr, to, s_stride, depth, d)

    return run


@functools.cache
def few_scores(dtype: str, unit: VectorUnit, storage: str):
    """Kernel: the same for a few rows, from keys as they lie (contiguous columns).

    Reading the keys is all that this costs, so the keys ROWS_AHEAD on and the values of these are
    asked for on the way: 0.31 -> 0.64 of the read bandwidth that one thread has alone.

    k, v     first key and value of the block, rows rs_k and rs_v apart
    keys     how many there are; s is written up to the next multiple of lanes
    ahead_v  elements of each value row to ask for; 0 if they are wanted in another way
    part     (FEW_ROWS + 1, lanes) scratch
    """
    lanes = unit.lanes(ITEMSIZE[dtype])
    simd = operations(dtype, lanes)
    load, store, splat, fma = simd.load, simd.store, simd.splat, simd.fma
    four, one = (dot_square(dtype, lanes, storage, rows) for rows in (4, 1))
    scalar, line = getattr(np, dtype), LINE // ITEMSIZE[storage]
    element = element_loader(storage, dtype)

    @jit
    def chain(q, head_dim, rows, key, rs_k, last, start, stop, part):
        """part[m] = q[m, start:stop] · key[:, start:stop] for one register of keys."""
        for m in range(rows):
            store(part, m * lanes, splat(scalar(0)))
        whole = start + (stop - start) // lanes * lanes
        for d in range(start, whole, lanes):
            if rows == 4:
                four(at(q, d), head_dim, at(key, d), rs_k, last, part)
            else:
                one(at(q, d), head_dim, at(key, d), rs_k, last, part)
        column = at(part, FEW_ROWS * lanes)
        for d in range(whole, stop):
            for i in range(lanes):
                column[i] = element(key, min(i, last) * rs_k + d)
            for m in range(rows):
                q_d = splat(q[m * head_dim + d])
                store(part, m * lanes, fma(q_d, load(column, 0), load(part, m * lanes)))

    @jit
    def ask(rows, row_stride, start, stop):
        """Prefetch dims [start, stop) of one register of rows."""
        for d in range(start, stop, line):
            for i in range(lanes):
                prefetch(rows, i * row_stride + d)

    @jit
    def run(q_rows, count, head_dim, k, rs_k, keys, s, s_stride, v, rs_v, ahead_v, part):
        for n in range(0, keys, lanes):
            key, last = at(k, n * rs_k), keys - 1 - n
            m = 0
            while m < count:
                rows = 4 if count - m >= 4 else 1
                q = at(q_rows, m * head_dim)
                for i in range(rows):
                    store(s, (m + i) * s_stride + n, splat(scalar(0)))
                for d in range(0, head_dim, KC):
                    stop = min(d + KC, head_dim)
                    if m == 0:
                        ask(at(key, ROWS_AHEAD * rs_k), rs_k, d, stop)
                        ask(at(v, n * rs_v), rs_v, d, min(stop, ahead_v))
                    chain(q, head_dim, rows, key, rs_k, last, d, stop, part)
                    for i in range(rows):
                        place = (m + i) * s_stride + n
                        store(s, place, load(s, place) + load(part, i * lanes))
                m += rows

    return run


@functools.cache
def output_block(dtype: str, unit: VectorUnit):
    """Kernel: acc[m] += sum_n p[m, n] * v[n] for n in [start, stop).

    panel_n  rows of a panel of packed values; 0: v holds the values as they lie, rows rs_v apart
    """
    product, add = panel_product(dtype, unit), np.int64(1)
    lanes = unit.lanes(ITEMSIZE[dtype])
    nr = tile_shape(unit)[1] * lanes

    @jit
    def run(p, s_stride, count, v, rs_v, panel_n, start, stop, acc, acc_stride):
        p, depth = at(p, start), stop - start
        for d in range(0, acc_stride, nr):
            width = min(nr, acc_stride - d)
            rs = rs_v if panel_n == 0 else width
            columns = at(v, (d if panel_n == 0 else d * panel_n) + start * rs)
            to, wide = at(acc, d), width == nr
            product(wide, count, p, s_stride, columns, rs, to, acc_stride, depth, add)

    return run


@functools.cache
def careful_product(dtype: str, unit: VectorUnit):
    """Kernel: output_block() for one row, without touching keys whose p is -0.0 (excluded).

    Their values may be NaN or inf.
    """
    lanes = unit.lanes(ITEMSIZE[dtype])
    nr = tile_shape(unit)[1] * lanes
    simd = operations(dtype, lanes)
    load, store, splat, fma = simd.load, simd.store, simd.splat, simd.fma
    scalar = getattr(np, dtype)
    one = scalar(1)

    @jit
    def run(p, v_panels, panel_n, start, stop, acc, acc_stride):
        for d in range(0, acc_stride, lanes):
            first = d // nr * nr
            width = min(nr, acc_stride - first)
            panel = at(v_panels, first * panel_n + d - first)
            total = splat(scalar(0))
            for n in range(start, stop):
                weight = p[n]
                if weight != scalar(0) or one / weight > scalar(0):
                    total = fma(splat(weight), load(panel, n * width), total)
            store(acc, d, load(acc, d) + total)

    return run
