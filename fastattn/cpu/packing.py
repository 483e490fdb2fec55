"""Keys and values of a block, copied to panels as the products read them."""

from __future__ import annotations

import functools

import numpy as np

from ..machine import VectorUnit
from .job import LINE
from .memory import at, element_loader, prefetch, row_at, rows_from
from .microkernel import ROWS_AHEAD, tile_shape
from .registers import ITEMSIZE, jit
from .simd import operations
from .square import transpose_square


@functools.cache
def pack_k(dtype: str, unit: VectorUnit, storage: str):
    """Kernel: keys as panels (ceil(count / nr), head_dim, nr), so that a tile reads nr keys of one
    dim as registers.

    k  (count, head_dim) of storage type, strides rs_k (or a table of offsets), cs_k. Keys past the
       last repeat it: finite if it is, and masked by the caller.
    """
    lanes = unit.lanes(ITEMSIZE[dtype])
    nr = tile_shape(unit)[1] * lanes
    transpose, element = transpose_square(dtype, lanes, storage), element_loader(storage, dtype)
    line = LINE // ITEMSIZE[storage]

    @jit
    def run(k, rs_k, cs_k, count, head_dim, panels):
        # The last square reaches back to whole registers: what lies there is written again.
        whole = head_dim if cs_k == 1 and head_dim >= lanes else 0
        for n in range(0, count, lanes):
            panel = at(panels, n // nr * nr * head_dim + n % nr)
            (key, keys), last = rows_from(k, rs_k, n), count - 1 - n
            for start in range(0, whole, lanes):
                if start % line == 0:
                    for i in range(lanes):
                        prefetch(row_at(key, keys, ROWS_AHEAD + i), start)
                d = min(start, head_dim - lanes)
                transpose(at(key, d), keys, last, at(panel, d * nr), nr)
            for d in range(whole, head_dim):
                for i in range(lanes):
                    panel[d * nr + i] = element(row_at(key, keys, min(i, last)), d * cs_k)

    return run


@functools.cache
def some_columns(dtype: str, lanes: int, storage: str):
    """Kernel: a register of at most `count` columns of a row from `start` on, cs apart, then zeros.

    part  scratch of a register
    """
    simd, element = operations(dtype, lanes), element_loader(storage, dtype)
    load, load_some, splat, zero = simd.load, simd.load_some, simd.splat, getattr(np, dtype)(0)

    @jit
    def apart(row, start, cs, count, part):
        for i in range(lanes):
            part[i] = element(row, (start + i) * cs) if i < count else zero
        return load(part, 0)

    @jit
    def together(row, start, cs, count, part):
        if cs == 1:
            return load_some(row, start, count, splat(zero))
        return apart(row, start, cs, count, part)

    return together if storage == dtype else apart


@functools.cache
def pack_v(dtype: str, unit: VectorUnit, storage: str):
    """Kernel: values as panels of nr columns, (block_n, width) each, the last one as wide as it
    needs to be.

    v  (count, head_dim_v) of storage type, strides rs_v (or a table of offsets), cs_v. Missing
       columns of the last panel become 0.
    Returns 0 if all values are finite, else 1.
    """
    lanes = unit.lanes(ITEMSIZE[dtype])
    nr = tile_shape(unit)[1] * lanes
    simd = operations(dtype, lanes)
    store, splat, fma, reduce_add = simd.store, simd.splat, simd.fma, simd.reduce_add
    scalar, line = getattr(np, dtype), LINE // ITEMSIZE[storage]
    load_stored, some = simd.loader(storage), some_columns(dtype, lanes, storage)

    @jit
    def run(v, rs_v, cs_v, count, block_n, head_dim_v, panels):
        zero = splat(scalar(0))
        # Stay 0 while all is finite: 0 * inf and 0 * NaN are NaN. Two, as each waits for itself.
        check = other = zero
        padded = (head_dim_v + lanes - 1) // lanes * lanes
        whole = head_dim_v // nr * nr if cs_v == 1 else 0
        for n in range(count):
            row, ahead = row_at(v, rs_v, n), row_at(v, rs_v, n + ROWS_AHEAD)
            for d in range(0, head_dim_v if cs_v == 1 else 0, line):
                prefetch(ahead, d)
            for start in range(0, whole, nr):
                to = at(panels, start * block_n + n * nr)
                for d in range(0, nr, 2 * lanes):
                    value, later = load_stored(row, start + d), load_stored(row, start + d + lanes)
                    store(to, d, value)
                    store(to, d + lanes, later)
                    check, other = fma(value, zero, check), fma(later, zero, other)
            for start in range(whole, padded, nr):
                width = min(nr, padded - start)
                to = at(panels, start * block_n + n * width)
                for d in range(0, width, lanes):
                    inside = head_dim_v - start - d
                    if cs_v == 1 and inside >= lanes:
                        value = load_stored(row, start + d)
                    else:
                        value = some(row, start + d, cs_v, inside, at(to, d))
                    store(to, d, value)
                    check = fma(value, zero, check)
        return 0 if reduce_add(check + other) == scalar(0) else 1

    return run
