"""Gradients on any NVIDIA GPU, for all dtypes, sizes and options: no tensor cores, plain Numba.

Each thread block owns what it writes, a tile of rows of dq, of keys of dk and dv, or of dbias, and
computes the scores that it needs anew: nothing is added by several, and two calls give the same
bits. Scores and sums are of Variant.dtype.

Source: Dao 2023, FlashAttention-2, arXiv:2307.08691, algorithm 2.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import cuda, types

from ..problem import Variant
from .compile import Source
from .entry import entry_of, query_range_of, set_keys, set_queries, shared_arrays
from .gradient_scores import differentiate
from .job import GradientJob
from .place import NOWHERE, key_range_of
from .products import row_product, weighted_sum
from .scores import offset_of_entry
from .tile import LAST_THREAD, Tile


def query_source(variant: Variant, tile: Tile) -> Source:
    """The kernel as it is translated for a GPU."""
    from . import words

    return Source(query_kernel(variant, tile, words), tile.threads, 2, job=GradientJob)


def key_source(variant: Variant, tile: Tile) -> Source:
    """The kernel as it is translated for a GPU."""
    from . import words

    return Source(key_kernel(variant, tile, words), tile.threads, 2, job=GradientJob)


def query_kernel(variant: Variant, tile: Tile, words: Any) -> Callable:
    """Kernel (job): dq, and each row's part of dalibi, for blocks of block_m rows, of all heads
    that share a key head; its grid is m_blocks * heads_kv * batch, pieces of head_dim.
    """
    real, block_m, block_n = np.dtype(variant.dtype).type, tile.block_m, tile.block_n
    buffer_size, acc_size = tile.gradient_size, tile.rows * tile.values
    p_start, ds_start = tile.piece_size, tile.piece_size + tile.p_size
    entry_at, key_range = entry_of(words), key_range_of(words)
    arrays = shared_arrays(variant.dtype, block_m, block_n, words)
    fill_rows, fill_keys = set_queries(variant.dtype, block_m, words), set_keys(block_n, words)
    multiply = row_product(variant.dtype, variant.storage, tile, words)
    weigh = weighted_sum(variant.dtype, variant.storage, tile, words, finite=True)
    change = differentiate(variant, tile, words, keys_own=False)
    slopes, store = slope_rows(variant.dtype, tile, words), store_tile(variant, tile, words)
    move, keep = move_queries(block_m, words), words.store(variant.dtype)

    def kernel(job):
        buffer = cuda.shared.array(buffer_size, real)
        rows, keys = arrays()
        acc, total = cuda.local.array(acc_size, real), real(0)
        for e in range(acc_size):
            acc[e] = real(0)
        item = np.int64(cuda.blockIdx.x)
        # The last rows first: under a causal mask they take longest.
        first = (job.m_blocks - 1 - item % job.m_blocks) * block_m
        item = item // job.m_blocks
        entry = entry_at(job, item // job.heads_kv, item % job.heads_kv)
        stop_row, first_head = entry.q_len * job.group, entry.kv_head * job.group
        if first >= stop_row:
            return
        fill_rows(job, entry, rows, first, stop_row, job.group, first_head)
        last = min(first + block_m, stop_row) - 1
        top, bottom = first // job.group + entry.offset, last // job.group + entry.offset
        n0, stop = key_range(job, top, bottom, entry.seqlen_k)
        while n0 < stop:
            fill_keys(job, entry, keys, n0, stop)
            a, b = (job.q, rows.q, job.q_col), (job.k, keys.k, job.k_col)
            multiply(*a, *b, job.head_dim, real(job.scale), buffer, p_start)
            a, b = (job.dout, rows.dout, job.dout_col), (job.v, keys.v, job.v_col)
            multiply(*a, *b, job.head_dim_v, real(1), buffer, ds_start)
            change(job, entry, rows, buffer, n0)
            b = (job.k, keys.k, job.k_col)
            weigh(*b, job.head_dim, stop - n0, buffer, ds_start, acc)
            if job.alibi_rows != 0:
                total += slopes(entry, rows, buffer, n0)
            n0 += block_n
        r = np.int64(cuda.threadIdx.x & LAST_THREAD)
        if job.alibi_rows != 0 and cuda.blockIdx.y == 0 and r < block_m and rows.i[r] >= 0:
            row = (entry.b * job.heads_q + rows.head[r]) * job.seqlen_q + rows.i[r]
            keep(job.alibi_rows, row, total)
        move(job, entry, rows)
        store(job.dq, rows.q, job.dq_col, job.head_dim, real(job.scale), buffer, acc)

    return kernel


def key_kernel(variant: Variant, tile: Tile, words: Any) -> Callable:
    """Kernel (job): dk and dv, for blocks of block_m keys; its grid is m_blocks * heads_kv * batch,
    pieces of head_dim and head_dim_v, where m_blocks are blocks of keys.
    """
    real, block_m, block_n = np.dtype(variant.dtype).type, tile.block_m, tile.block_n
    buffer_size, acc_size = tile.gradient_size, tile.rows * tile.values
    p_start, ds_start = tile.piece_size, tile.piece_size + tile.p_size
    entry_at, query_range = entry_of(words), query_range_of(words)
    arrays = shared_arrays(variant.dtype, block_n, block_m, words)
    fill_rows, fill_keys = set_queries(variant.dtype, block_n, words), set_keys(block_m, words)
    multiply = row_product(variant.dtype, variant.storage, tile, words)
    weigh = weighted_sum(variant.dtype, variant.storage, tile, words, finite=True)
    change = differentiate(variant, tile, words, keys_own=True)
    store, move = store_tile(variant, tile, words), move_keys(block_m, words)

    def kernel(job):
        buffer = cuda.shared.array(buffer_size, real)
        rows, keys = arrays()
        dk, dv = cuda.local.array(acc_size, real), cuda.local.array(acc_size, real)
        for e in range(acc_size):
            dk[e] = real(0)
            dv[e] = real(0)
        item = np.int64(cuda.blockIdx.x)
        first, item = item % job.m_blocks * block_m, item // job.m_blocks
        entry = entry_at(job, item // job.heads_kv, item % job.heads_kv)
        if first >= entry.seqlen_k:
            return
        fill_keys(job, entry, keys, first, entry.seqlen_k)
        last = min(first + block_m, entry.seqlen_k) - 1
        n0, stop = query_range(job, entry, first, last)
        n0, stop, first_head = n0 * job.group, stop * job.group, entry.kv_head * job.group
        while n0 < stop:
            fill_rows(job, entry, rows, n0, stop, job.group, first_head)
            a, b = (job.k, keys.k, job.k_col), (job.q, rows.q, job.q_col)
            multiply(*a, *b, job.head_dim, real(job.scale), buffer, p_start)
            a, b = (job.v, keys.v, job.v_col), (job.dout, rows.dout, job.dout_col)
            multiply(*a, *b, job.head_dim_v, real(1), buffer, ds_start)
            change(job, entry, rows, buffer, first)
            weigh(*b, job.head_dim_v, stop - n0, buffer, p_start, dv)
            b = (job.q, rows.q, job.q_col)
            weigh(*b, job.head_dim, stop - n0, buffer, ds_start, dk)
            n0 += block_n
        move(job, entry, keys, first)
        store(job.dk, keys.k, job.dk_col, job.head_dim, real(job.scale), buffer, dk)
        store(job.dv, keys.v, job.dv_col, job.head_dim_v, real(1), buffer, dv)

    return kernel


def move_queries(size: int, words: Any) -> Callable:
    """Device function (job, entry, rows): rows.q becomes the rows' places in dq."""
    start_of = offset_of_entry(words)

    @words.device(types.void)
    def move(job, entry, rows):
        r = np.int64(cuda.threadIdx.x & LAST_THREAD)
        if r < size and rows.i[r] >= 0:
            at = start_of(job.dq_table, job.dq_batch, entry.b) + rows.head[r] * job.dq_head
            rows.q[r] = at + (entry.first_q + rows.i[r]) * job.dq_row

    return move


def move_keys(size: int, words: Any) -> Callable:
    """Device function (job, entry, keys, first): keys become the keys' places in dk and dv."""
    start_of = offset_of_entry(words)

    @words.device(types.void)
    def move(job, entry, keys, first):
        r = np.int64(cuda.threadIdx.x & LAST_THREAD)
        if r < size and keys.k[r] != NOWHERE:
            row = entry.first_k + first + r
            dk = start_of(job.dk_table, job.dk_batch, entry.b) + entry.kv_head * job.dk_head
            dv = start_of(job.dv_table, job.dv_batch, entry.b) + entry.kv_head * job.dv_head
            keys.k[r], keys.v[r] = dk + row * job.dk_row, dv + row * job.dv_row

    return move


def slope_rows(dtype: str, tile: Tile, words: Any) -> Callable:
    """Device function (entry, rows, buffer, first_key): sum of -ds * distance of a row of the tile,
    for the thread of its number; 0 for others.
    """
    real, block_m, block_n = np.dtype(dtype).type, tile.block_m, tile.block_n
    p_start, p_pitch = tile.piece_size, tile.p_pitch

    @words.device(getattr(types, dtype))
    def slopes(entry, rows, buffer, first_key):
        total, r = real(0), np.int64(cuda.threadIdx.x & LAST_THREAD)
        if r < block_m:
            for c in range(block_n):
                distance = abs(rows.i[r] + entry.offset - first_key - c)
                total -= buffer[p_start + r * p_pitch + c] * real(distance)
        return total

    return slopes


def store_tile(variant: Variant, tile: Tile, words: Any) -> Callable:
    """Device function (address, places, col, width, factor, buffer, acc): factor * acc, rounded, to
    rows at these places.
    """
    threads_m, threads_n, values = tile.threads_m, tile.threads_n, tile.values
    own_rows, block_v, threads = tile.rows, tile.block_v, tile.threads
    size, put = tile.block_m * tile.block_v, words.store(variant.storage)

    @words.device(types.void)
    def store(address, places, col, width, factor, buffer, acc):
        tid = np.int64(cuda.threadIdx.x & LAST_THREAD)
        ty, tx = tid // threads_n, tid % threads_n
        cuda.syncthreads()
        for m in range(own_rows):
            for c in range(values):
                buffer[(ty + threads_m * m) * block_v + tx + threads_n * c] = acc[m * values + c]
        cuda.syncthreads()
        first, e = np.int64(cuda.blockIdx.y) * block_v, tid
        while e < size:
            r, d = e // block_v, first + e % block_v
            if places[r] != NOWHERE and d < width:
                put(address, places[r] + d * col, factor * buffer[e])
            e += threads

    return store
