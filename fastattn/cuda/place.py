"""What one block of threads of the SIMT kernels works on: rows, keys, and where they lie."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from typing import Any

import numpy as np
from numba import cuda, types

from ..problem import Variant
from . import random
from .scores import offset_of_entry
from .tile import LAST_THREAD, Tile

# All int64. Rows of a block are numbered position by position, the heads of a group together, so
# that they see nearly the same keys: row r is query r // group of head r % group of the group.
BLOCK_FIELDS = (
    "b",  # batch entry
    "kv_head",
    "split",  # part of the keys
    "first_row",
    "num_rows",  # of this batch entry, all blocks together; 0 = nothing to do
    "offset",
    "seqlen_k",
    "n_start",  # keys to look at, counted from kv_start
    "n_stop",
    "kv_start",  # what mask and bias add to a key index
    "k_start",  # what gives its row in k and v, or among the rows of its pages
    "first_key",  # what modifiers and block masks add to it
    "q",  # elements from the operand's address to query 0 of head 0, or to row 0 of kv_head
    "k",
    "v",
    "out",
    "lse",
)
Block = namedtuple("Block", BLOCK_FIELDS)  # type: ignore[misc]
# Of the block, in shared memory. Of each query row: its query, head and place in q, and its key for
# dropout; of each key of a tile: its place in k and v.
Rows = namedtuple("Rows", ("i", "head", "q", "dropout", "k", "v"))
BLOCK_TYPE = types.NamedUniTuple(types.int64, len(BLOCK_FIELDS), Block)
NO_ROW = -1
NOWHERE = np.int64(-1 << 62)  # the place of a row that is not there


def locate_block(variant: Variant, tile: Tile, words: Any) -> Callable:
    """Device function (job) -> Block of this block of threads."""
    block_m, paged = tile.block_m, variant.paged
    member = member_of(words)
    key_range = key_range_of(words)
    start_of = offset_of_entry(words)

    @words.device(BLOCK_TYPE)
    def locate(job):
        item = np.int64(cuda.blockIdx.x)
        split = item % job.num_splits
        item = item // job.num_splits
        # The last rows first: under a causal mask they take longest.
        first_row = (job.m_blocks - 1 - item % job.m_blocks) * block_m
        item = item // job.m_blocks
        kv_head = item % job.heads_kv
        b = item // job.heads_kv
        q_len, kv_start, kv_stop, offset, first_q, first_k = member(job, b)
        seqlen_k = kv_stop - kv_start
        num_rows = q_len * job.group
        last_row = min(first_row + block_m, num_rows) - 1
        n_start, n_stop = key_range(
            job, first_row // job.group + offset, last_row // job.group + offset, seqlen_k
        )
        if job.num_splits > 1:
            n_start = max(n_start, split * job.split_n)
            n_stop = min(n_stop, (split + 1) * job.split_n)
        if first_row >= num_rows:
            num_rows = 0
        first_key = kv_start if job.ranges != 0 else job.first_key
        return Block(
            b,
            kv_head,
            split,
            first_row,
            num_rows,
            offset,
            seqlen_k,
            n_start,
            n_stop,
            kv_start,
            first_k + kv_start,
            first_key,
            start_of(job.q_table, job.q_batch, b) + first_q * job.q_row,
            kv_head * job.k_head + (0 if paged else start_of(job.k_table, job.k_batch, b)),
            kv_head * job.v_head + (0 if paged else start_of(job.v_table, job.v_batch, b)),
            start_of(job.out_table, job.out_batch, b) + first_q * job.out_row,
            start_of(job.lse_table, job.lse_batch, b) + first_q * job.lse_row,
        )

    return locate


def member_of(words: Any) -> Callable:
    """Device function (job, b) -> q_len, kv_start, kv_stop, offset, first rows in q and k."""
    load = words.load("int64")

    @words.device(types.UniTuple(types.int64, 6))
    def member(job, b):
        q_len, kv_start, kv_stop, offset = job.seqlen_q, np.int64(0), job.seqlen_k, job.offset
        first_q = first_k = np.int64(0)
        if job.ranges != 0:
            q_len = load(job.ranges, 4 * b)
            kv_start = load(job.ranges, 4 * b + 1)
            kv_stop = load(job.ranges, 4 * b + 2)
            offset = load(job.ranges, 4 * b + 3)
        if job.starts != 0:
            first_q = load(job.starts, 2 * b)
            first_k = load(job.starts, 2 * b + 1)
        return q_len, kv_start, kv_stop, offset, first_q, first_k

    return member


def key_range_of(words: Any) -> Callable:
    """Device function (job, first, last, seqlen_k) -> keys (start, stop) that window and chunk let
    positions first to last see.
    """

    @words.device(types.UniTuple(types.int64, 2))
    def key_range(job, first, last, seqlen_k):
        start = max(np.int64(0), first - job.left)
        stop = min(seqlen_k, last + job.right + 1)
        if job.chunk > 0:
            # Rounded down, also below 0.
            before = job.keys_before
            start = max(start, (first + before) // job.chunk * job.chunk - before)
            stop = min(stop, ((last + before) // job.chunk + 1) * job.chunk - before)
        return start, stop

    return key_range


def set_rows(tile: Tile, words: Any) -> Callable:
    """Device function (job, block, rows): fill `rows` for the rows of the block; NO_ROW in rows.i
    where there is none.
    """
    block_m = tile.block_m
    load, chained = words.load("uint64"), random.chained(words)

    @words.device(types.void)
    def set_row(job, block, rows):
        r = np.int64(cuda.threadIdx.x & LAST_THREAD)
        if r < block_m:
            row = block.first_row + r
            i = row // job.group
            head = block.kv_head * job.group + row % job.group
            rows.i[r] = i if row < block.num_rows else NO_ROW
            rows.head[r] = head
            place = block.q + head * job.q_head + i * job.q_row
            rows.q[r] = place if row < block.num_rows else NOWHERE
            if job.dropout_keys != 0:
                rows.dropout[r] = chained(load(job.dropout_keys, block.b * job.heads_q + head), i)

    return set_row


def set_keys(variant: Variant, tile: Tile, words: Any) -> Callable:
    """Device function (job, block, rows, n0): fill rows.k and rows.v for the keys of a tile."""
    block_n, paged, load = tile.block_n, variant.paged, words.load("int64")

    @words.device(types.void)
    def set_key(job, block, rows, n0):
        r = np.int64(cuda.threadIdx.x & LAST_THREAD)
        if r < block_n:
            rows.k[r] = NOWHERE
            rows.v[r] = NOWHERE
        if r < block_n and n0 + r < block.n_stop:
            row, k, v = block.k_start + n0 + r, block.k, block.v
            if paged:
                page = load(job.block_table, block.b * job.max_pages + row // job.page_size)
                row = row % job.page_size
                k, v = k + page * job.k_batch, v + page * job.v_batch
            rows.k[r] = k + row * job.k_row
            rows.v[r] = v + row * job.v_row

    return set_key
