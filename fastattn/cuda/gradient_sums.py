"""Gradients that are sums over much: of a bias over all that shares one of its elements, of sinks
and slopes over rows. As elsewhere, a thread block owns what it writes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import cuda, types

from ..problem import Variant
from .compile import Source
from .entry import entry_of, set_keys, set_queries, shared_arrays
from .gradient_scores import differentiate
from .job import GradientJob
from .place import member_of
from .products import row_product
from .scores import offset_of_entry
from .tile import LAST_THREAD, ROW_THREADS, Tile


def bias_source(variant: Variant, tile: Tile, stored: str) -> Source:
    """The kernel as it is translated for a GPU."""
    from . import words

    return Source(bias_kernel(variant, tile, stored, words), tile.threads, 2, job=GradientJob)


def row_sums_source(variant: Variant, of: str, stored: str) -> Source:
    """The kernel as it is translated for a GPU."""
    from . import words

    kernel = row_sums_kernel(variant, of, stored, ROW_THREADS, words)
    return Source(kernel, ROW_THREADS, job=GradientJob)


def owner_of_entry(words: Any) -> Callable:
    """Device function (table, stride, b): the first batch entry that shares b's part of an
    operand, in which 0 strides stand for sums.
    """
    start_of = offset_of_entry(words)

    @words.device(types.int64)
    def owner(table, stride, b):
        other = np.int64(0)
        while start_of(table, stride, other) != start_of(table, stride, b):
            other += 1
        return other

    return owner


def bias_kernel(variant: Variant, tile: Tile, stored: str, words: Any) -> Callable:
    """Kernel (job): dbias, a tile of the array's rows and keys for each thread block; its grid is
    m_blocks * num_splits * heads_q * batch, where num_splits are blocks of keys. What has a stride
    of 0 is summed by its first block.

    stored  the dtype of dbias
    """
    real, block_m, block_n = np.dtype(variant.dtype).type, tile.block_m, tile.block_n
    buffer_size, own_scores = tile.gradient_size, tile.rows * tile.keys
    arrays = shared_arrays(variant.dtype, block_m, block_n, words)
    add_tile, put = tile_adder(variant, tile, words), put_tile(variant, tile, stored, words)
    owner, entry_at, start_of = owner_of_entry(words), entry_of(words), offset_of_entry(words)

    def kernel(job):
        buffer = cuda.shared.array(buffer_size, real)
        rows, keys = arrays()
        acc = cuda.local.array(own_scores, real)
        for e in range(own_scores):
            acc[e] = real(0)
        item = np.int64(cuda.blockIdx.x)
        m_first, item = item % job.m_blocks * block_m, item // job.m_blocks
        n_first, item = item % job.num_splits * block_n, item // job.num_splits
        head, b = item % job.heads_q, item // job.heads_q
        all_heads, all_rows, all_keys = job.dbias_head == 0, job.dbias_row == 0, job.dbias_col == 0
        repeats = (
            (all_heads and head > 0) or (all_rows and m_first > 0) or (all_keys and n_first > 0)
        )
        if repeats or owner(job.dbias_table, job.dbias_batch, b) != b:
            return
        part = start_of(job.dbias_table, job.dbias_batch, b)
        last_row = last_key = np.int64(0)
        for other in range(b, job.batch):
            if start_of(job.dbias_table, job.dbias_batch, other) == part:
                for h in range(0 if all_heads else head, job.heads_q if all_heads else head + 1):
                    entry = entry_at(job, other, h // job.group)
                    last_row = max(last_row, entry.q_len)
                    last_key = max(last_key, entry.kv_start + entry.seqlen_k)
                    m_stop = entry.q_len if all_rows else min(entry.q_len, m_first + block_m)
                    n_stop = entry.kv_start + entry.seqlen_k
                    n_stop = n_stop if all_keys else min(n_stop, n_first + block_n)
                    for m0 in range(m_first, m_stop, block_m):
                        for n0 in range(n_first, n_stop, block_n):
                            add_tile(
                                job, entry, rows, keys, buffer, h, m0, n0 - entry.kv_start, acc
                            )
        put(job, b, head, m_first, n_first, last_row, last_key, buffer, acc)

    return kernel


def tile_adder(variant: Variant, tile: Tile, words: Any) -> Callable:
    """Device function (job, entry, rows, keys, buffer, head, m0, n0, acc): acc += ds of a tile."""
    real, block_m, block_n = np.dtype(variant.dtype).type, tile.block_m, tile.block_n
    threads_m, threads_n, own_keys = tile.threads_m, tile.threads_n, tile.keys
    p_start, p_pitch, own_rows = tile.piece_size, tile.p_pitch, tile.rows
    ds_start = p_start + tile.p_size
    fill_rows, fill_keys = set_queries(variant.dtype, block_m, words), set_keys(block_n, words)
    multiply = row_product(variant.dtype, variant.storage, tile, words)
    change = differentiate(variant, tile, words, keys_own=False)

    @words.device(types.void)
    def add(job, entry, rows, keys, buffer, head, m0, n0, acc):
        cuda.syncthreads()
        fill_rows(job, entry, rows, m0, entry.q_len, np.int64(1), head)
        fill_keys(job, entry, keys, n0, entry.seqlen_k)
        a, b = (job.q, rows.q, job.q_col), (job.k, keys.k, job.k_col)
        multiply(*a, *b, job.head_dim, real(job.scale), buffer, p_start)
        a, b = (job.dout, rows.dout, job.dout_col), (job.v, keys.v, job.v_col)
        multiply(*a, *b, job.head_dim_v, real(1), buffer, ds_start)
        change(job, entry, rows, buffer, n0)
        tid = np.int64(cuda.threadIdx.x & LAST_THREAD)
        ty, tx = tid // threads_n, tid % threads_n
        for m in range(own_rows):
            for n in range(own_keys):
                at = p_start + (ty + threads_m * m) * p_pitch + tx + threads_n * n
                acc[m * own_keys + n] += buffer[at]

    return add


def put_tile(variant: Variant, tile: Tile, stored: str, words: Any) -> Callable:
    """Device function (job, b, head, m_first, n_first, last_row, last_key, buffer, acc): write a
    tile of dbias, summed along axes whose stride is 0.
    """
    threads_m, threads_n, own_keys = tile.threads_m, tile.threads_n, tile.keys
    block_m, block_n, own_rows, pitch = tile.block_m, tile.block_n, tile.rows, tile.p_pitch
    real, threads, size = np.dtype(variant.dtype).type, tile.threads, tile.block_m * tile.block_n
    start_of, keep = offset_of_entry(words), words.store(stored)
    kept = getattr(np, "float64" if stored == "float64" else "float32")

    @words.device(types.void)
    def put(job, b, head, m_first, n_first, last_row, last_key, buffer, acc):
        tid = np.int64(cuda.threadIdx.x & LAST_THREAD)
        ty, tx = tid // threads_n, tid % threads_n
        cuda.syncthreads()
        for m in range(own_rows):
            for n in range(own_keys):
                at = (ty + threads_m * m) * pitch + tx + threads_n * n
                buffer[at] = acc[m * own_keys + n]
        cuda.syncthreads()
        more_rows = block_m if job.dbias_row == 0 else 1
        more_keys = block_n if job.dbias_col == 0 else 1
        e = tid
        while e < size:
            r, c = e // block_n, e % block_n
            once = r % more_rows == 0 and c % more_keys == 0
            if once and m_first + r < last_row and n_first + c < last_key:
                total = real(0)
                for row in range(r, r + more_rows):
                    for key in range(c, c + more_keys):
                        total += buffer[row * pitch + key]
                at = start_of(job.dbias_table, job.dbias_batch, b) + head * job.dbias_head
                at += (m_first + r) * job.dbias_row + (n_first + c) * job.dbias_col
                keep(job.dbias, at, kept(total))
            e += threads

    return put


def row_sums_kernel(variant: Variant, of: str, stored: str, threads: int, words: Any) -> Callable:
    """Kernel (job): dsinks or dalibi, as `of` says: the sum of all rows' parts of a head, for each
    batch entry of its own or all that share it; its grid is heads_q * batch.
    """
    real, load, keep = np.dtype(variant.dtype).type, words.load(variant.dtype), words.store(stored)
    kept = getattr(np, "float64" if stored == "float64" else "float32")
    owner, member, start_of = owner_of_entry(words), member_of(words), offset_of_entry(words)
    of_sinks = of == "dsinks"

    def kernel(job):
        parts = cuda.shared.array(threads, real)
        tid = np.int64(cuda.threadIdx.x & LAST_THREAD)
        head, b = cuda.blockIdx.x % job.heads_q, cuda.blockIdx.x // job.heads_q
        table, stride = (
            (job.dsinks_table, job.dsinks_batch)
            if of_sinks
            else (job.dalibi_table, job.dalibi_batch)
        )
        if owner(table, stride, b) != b:
            return
        part = start_of(table, stride, b)
        rows, total = job.sink_rows if of_sinks else job.alibi_rows, real(0)
        for other in range(b, job.batch):
            if start_of(table, stride, other) == part:
                first = (other * job.heads_q + head) * job.seqlen_q
                i, stop = tid, member(job, other)[0]
                if of_sinks and job.starts == 0:
                    stop = job.seqlen_q  # also rows past q_len, whose lse is the sink
                while i < stop:
                    total += load(rows, first + i)
                    i += threads
        parts[tid] = total
        cuda.syncthreads()
        if tid == 0:
            total = real(0)
            for t in range(threads):
                total += parts[t]
            if of_sinks:
                keep(job.dsinks, part + head * job.dsinks_head, kept(total))
            else:
                keep(job.dalibi, part + head * job.dalibi_head, kept(total))

    return kernel
