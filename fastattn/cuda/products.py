"""The two products of the SIMT kernel: pieces of q, k and v in shared memory, sums in registers.

Loops with constant bounds over local arrays are unrolled by NVVM, which then keeps the arrays in
registers; so no local array is ever indexed by anything else (tests/test_ptx.py looks).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import cuda, types

from .tile import LAST_THREAD, Tile

# Numba counts negative indices from the end, which takes four instructions; unsigned ones it takes
# as they are.
U8 = np.uint64


def score_product(dtype: str, storage: str, tile: Tile, words: Any) -> Callable:
    """Device function (job, block, rows, buffer, n0): scale * q @ k.T of one tile, each thread's
    part of it to where probabilities lie.
    """
    real = np.dtype(dtype).type
    threads_m, threads_n, keys = tile.threads_m, tile.threads_n, tile.keys
    own_rows, own_scores = tile.rows, tile.rows * tile.keys
    depth, pitch, k_piece = tile.depth, tile.pitch, tile.block_m * tile.pitch
    p_start, p_pitch = tile.piece_size, tile.p_pitch
    load_q, load_k = _load_q(storage, dtype, tile, words), _load_k(storage, dtype, tile, words)

    @words.device(types.void)
    def product(job, block, rows, buffer, n0):
        s = cuda.local.array(own_scores, real)
        q = cuda.local.array(own_rows, real)
        for e in range(own_scores):
            s[e] = real(0)
        tid = np.int64(cuda.threadIdx.x & LAST_THREAD)
        ty, tx = tid // threads_n, tid % threads_n
        d0 = np.int64(0)
        while d0 < job.head_dim:
            cuda.syncthreads()
            load_q(job, rows, buffer, d0)
            load_k(job, block, rows, buffer, n0, d0)
            cuda.syncthreads()
            for d in range(depth):
                for m in range(own_rows):
                    q[m] = buffer[U8((ty + threads_m * m) * pitch + d)]
                for n in range(keys):
                    k = buffer[U8(k_piece + (tx + threads_n * n) * pitch + d)]
                    for m in range(own_rows):
                        s[m * keys + n] += q[m] * k
            d0 += depth
        for m in range(own_rows):
            for n in range(keys):
                at = p_start + (ty + threads_m * m) * p_pitch + tx + threads_n * n
                buffer[at] = real(job.scale) * s[m * keys + n]

    return product


def _load_q(storage: str, dtype: str, tile: Tile, words: Any) -> Callable:
    """Device function (job, rows, buffer, d0): a piece of q; 0 where there is none."""
    real, load = np.dtype(dtype).type, words.load(storage)
    depth, pitch, threads = tile.depth, tile.pitch, tile.threads
    loads = -(-tile.block_m * depth // threads)
    size, step = tile.block_m * depth, threads // depth

    @words.device(types.void)
    def load_piece(job, rows, buffer, d0):
        tid = np.int64(cuda.threadIdx.x & LAST_THREAD)
        d, r = tid % depth, tid // depth
        for n in range(loads):
            if tid + n * threads < size:
                value = real(0)
                if rows.i[r] >= 0 and d0 + d < job.head_dim:
                    value = load(job.q, rows.q[r] + (d0 + d) * job.q_col)
                buffer[U8(r * pitch + d)] = value
            r += step

    return load_piece


def _load_k(storage: str, dtype: str, tile: Tile, words: Any) -> Callable:
    """Device function (job, block, rows, buffer, n0, d0): a piece of k; 0 where there is none."""
    real, load = np.dtype(dtype).type, words.load(storage)
    depth, pitch, threads = tile.depth, tile.pitch, tile.threads
    loads = -(-tile.block_n * depth // threads)
    size, step = tile.block_n * depth, threads // depth
    start = tile.block_m * pitch

    @words.device(types.void)
    def load_piece(job, block, rows, buffer, n0, d0):
        tid = np.int64(cuda.threadIdx.x & LAST_THREAD)
        d, r = tid % depth, tid // depth
        for n in range(loads):
            if tid + n * threads < size:
                value = real(0)
                if n0 + r < block.n_stop and d0 + d < job.head_dim:
                    value = load(job.k, rows.k[r] + (d0 + d) * job.k_col)
                buffer[U8(start + r * pitch + d)] = value
            r += step

    return load_piece


def value_product(dtype: str, storage: str, tile: Tile, words: Any) -> Callable:
    """Device function (job, block, rows, buffer, acc, n0): acc += p @ v of one tile.

    A hidden key has p = -0.0. It contributes nothing, whatever v holds; one that is seen and has
    p = 0 contributes 0 * v.
    """
    real = np.dtype(dtype).type
    threads_m, threads_n, values = tile.threads_m, tile.threads_n, tile.values
    own_rows, block_n, block_v = tile.rows, tile.block_n, tile.block_v
    p_start, p_pitch, piece = tile.piece_size, tile.p_pitch, tile.piece_keys
    load_v = _load_v(storage, dtype, tile, words)
    add_seen = _add_seen(dtype, tile, words)

    @words.device(types.void)
    def product(job, block, rows, buffer, acc, n0):
        tid = np.int64(cuda.threadIdx.x & LAST_THREAD)
        ty, tx = tid // threads_n, tid % threads_n
        v = cuda.local.array(values, real)
        k0 = np.int64(0)
        while k0 < block_n and n0 + k0 < block.n_stop:
            cuda.syncthreads()
            # Also the barrier between loads and use.
            if cuda.syncthreads_or(load_v(job, block, rows, buffer, n0, k0)):
                add_seen(buffer, acc, k0)
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
    """Device function (buffer, acc, k0): the same for a piece of v that is not all finite."""
    real, copysign = np.dtype(dtype).type, words.functions(dtype).copysign
    threads_m, threads_n, values = tile.threads_m, tile.threads_n, tile.values
    own_rows, block_v, piece = tile.rows, tile.block_v, tile.piece_keys
    p_start, p_pitch = tile.piece_size, tile.p_pitch
    one, none = real(1), real(0)

    @words.device(types.void)
    def add(buffer, acc, k0):
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


def _load_v(storage: str, dtype: str, tile: Tile, words: Any) -> Callable:
    """Device function (job, block, rows, buffer, n0, k0) -> int: a piece of v, 0 where there is
    none; returns 1 if a number of it is not finite.
    """
    real, load = np.dtype(dtype).type, words.load(storage)
    threads, block_v, size = tile.threads, tile.block_v, tile.piece_keys * tile.block_v

    @words.device(types.int64)
    def load_piece(job, block, rows, buffer, n0, k0):
        first = np.int64(cuda.blockIdx.y) * block_v
        e = np.int64(cuda.threadIdx.x & LAST_THREAD)
        found = np.int64(0)
        while e < size:
            r, d = k0 + e // block_v, first + e % block_v
            value = real(0)
            if n0 + r < block.n_stop and d < job.head_dim_v:
                value = load(job.v, rows.v[r] + d * job.v_col)
            if value - value != 0:
                found = np.int64(1)
            buffer[U8(e)] = value
            e += threads
        return found

    return load_piece
