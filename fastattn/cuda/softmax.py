"""The running softmax of the SIMT kernel, a tile of scores at a time, in shared memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import cuda, types

from ..block_mask import SKIPPED
from ..problem import Variant
from . import random
from .scores import changed_score, visible_key
from .tile import LAST_THREAD, Tile


def start_rows(dtype: str, tile: Tile, words: Any) -> Callable:
    """Device function (job, rows, row_max, row_sum): the state before any key; a sink is a score
    that has been seen. Splits leave it to combine.py.
    """
    real, load, exp = np.dtype(dtype).type, words.load(dtype), words.functions(dtype).exp
    block_m, empty = tile.block_m, np.dtype(dtype).type(-np.inf)

    @words.device(types.void)
    def start(job, rows, row_max, row_sum):
        r = np.int64(cuda.threadIdx.x & LAST_THREAD)
        if r < block_m:
            best, total = empty, real(0)
            if job.sinks != 0 and job.num_splits == 1:
                best = load(job.sinks, rows.head[r])
                if best != empty:
                    total = exp(best - best)
            row_max[r] = best
            row_sum[r] = total

    return start


def change_scores(variant: Variant, tile: Tile, words: Any) -> Callable:
    """Device function (job, block, rows, buffer, n0) -> int: change the thread's own scores as bias
    and modifiers say; bit e of the result is 1 where score e is hidden.
    """
    threads_m, threads_n, keys = tile.threads_m, tile.threads_n, tile.keys
    own_scores, p_start, p_pitch = tile.rows * tile.keys, tile.piece_size, tile.p_pitch
    change, visible = changed_score(variant, words), visible_key(variant, words)
    is_whole = whole_tile(variant, tile, words)

    @words.device(types.int64)
    def change_own(job, block, rows, buffer, n0):
        hidden = np.int64(0)
        whole = is_whole(job, block, n0)
        if whole and job.changes_scores == 0:
            return hidden
        tid = np.int64(cuda.threadIdx.x & LAST_THREAD)
        ty, tx = tid // threads_n, tid % threads_n
        for e in range(own_scores):
            r, c = ty + threads_m * (e // keys), tx + threads_n * (e % keys)
            i, j, head = rows.i[r], n0 + c, rows.head[r]
            seen = whole or (i >= 0 and j < block.n_stop and visible(job, block, head, i, j))
            if seen and job.changes_scores != 0:
                at = p_start + r * p_pitch + c
                score, gone = change(job, block, buffer[at], head, i, j)
                buffer[at] = score
                seen = not gone
            if not seen:
                hidden |= np.int64(1) << np.int64(e)
        return hidden

    return change_own


def whole_tile(variant: Variant, tile: Tile, words: Any) -> Callable:
    """Device function (job, block, n0): whether all rows of the tile exist and see all of its
    keys.
    """
    block_m, block_n = tile.block_m, tile.block_n
    masked = variant.mask_mod is not None

    @words.device(types.boolean)
    def is_whole(job, block, n0):
        first = block.first_row // job.group + block.offset
        last = (block.first_row + block_m - 1) // job.group + block.offset
        if masked or job.mask != 0 or job.chunk != 0:
            return False
        if n0 + block_n > block.n_stop or block.first_row + block_m > block.num_rows:
            return False
        return n0 >= last - job.left and n0 + block_n - 1 <= first + job.right

    return is_whole


def skipped_tile(variant: Variant, tile: Tile, words: Any) -> Callable:
    """Device function (job, block, rows, n0): whether the block mask skips all of the tile."""
    load = words.load("uint8")
    threads_m, threads_n, keys = tile.threads_m, tile.threads_n, tile.keys
    own_rows, masked = tile.rows, variant.mask_mod is not None

    @words.device(types.boolean)
    def skips(job, block, rows, n0):
        if not masked or job.block_mask == 0:
            return False
        tid = np.int64(cuda.threadIdx.x & LAST_THREAD)
        ty, tx = tid // threads_n, tid % threads_n
        found = np.int64(0)
        for m in range(own_rows):
            r = ty + threads_m * m
            at = block.b * job.block_mask_batch + rows.head[r] * job.block_mask_head
            at += max(rows.i[r], np.int64(0)) // job.block_mask_m * job.block_mask_row
            for n in range(keys):
                j = min(n0 + tx + threads_n * n, block.n_stop - 1) + block.first_key
                kind = load(job.block_mask, at + j // job.block_mask_n * job.block_mask_col)
                if kind != SKIPPED:
                    found = np.int64(1)
        return not cuda.syncthreads_or(found)

    return skips


def fold_scores(variant: Variant, tile: Tile, words: Any) -> Callable:
    """Device function: fold a tile of scores into the rows. Scores become exp(s - row_max), 0 where
    dropout takes them and -0.0 where they are hidden; acc is rescaled.
    """
    real = np.dtype(variant.dtype).type
    threads_n, block_m, parts_pitch = tile.threads_n, tile.block_m, tile.threads_n + 1
    threads_m, own_rows, values = tile.threads_m, tile.rows, tile.values
    own_best = best_of_thread(variant.dtype, tile, words)
    own_sums = weights_of_thread(variant.dtype, tile, words)
    exp, none = words.functions(variant.dtype).exp, real(-np.inf)

    @words.device(types.void)
    def fold(job, rows, buffer, parts, row_max, row_sum, alpha, acc, hidden, n0):
        tid = np.int64(cuda.threadIdx.x & LAST_THREAD)
        own_best(buffer, parts, hidden)
        cuda.syncthreads()
        if tid < block_m:
            best = row_max[tid]
            for t in range(threads_n):
                x = parts[tid * parts_pitch + t]
                best = x if x > best else best
            # A row that has seen no key yet: -inf - -inf would be NaN.
            alpha[tid] = exp(row_max[tid] - (real(0) if best == none else best))
            row_max[tid] = best
        cuda.syncthreads()
        own_sums(job, rows, buffer, parts, row_max, hidden, n0)
        for m in range(own_rows):
            factor = alpha[tid // threads_n + threads_m * m]
            for c in range(values):
                acc[m * values + c] *= factor
        cuda.syncthreads()
        if tid < block_m:
            total = real(0)
            for t in range(threads_n):
                total += parts[tid * parts_pitch + t]
            row_sum[tid] = row_sum[tid] * alpha[tid] + total

    return fold


def best_of_thread(dtype: str, tile: Tile, words: Any) -> Callable:
    """Device function (buffer, parts, hidden): the largest of the thread's scores of each row; NaN
    is passed over, as it makes NaN of the sum.
    """
    threads_m, threads_n, keys = tile.threads_m, tile.threads_n, tile.keys
    own_rows, p_start, p_pitch = tile.rows, tile.piece_size, tile.p_pitch
    none = np.dtype(dtype).type(-np.inf)

    @words.device(types.void)
    def own_best(buffer, parts, hidden):
        tid = np.int64(cuda.threadIdx.x & LAST_THREAD)
        ty, tx = tid // threads_n, tid % threads_n
        for m in range(own_rows):
            r, best = ty + threads_m * m, none
            for n in range(keys):
                x = buffer[p_start + r * p_pitch + tx + threads_n * n]
                seen = (hidden >> np.int64(m * keys + n)) & np.int64(1) == 0
                if seen and x > best:
                    best = x
            parts[r * (threads_n + 1) + tx] = best

    return own_best


def weights_of_thread(dtype: str, tile: Tile, words: Any) -> Callable:
    """Device function: the thread's scores become probabilities; their sums go to `parts`."""
    real, exp = np.dtype(dtype).type, words.functions(dtype).exp
    threads_m, threads_n, keys = tile.threads_m, tile.threads_n, tile.keys
    own_rows, p_start, p_pitch = tile.rows, tile.piece_size, tile.p_pitch
    none, is_kept, gone = real(-np.inf), random.kept(words), real(-0.0)

    @words.device(types.void)
    def own_weights(job, rows, buffer, parts, row_max, hidden, n0):
        tid = np.int64(cuda.threadIdx.x & LAST_THREAD)
        ty, tx, first_j = tid // threads_n, tid % threads_n, n0 + job.keys_before
        for m in range(own_rows):
            r, total = ty + threads_m * m, real(0)
            best = row_max[r]
            best = real(0) if best == none else best
            for n in range(keys):
                c = tx + threads_n * n
                at = p_start + r * p_pitch + c
                p = gone
                if (hidden >> np.int64(m * keys + n)) & np.int64(1) == 0:
                    p = exp(buffer[at] - best)
                    total += p
                    drops = job.dropout_keys != 0
                    if drops and not is_kept(rows.dropout[r], first_j + c, job.dropout_threshold):
                        p = real(0)
                buffer[at] = p
            parts[r * (threads_n + 1) + tx] = total

    return own_weights
