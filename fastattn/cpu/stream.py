"""Values of few rows that lie one behind the other, read once and in the order of memory."""

from __future__ import annotations

import functools

import numpy as np

from ..machine import VectorUnit
from .memory import at
from .microkernel import product
from .registers import ITEMSIZE, jit
from .simd import operations

PIECE = 16  # values that stay in the level-1 cache while all rows and columns take their turns
# Registers of columns of the tiles for one row and for two, by number of vector registers: with one
# row, a value is used once and needs no register.
FEW_TILES = {16: ((8, 4), (4, 2)), 32: ((8, 4), (8, 4))}


@functools.cache
def stream_outputs(dtype: str, unit: VectorUnit, mr: int):
    """Kernel: acc[m] += sum_n p[m, n] * v[n] from values that lie one behind the other, whole
    registers each.

    mr    rows that are multiplied at once, 1 or 2; count must be a multiple
    sums  (count, width) scratch for the chains of a block, which go on from piece to piece

    The products of a piece ask for the next one, all of them: only those of the first rows 1.04 to
    1.06 times the time (decode-gqa), in a run before the products 1.12, on AVX2 1.25.
    """
    lanes = unit.lanes(ITEMSIZE[dtype])
    wide_nv, slim_nv = FEW_TILES[unit.registers][mr - 1]
    wide, slim, rest = (
        product(dtype, lanes, mr, nv, asks=PIECE, level=1, goes_on=True)
        for nv in (wide_nv, slim_nv, 1)
    )
    wide_width, slim_width = wide_nv * lanes, slim_nv * lanes
    simd = operations(dtype, lanes)
    load, store, splat = simd.load, simd.store, simd.splat
    zero = getattr(np, dtype)(0)

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
            piece(at(p, n), s_stride, count, at(v, n * width), here, width, sums)
        for d in range(0, count * width, lanes):
            store(acc, d, load(acc, d) + load(sums, d))

    return run
