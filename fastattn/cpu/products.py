"""The two products of a block, s = q · k and acc += p · v, and the order in which they add.

A score is a sum of chains of KC dimensions, an output element a sum of one chain a key block. Which
kernel computes them does not matter: all here add the same numbers in the same order.
"""

from __future__ import annotations

import functools

import numpy as np

from ..machine import VectorUnit
from .asks import INTEGERS
from .job import LINE
from .memory import at, element_loader, prefetch_near, row_at, rows_follow, rows_from
from .microkernel import (
    product,
    sharing_product,
    tile_shape,
)
from .registers import ITEMSIZE, jit
from .simd import operations
from .square import dot_square, dot_squares, row_registers
from .stream import FEW_TILES, PIECE, stream_outputs

# Dimensions that one chain of a score adds up. A chain of 224 errs 2.7 times as much as NumPy's
# small products do, one of 64 at most 1.9 times; shorter ones cost more than they give.
KC = 64
# Scores of a row that are computed at once from keys as they lie: a chain of sums waits for itself.
STREAM = 16
# Bytes past those that are computed at once from which on more are asked for: with 0, 1, 3, 4 and
# 8 KiB decode-batch takes 1.04, 1.06, 1.0, 1.0 and 1.04 of its time, decode-mha 0.98 to 1.06.
KEYS_FURTHER = 2048
# Rows to ask for ahead, in level 1, where they do not follow each other. In order of tokens and on
# pages of 16, times of 32 rows in level 2: 0.91, 16 rows 0.97, 32 rows 0.95 (Zen 5).
NEAR_ROWS = 24
FEW_ROWS = 4  # at most so many rows are worth computing without packing the keys


@functools.cache
def asking_scores(dtype: str, unit: VectorUnit):
    """Kernel: s[m, n] = q_rows[m] · k[n] for n in [start, stop), from packed keys.

    start a multiple of nr. What is left of the last register may be written, too, or not. asks: a
    list of asks.py, or null.
    """
    multiply = sharing_product(dtype, unit)
    nr = np.int64(tile_shape(unit)[1] * unit.lanes(ITEMSIZE[dtype]))

    @jit
    def run(q_rows, q_stride, count, head_dim, k_panels, start, stop, s, s_stride, asks):
        done = 0
        for n in range(start, stop, nr):
            panel, to, left = at(k_panels, n * head_dim), at(s, n), stop - n
            for d in range(0, max(head_dim, 1), KC):  # once without dims: the scores are then 0
                q, part, depth = at(q_rows, d), at(panel, d * nr), min(KC, head_dim - d)
                place = count, q, q_stride, part, nr, to, s_stride, depth, d, asks
                done = multiply(left, done, *place, at(part, nr * head_dim), nr)

    return run


@functools.cache
def score_block(dtype: str, unit: VectorUnit):
    """Kernel: the same, asking for nothing."""
    multiply = asking_scores(dtype, unit)

    @jit
    def run(q_rows, q_stride, count, head_dim, k_panels, start, stop, s, s_stride):
        to = s, s_stride, INTEGERS(0)
        multiply(q_rows, q_stride, count, head_dim, k_panels, start, stop, *to)

    return run


@functools.cache
def few_scores(dtype: str, unit: VectorUnit, storage: str):
    """Kernel: the same for a few rows, from keys as they lie (contiguous columns).

    k        first key of the block, rows rs_k apart, or where this table of offsets says
    keys     how many there are; s is written up to the next multiple of lanes
    beyond   how many may be read, the keys of later blocks included
    part     (FEW_ROWS + 1, lanes) scratch
    """
    lanes = unit.lanes(ITEMSIZE[dtype])
    four, one = (scores_of_rows(dtype, lanes, storage, rows) for rows in (4, 1))

    @jit
    def run(q_rows, count, head_dim, k, rs_k, keys, beyond, s, s_stride, part):
        if count >= 2:
            four(q_rows, count - 1, head_dim, k, rs_k, keys, beyond, s, s_stride, part)
        else:
            one(q_rows, count - 1, head_dim, k, rs_k, keys, beyond, s, s_stride, part)

    return run


@functools.cache
def scores_of_rows(dtype: str, lanes: int, storage: str, rows: int):
    """Kernel: few_scores() of up to `rows` rows: those past the last are computed in vain, which
    costs less than going through the keys once more (three rows 0.6 of the time, two 0.6).

    last_q  number of the last row
    """
    stream, some = (make(dtype, lanes, storage, rows) for make in (stream_scores, scores_of_lanes))

    @jit
    def run(q, last_q, head_dim, k, rs_k, keys, beyond, s, s_stride, part):
        n = 0
        if head_dim > 0 and rows_follow(rs_k, head_dim) and head_dim % lanes == 0:
            n = stream(q, last_q, head_dim, k, keys, s, s_stride)
        while n < keys:
            some(q, last_q, head_dim, k, rs_k, n, keys - 1 - n, beyond, at(s, n), s_stride, part)
            n += lanes

    return run


@functools.cache
def stream_scores(dtype: str, lanes: int, storage: str, rows: int):
    """Kernel: scores_of_rows() of keys that lie one behind the other, whole registers each; returns
    the number of the first key left.

    Reading the keys is all that this costs, and the products take them in an order that no hardware
    foresees. So while some are multiplied, later ones are asked for in the order of memory, a line
    for each column. Loads of these lines in place of asking hold up the products where memory is
    fast: decode-batch 1.12 times the time, on AVX2 1.35, both on Zen 5.
    """
    squares = max(1, STREAM // (lanes * rows))
    group = squares * lanes
    dot = dot_squares(dtype, lanes, storage, rows, squares)
    zeros, keep = row_registers(dtype, lanes, rows, squares)
    further = KEYS_FURTHER // ITEMSIZE[storage]

    @jit
    def run(q, last_q, head_dim, k, keys, s, s_stride):
        n = 0
        while n + group <= keys:
            key = at(k, n * head_dim)
            later = at(key, group * head_dim + further)
            for start in range(0, head_dim, KC):
                totals = zeros()
                for d in range(start, min(start + KC, head_dim), lanes):
                    place = at(q, d), head_dim, last_q, at(key, d), head_dim
                    totals = dot(*place, totals, later)
                    later = at(later, group * lanes)
                keep(at(s, n), s_stride, last_q, totals, start > 0)
            n += group
        return n

    return run


@functools.cache
def scores_of_lanes(dtype: str, lanes: int, storage: str, rows: int):
    """Kernel: scores_of_rows() of one register of keys, from key n on.

    last     number of the last key, from n
    """
    simd = operations(dtype, lanes)
    load, store, splat, fma = simd.load, simd.store, simd.splat, simd.fma
    dot = dot_square(dtype, lanes, storage, rows)
    zeros, keep = row_registers(dtype, lanes, rows, 1)
    line, square, element = LINE // ITEMSIZE[storage], lanes * lanes, element_loader(storage, dtype)

    @jit
    def tail(q, last_q, head_dim, key, rs_k, last, start, stop, part):
        """part[m] += q[m, start:stop] · key[:, start:stop], fewer dims than a register holds."""
        column = at(part, FEW_ROWS * lanes)
        for d in range(start, stop):
            for i in range(lanes):
                column[i] = element(row_at(key, rs_k, min(i, last)), d)
            for m in range(last_q + 1):
                q_d = splat(q[m * head_dim + d])
                store(part, m * lanes, fma(q_d, load(column, 0), load(part, m * lanes)))

    @jit
    def run(q, last_q, head_dim, k, rs_k, n, last, beyond, s, s_stride, part):
        whole = head_dim // lanes * lanes
        key, rs_key = rows_from(k, rs_k, n)
        rows_a_step = (square + whole - 1) // max(whole, 1)
        ahead = n + NEAR_ROWS
        ahead_stop = min(ahead + lanes, beyond)
        for start in range(0, max(head_dim, 1), KC):
            totals = zeros()
            for d in range(start, min(start + KC, whole), lanes):
                for r in range(ahead, min(ahead + rows_a_step, ahead_stop)):
                    for c in range(0, whole, line):
                        prefetch_near(row_at(k, rs_k, r), c)
                ahead += rows_a_step
                totals = dot(at(q, d), head_dim, last_q, at(key, d), rs_key, last, totals)
            keep(part, lanes, last_q, totals, False)
            stop = min(start + KC, head_dim)
            tail(q, last_q, head_dim, key, rs_key, last, max(start, whole), stop, part)
            for m in range(last_q + 1):
                total = load(part, m * lanes)
                if start > 0:
                    total = load(s, m * s_stride) + total
                store(s, m * s_stride, total)

    return run


@functools.cache
def asking_outputs(dtype: str, unit: VectorUnit):
    """Kernel: acc[m] += sum_n p[m, n] * v[n] for n in [start, stop), from packed values.

    panel_n     rows of a panel
    head_dim_v  columns of v; acc has acc_stride, whole registers
    asks        a list of asks.py, or null
    """
    multiply, add = sharing_product(dtype, unit), np.int64(1)
    lanes = np.int64(unit.lanes(ITEMSIZE[dtype]))
    nr = tile_shape(unit)[1] * lanes

    @jit
    def run(p, s_stride, count, v, panel_n, start, stop, acc, acc_stride, head_dim_v, asks):
        p, depth, done = at(p, start), stop - start, 0
        for d in range(0, acc_stride, nr):
            width = min(nr, acc_stride - d)
            panel, after = at(v, d * panel_n + start * width), (d + nr) * panel_n + start * lanes
            place = count, p, s_stride, panel, width, at(acc, d), acc_stride, depth, add, asks
            done = multiply(head_dim_v - d, done, *place, at(v, after), lanes)

    return run


@functools.cache
def output_block(dtype: str, unit: VectorUnit):
    """Kernel: the same, asking for nothing."""
    multiply = asking_outputs(dtype, unit)

    @jit
    def run(p, s_stride, count, v, panel_n, start, stop, acc, acc_stride, head_dim_v):
        to = acc, acc_stride, head_dim_v, INTEGERS(0)
        multiply(p, s_stride, count, v, panel_n, start, stop, *to)

    return run


@functools.cache
def few_outputs(dtype: str, unit: VectorUnit):
    """Kernel: the same for up to FEW_ROWS rows, from values as they lie, rows rs_v apart, or where
    this table of offsets says.

    sums  scratch of as many rows as acc

    Read by columns of nr, values come from memory at 0.35 of the bandwidth of a plain read loop
    (four rows: 0.28); by whole rows of head_dim 128 at 1.0.
    """
    lanes = unit.lanes(ITEMSIZE[dtype])
    nv, add = tile_shape(unit)[1], np.int64(1)
    nr = nv * lanes

    def some_rows(rows):
        """Kernel: one or two rows against all columns, in tiles as wide as fit.

        apart  whether values are to be asked for as rows apart; else one row is read in order, or
               other rows have read them before
        """
        shapes = FEW_TILES[unit.registers][rows - 1]
        wide_width, slim_width = (nv * lanes for nv in shapes)
        ahead = PIECE if rows == 1 else 0
        asking, slim_asking = (
            product(dtype, lanes, rows, nv, asks=NEAR_ROWS, level=1) for nv in shapes
        )
        wide, slim = (product(dtype, lanes, rows, nv, asks=ahead, level=1) for nv in shapes)
        pair, single = (product(dtype, lanes, rows, n) for n in (nv, 1))

        @jit
        def run(p, s_stride, v, rs_v, depth, acc, acc_stride, apart):
            d = 0
            while d + slim_width <= acc_stride:
                place = p, s_stride, at(v, d), rs_v, at(acc, d), acc_stride, depth, add
                if d + wide_width <= acc_stride:
                    if apart:
                        asking(*place)
                    else:
                        wide(*place)
                    d += wide_width
                else:
                    if apart:
                        slim_asking(*place)
                    else:
                        slim(*place)
                    d += slim_width
            while d < acc_stride:
                place = p, s_stride, at(v, d), rs_v, at(acc, d), acc_stride, depth, add
                if d + nr <= acc_stride:
                    pair(*place)
                else:
                    single(*place)
                d += nr

        return run

    one, two = some_rows(1), some_rows(2)
    stream_one, stream_two = (stream_outputs(dtype, unit, rows) for rows in (1, 2))
    whole = FEW_TILES[unit.registers][0][0] * lanes

    @jit
    def run(p, s_stride, count, v, rs_v, start, stop, acc, acc_stride, sums):
        p, (v, rows), depth = at(p, start), rows_from(v, rs_v, start), stop - start
        if rows_follow(rs_v, acc_stride) and (count > 1 or acc_stride > whole):
            pairs = count // 2 * 2
            if pairs != 0:
                stream_two(p, s_stride, pairs, v, depth, acc, acc_stride, sums)
            if count % 2 != 0:
                p, acc = at(p, pairs * s_stride), at(acc, pairs * acc_stride)
                stream_one(p, s_stride, 1, v, depth, acc, acc_stride, sums)
            return
        for m in range(0, count - 1, 2):
            to = at(acc, m * acc_stride)
            two(at(p, m * s_stride), s_stride, v, rows, depth, to, acc_stride, m == 0)
        if count % 2 != 0:
            to = at(acc, (count - 1) * acc_stride)
            place = at(p, (count - 1) * s_stride)
            one(place, s_stride, v, rows, depth, to, acc_stride, not rows_follow(rs_v, acc_stride))

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
