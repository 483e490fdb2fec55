"""How results of the SIMT kernels leave a block: to out and lse, or as one part of the keys."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import cuda, types

from ..problem import Variant
from .scores import offset_of_entry
from .tile import LAST_THREAD, Tile


def write_block(variant: Variant, tile: Tile, words: Any) -> Callable:
    """Device function (job, block, rows, buffer, row_max, row_sum, acc)."""
    threads_m, threads_n, values = tile.threads_m, tile.threads_n, tile.values
    own_rows, block_v = tile.rows, tile.block_v
    write_values = write_columns(variant, tile, words)
    write_state = write_sums(variant.dtype, tile, words)

    @words.device(types.void)
    def write(job, block, rows, buffer, row_max, row_sum, acc):
        tid = np.int64(cuda.threadIdx.x & LAST_THREAD)
        ty, tx = tid // threads_n, tid % threads_n
        cuda.syncthreads()
        for m in range(own_rows):
            for c in range(values):
                at = (ty + threads_m * m) * block_v + tx + threads_n * c
                buffer[at] = acc[m * values + c]
        cuda.syncthreads()
        write_values(job, block, rows, buffer, row_sum)
        if cuda.blockIdx.y == 0:
            write_state(job, block, rows, row_max, row_sum)

    return write


def partial_row(words: Any) -> Callable:
    """Device function (job, b, head, i, split): the row of the partial results."""

    @words.device(types.int64)
    def row(job, b, head, i, split):
        return ((b * job.heads_q + head) * job.seqlen_q + i) * job.num_splits + split

    return row


def write_columns(variant: Variant, tile: Tile, words: Any) -> Callable:
    """Device function (job, block, rows, buffer, row_sum): a row that saw no key is 0."""
    real = np.dtype(variant.dtype).type
    store, keep = words.store(variant.storage), words.store(variant.dtype)
    threads, block_v, size = tile.threads, tile.block_v, tile.block_m * tile.block_v
    partial = partial_row(words)

    @words.device(types.void)
    def write(job, block, rows, buffer, row_sum):
        first = np.int64(cuda.blockIdx.y) * block_v
        e = np.int64(cuda.threadIdx.x & LAST_THREAD)
        while e < size:
            r, d = e // block_v, first + e % block_v
            i, head = rows.i[r], rows.head[r]
            if i >= 0 and d < job.head_dim_v:
                if job.num_splits > 1:
                    row = partial(job, block.b, head, i, block.split)
                    keep(job.partial, row * job.head_dim_v + d, buffer[e])
                else:
                    # Only 0 means nothing was seen. A NaN sum must stay NaN.
                    total = real(1) if row_sum[r] == 0 else row_sum[r]
                    at = block.out + head * job.out_head + i * job.out_row + d * job.out_col
                    store(job.out, at, buffer[e] / total * real(job.dropout_factor))
            e += threads

    return write


def write_sums(dtype: str, tile: Tile, words: Any) -> Callable:
    """Device function (job, block, rows, row_max, row_sum): lse, or what combine.py makes it of."""
    keep, log, block_m = words.store(dtype), words.functions(dtype).log, tile.block_m
    partial = partial_row(words)

    @words.device(types.void)
    def write(job, block, rows, row_max, row_sum):
        r = np.int64(cuda.threadIdx.x & LAST_THREAD)
        if r < block_m and rows.i[r] >= 0:
            i, head = rows.i[r], rows.head[r]
            if job.num_splits > 1:
                row = partial(job, block.b, head, i, block.split)
                keep(job.partial_state, 2 * row, row_max[r])
                keep(job.partial_state, 2 * row + 1, row_sum[r])
            elif job.lse != 0:
                at = block.lse + head * job.lse_head + i * job.lse_row
                keep(job.lse, at, row_max[r] + log(row_sum[r]))

    return write


def write_row(variant: Variant, words: Any) -> Callable:
    """Device function (job, b, head, i, d, value, lse): one number of out, and lse with the first
    one of a row.
    """
    store, keep = words.store(variant.storage), words.store(variant.dtype)
    offset, load = offset_of_entry(words), words.load("int64")

    @words.device(types.void)
    def write(job, b, head, i, d, value, lse):
        row = i
        if job.starts != 0:
            row += load(job.starts, 2 * b)
        at = offset(job.out_table, job.out_batch, b) + head * job.out_head
        store(job.out, at + row * job.out_row + d * job.out_col, value)
        if d == 0 and job.lse != 0:
            at = offset(job.lse_table, job.lse_batch, b) + head * job.lse_head
            keep(job.lse, at + row * job.lse_row, lse)

    return write
