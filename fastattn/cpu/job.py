"""The one struct that a kernel receives: addresses, strides, sizes. Plain Python, so that run.py needs no Numba."""

from __future__ import annotations

import struct
from typing import NamedTuple


class Job(NamedTuple):
    """Arguments of forward() and combine(). Strides in elements; 0 where an axis is broadcast.

    *_table is the address of `batch` int64 offsets, for leading dimensions that no single stride describes, or 0.
    """

    scale_log2: float  # scale / ln 2: the kernel works in base 2
    counter: int  # address of the int64 from which threads draw work items
    num_items: int
    q: int
    q_table: int
    q_batch: int
    q_head: int
    q_row: int
    q_col: int
    k: int
    k_table: int
    k_batch: int
    k_head: int
    k_row: int
    k_col: int
    v: int
    v_table: int
    v_batch: int
    v_head: int
    v_row: int
    v_col: int
    out: int
    out_table: int
    out_batch: int
    out_head: int
    out_row: int
    out_col: int
    mask: int
    mask_table: int
    mask_batch: int
    mask_head: int
    mask_row: int
    mask_col: int
    bias: int
    bias_table: int
    bias_batch: int
    bias_head: int
    bias_row: int
    bias_col: int
    lse: int  # (batch, heads_q, seqlen_q, 2): base-2 running maximum and sum of each row; 0 if not wanted
    partial: int  # (batch, heads_kv, rows, num_splits, acc_stride + 2): acc, maximum, sum; 0 without splits
    heads_kv: int
    group: int
    rows: int  # group * seqlen_q: rows that share a key head, ordered (query, head in group)
    seqlen_k: int
    head_dim: int
    head_dim_v: int
    offset: int
    left: int
    right: int
    block_m: int
    m_blocks: int
    block_n: int
    mc: int
    s_stride: int
    acc_stride: int
    split_n: int
    num_splits: int


_PACKER = struct.Struct("=d" + "q" * (len(Job._fields) - 1))
OFFSET = {name: 8 * index for index, name in enumerate(Job._fields)}


def pack(job: Job) -> bytes:
    """The struct's bytes. Keep the object alive while a kernel runs."""
    return _PACKER.pack(*job)
