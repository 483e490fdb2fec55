"""Values of few rows that lie one behind the other, read once and in the order of memory."""

from __future__ import annotations

import functools

import numpy as np

from ..machine import VectorUnit
from .job import LINE
from .memory import at, prefetch_near
from .microkernel import product
from .registers import ITEMSIZE, jit
from .simd import operations

PIECE = 16  # values that stay in the level-1 cache while all rows and columns take their turns
# Bytes to ask for ahead of what is read, in level 1 (without: decode-gqa 1.11 times the time). Each
# piece loaded before its products, and asked for 4 KiB ahead in level 2: 1.07 to 1.09 on AVX2.
FURTHER = 8192
# Registers of columns of the tiles for one row and for two, by number of vector registers: with one
# row, a value is used once and needs no register.
FEW_TILES = {16: ((8, 4), (4, 2)), 32: ((8, 4), (8, 4))}


@functools.cache
def stream_outputs(dtype: str, unit: VectorUnit, mr: int):
    """Kernel: acc[m] += sum_n p[m, n] * v[n] from values that lie one behind the other, whole
    registers each.

    mr    rows that are multiplied at once, 1 or 2; count must be a multiple
    sums  (count, width) scratch for the chains of a block, which go on from piece to piece
    """
    lanes = unit.lanes(ITEMSIZE[dtype])
    wide_nv, slim_nv = FEW_TILES[unit.registers][mr - 1]
    wide, slim, rest = (product(dtype, lanes, mr, nv, goes_on=True) for nv in (wide_nv, slim_nv, 1))
    wide_width, slim_width = wide_nv * lanes, slim_nv * lanes
    simd = operations(dtype, lanes)
    load, store, splat = simd.load, simd.store, simd.splat
    zero, line = getattr(np, dtype)(0), LINE // ITEMSIZE[dtype]
    further = FURTHER // ITEMSIZE[dtype]

    @jit
    def piece(p, s_stride, count, v, depth, width, sums):
        """sums[m] += p[m] · v, chains that go on from what is there."""
        for m in range(0, count, mr):
            x, d = at(p, m * s_stride), 0
            while d < width:
                place = x, s_stride, at(v, d), width, at(sums, m * width + d), width, depth, 1
                if d + wide_width <= width:
                    wide(*place)
                    d += wide_width
                elif d + slim_width <= width:
                    slim(*place)
                    d += slim_width
                else:
                    rest(*place)
                    d += lanes

    @jit
    def run(p, s_stride, count, v, depth, acc, width, sums):
        for d in range(0, count * width, lanes):
            store(sums, d, splat(zero))
        for n in range(0, depth, PIECE):
            here = min(PIECE, depth - n)
            values = at(v, n * width)
            for d in range(0, here * width, line):
                prefetch_near(values, d + further)
            piece(at(p, n), s_stride, count, values, here, width, sums)
        for d in range(0, count * width, lanes):
            store(acc, d, load(acc, d) + load(sums, d))

    return run
