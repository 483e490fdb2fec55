"""A batch entry as the SIMT kernels of gradients see it: its rows and keys, and where they lie."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from typing import Any

import numpy as np
from numba import types

from .place import member_of
from .scores import offset_of_entry

# All int64. Places are elements from the operand's address to row 0 of head 0, or of kv_head.
ENTRY_FIELDS = (
    "b",
    "kv_head",
    "q_len",
    "seqlen_k",
    "offset",
    "kv_start",  # what mask and bias add to a key index
    "first_key",  # what modifiers and block masks add to it
    "first_q",  # the row of the operands that is row 0 of the entry
    "first_k",
    "q",
    "dout",
    "k",
    "v",
)
Entry = namedtuple("Entry", ENTRY_FIELDS)  # type: ignore[misc]
ENTRY_TYPE = types.NamedUniTuple(types.int64, len(ENTRY_FIELDS), Entry)


def entry_of(words: Any) -> Callable:
    """Device function (job, b, kv_head) -> Entry."""
    member, start_of = member_of(words), offset_of_entry(words)

    @words.device(ENTRY_TYPE)
    def entry(job, b, kv_head):
        q_len, kv_start, kv_stop, offset, first_q, first_k = member(job, b)
        first_k += kv_start
        k = start_of(job.k_table, job.k_batch, b) + kv_head * job.k_head
        v = start_of(job.v_table, job.v_batch, b) + kv_head * job.v_head
        return Entry(
            b,
            kv_head,
            q_len,
            kv_stop - kv_start,
            offset,
            kv_start,
            kv_start if job.ranges != 0 else job.first_key,
            first_q,
            first_k,
            start_of(job.q_table, job.q_batch, b) + first_q * job.q_row,
            start_of(job.dout_table, job.dout_batch, b) + first_q * job.dout_row,
            k + first_k * job.k_row,
            v + first_k * job.v_row,
        )

    return entry


def row_number(words: Any) -> Callable:
    """Device function (job, b, head, i): place of a row among those of gradient_rows.py."""

    @words.device(types.int64)
    def number(job, b, head, i):
        return (b * job.heads_q + head) * job.seqlen_q + np.int64(i)

    return number
