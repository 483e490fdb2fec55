"""Attention on any NVIDIA GPU, for all dtypes, sizes and options: no tensor cores, plain Numba.

A block of threads takes block_m rows of all query heads that share a key head, and block_n keys at
a time: scores to shared memory, the running softmax row by row, then the product with v into
registers. Scores and sums are of Variant.dtype.

Source: Dao 2023, FlashAttention-2, arXiv:2307.08691, algorithm 1.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import cuda

from ..problem import Variant
from .compile import Source
from .place import Rows, locate_block, set_keys, set_rows
from .products import row_product, weighted_sum
from .softmax import change_scores, fold_scores, skipped_tile, start_rows
from .tile import Tile
from .writing import write_block


def forward_source(variant: Variant, tile: Tile) -> Source:
    """The kernel as it is translated for a GPU."""
    from . import words

    return Source(forward_kernel(variant, tile, words), tile.threads, min_blocks=2)


def forward_kernel(variant: Variant, tile: Tile, words: Any) -> Callable:
    """Kernel (job): see job.FIELDS."""
    real = np.dtype(variant.dtype).type
    block_m, block_n, acc_size = tile.block_m, tile.block_n, tile.rows * tile.values
    buffer_size, parts_size = tile.buffer_size, tile.block_m * (tile.threads_n + 1)
    locate, fill = locate_block(variant, tile, words), set_rows(tile, words)
    find_keys = set_keys(variant, tile, words)
    begin, fold = start_rows(variant.dtype, tile, words), fold_scores(variant, tile, words)
    multiply = row_product(variant.dtype, variant.storage, tile, words)
    weigh = weighted_sum(variant.dtype, variant.storage, tile, words, finite=False)
    p_start = tile.piece_size
    change, skips = change_scores(variant, tile, words), skipped_tile(variant, tile, words)
    write = write_block(variant, tile, words)

    def kernel(job):
        buffer = cuda.shared.array(buffer_size, real)
        parts = cuda.shared.array(parts_size, real)
        row_max = cuda.shared.array(block_m, real)
        row_sum = cuda.shared.array(block_m, real)
        alpha = cuda.shared.array(block_m, real)
        rows = Rows(
            cuda.shared.array(block_m, np.int64),
            cuda.shared.array(block_m, np.int64),
            cuda.shared.array(block_m, np.int64),
            cuda.shared.array(block_m, np.uint64),
            cuda.shared.array(block_n, np.int64),
            cuda.shared.array(block_n, np.int64),
        )
        acc = cuda.local.array(acc_size, real)
        for e in range(acc_size):
            acc[e] = real(0)
        block = locate(job)
        if block.num_rows == 0:
            return
        fill(job, block, rows)
        begin(job, rows, row_max, row_sum)
        cuda.syncthreads()
        n0 = block.n_start
        while n0 < block.n_stop:
            if not skips(job, block, rows, n0):
                find_keys(job, block, rows, n0)
                a, b = (job.q, rows.q, job.q_col), (job.k, rows.k, job.k_col)
                multiply(*a, *b, job.head_dim, real(job.scale), buffer, p_start)
                hidden = change(job, block, rows, buffer, n0)
                fold(job, rows, buffer, parts, row_max, row_sum, alpha, acc, hidden, n0)
                count = block.n_stop - n0
                weigh(job.v, rows.v, job.v_col, job.head_dim_v, count, buffer, p_start, acc)
            n0 += block_n
        write(job, block, rows, buffer, row_max, row_sum, acc)

    return kernel
