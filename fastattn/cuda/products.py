"""The two products of the SIMT kernels: pieces of rows in shared memory, sums in registers.

Loops with constant bounds over local arrays are unrolled by NVVM, which then keeps the arrays in
registers; so no local array is ever indexed by anything else (tests/test_ptx.py looks).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import cuda, types

from .place import NOWHERE
from .tile import LAST_THREAD, Tile

# Numba counts negative indices from the end, which takes four instructions; unsigned ones it takes
# as they are.
U8 = np.uint64


def row_product(dtype: str, storage: str, tile: Tile, words: Any) -> Callable:
    """Device function (own, own_at, own_col, other, other_at, other_col, width, factor, buffer,
    start): factor * own @ other.T of one tile, each thread's part of it to where it lies in the
    buffer from `start` on.

    own, other        addresses of two operands
    own_at, other_at  places of their rows in shared memory, NOWHERE for a row of zeros; a barrier
                      comes before they are read
    width             columns of both
    """
    real = np.dtype(dtype).type
    threads_m, threads_n, keys = tile.threads_m, tile.threads_n, tile.keys
    own_rows, own_scores = tile.rows, tile.rows * tile.keys
    depth, pitch, other_piece = tile.depth, tile.pitch, tile.block_m * tile.pitch
    p_pitch = tile.p_pitch
    load_own = _load_rows(storage, dtype, tile, tile.block_m, 0, words)
    load_other = _load_rows(storage, dtype, tile, tile.block_n, other_piece, words)

    @words.device(types.void)
    def product(own, own_at, own_col, other, other_at, other_col, width, factor, buffer, start):
        s = cuda.local.array(own_scores, real)
        q = cuda.local.array(own_rows, real)
        for e in range(own_scores):
            s[e] = real(0)
        tid = np.int64(cuda.threadIdx.x & LAST_THREAD)
        ty, tx = tid // threads_n, tid % threads_n
        d0 = np.int64(0)
        while d0 == 0 or d0 < width:  # without columns, what comes next still needs the barriers
            cuda.syncthreads()
            load_own(own, own_at, own_col, width, buffer, d0)
            load_other(other, other_at, other_col, width, buffer, d0)
            cuda.syncthreads()
            for d in range(depth):
                for m in range(own_rows):
                    q[m] = buffer[U8((ty + threads_m * m) * pitch + d)]
                for n in range(keys):
                    k = buffer[U8(other_piece + (tx + threads_n * n) * pitch + d)]
                    for m in range(own_rows):
                        s[m * keys + n] += q[m] * k
            d0 += depth
        for m in range(own_rows):
            for n in range(keys):
                at = start + (ty + threads_m * m) * p_pitch + tx + threads_n * n
                buffer[at] = factor * s[m * keys + n]

    return product


def _load_rows(storage: str, dtype: str, tile: Tile, rows: int, start: int, words: Any) -> Callable:
    """Device function (address, places, col, width, buffer, d0): a piece of so many rows of an
    operand, to `start` of the buffer; 0 where there is none.
    """
    real, load = np.dtype(dtype).type, words.load(storage)
    depth, pitch, threads = tile.depth, tile.pitch, tile.threads
    size, step = rows * depth, threads // depth
    loads = -(-size // threads)

    @words.device(types.void)
    def load_piece(address, places, col, width, buffer, d0):
        tid = np.int64(cuda.threadIdx.x & LAST_THREAD)
        d, r = tid % depth, tid // depth
        for n in range(loads):
            if tid + n * threads < size:
                value = real(0)
                if places[r] != NOWHERE and d0 + d < width:
                    value = load(address, places[r] + (d0 + d) * col)
                buffer[U8(start + r * pitch + d)] = value
            r += step

    return load_piece


def weighted_sum(dtype: str, storage: str, tile: Tile, words: Any, finite: bool) -> Callable:
    """Device function (address, places, col, width, count, buffer, p_start, acc): acc += p @ rows
    of one tile, whose p lie in the buffer from p_start on.

    places, width, count  of the rows: as in row_product(); their number. Once it returns, no thread
                          reads places any more
    finite                what is no number counts as 0. Else a hidden key has p = -0.0: it
                          contributes nothing, whatever its row holds, and one that is seen and has
                          p = 0 contributes 0 * v.
    """
    real = np.dtype(dtype).type
    threads_m, threads_n, values = tile.threads_m, tile.threads_n, tile.values
    own_rows, block_n, block_v = tile.rows, tile.block_n, tile.block_v
    p_pitch, piece = tile.p_pitch, tile.piece_keys
    load_v, add_seen = (
        _load_columns(storage, dtype, tile, words, finite),
        _add_seen(dtype, tile, words),
    )

    @words.device(types.void)
    def product(address, places, col, width, count, buffer, p_start, acc):
        tid = np.int64(cuda.threadIdx.x & LAST_THREAD)
        ty, tx = tid // threads_n, tid % threads_n
        v = cuda.local.array(values, real)
        k0 = np.int64(0)
        while k0 < block_n and k0 < count:
            cuda.syncthreads()
            # Also the barrier between loads and use.
            if cuda.syncthreads_or(load_v(address, places, col, width, buffer, k0)):
                add_seen(buffer, acc, p_start, k0)
            else:
                for k in range(piece):
                    for c in range(values):
                        v[c] = buffer[U8(k * block_v + tx + threads_n * c)]
                    for m in range(own_rows):
                        p = buffer[U8(p_start + (ty + threads_m * m) * p_pitch + k0 + k)]
                        for c in range(values):
                            acc[m * values + c] += p * v[c]
            k0 += piece

    return product


def _add_seen(dtype: str, tile: Tile, words: Any) -> Callable:
    """Device function (buffer, acc, p_start, k0): the same for a piece that is not all finite."""
    real, copysign = np.dtype(dtype).type, words.functions(dtype).copysign
    threads_m, threads_n, values = tile.threads_m, tile.threads_n, tile.values
    own_rows, block_v, piece, p_pitch = tile.rows, tile.block_v, tile.piece_keys, tile.p_pitch
    one, none = real(1), real(0)

    @words.device(types.void)
    def add(buffer, acc, p_start, k0):
        tid = np.int64(cuda.threadIdx.x & LAST_THREAD)
        ty, tx = tid // threads_n, tid % threads_n
        for k in range(piece):
            for m in range(own_rows):
                p = buffer[U8(p_start + (ty + threads_m * m) * p_pitch + k0 + k)]
                hidden = copysign(one, p) < none
                for c in range(values):
                    v = buffer[U8(k * block_v + tx + threads_n * c)]
                    acc[m * values + c] += p * (none if hidden else v)

    return add


def _load_columns(storage: str, dtype: str, tile: Tile, words: Any, finite: bool) -> Callable:
    """Device function (address, places, col, width, buffer, k0) -> int: a piece of the columns of a
    block, 0 where there is none; returns 1 if a number of it is not finite.
    """
    real, load = np.dtype(dtype).type, words.load(storage)
    threads, block_v, size = tile.threads, tile.block_v, tile.piece_keys * tile.block_v

    @words.device(types.int64)
    def load_piece(address, places, col, width, buffer, k0):
        first = np.int64(cuda.blockIdx.y) * block_v
        e = np.int64(cuda.threadIdx.x & LAST_THREAD)
        found = np.int64(0)
        while e < size:
            r, d = k0 + e // block_v, first + e % block_v
            value = real(0)
            if places[r] != NOWHERE and d < width:
                value = load(address, places[r] + d * col)
            if value - value != 0:
                if finite:
                    value = real(0)
                else:
                    found = np.int64(1)
            buffer[U8(e)] = value
            e += threads
        return found

    return load_piece
