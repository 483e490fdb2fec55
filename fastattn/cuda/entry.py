"""A batch entry as the SIMT kernels of gradients see it: its rows and keys, and where they lie."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from typing import Any

import numpy as np
from numba import cuda, types

from . import random
from .place import NO_ROW, NOWHERE, member_of
from .scores import offset_of_entry
from .tile import LAST_THREAD

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


# In shared memory, of each query row of a tile: its query (NO_ROW where there is none), its head,
# its places in q and dout, its key for dropout, and the numbers of gradient_rows.py.
Queries = namedtuple(
    "Queries", ("i", "head", "q", "dout", "dropout", "reference", "delta", "weight")
)
Keys = namedtuple("Keys", ("k", "v"))  # of each key of a tile: its places, or NOWHERE


def shared_arrays(dtype: str, queries: int, keys: int, words: Any) -> Callable:
    """Device function () -> (Queries, Keys) of so many each, for one call in a kernel: another one
    gives the same memory.
    """
    real = np.dtype(dtype).type
    places, chains = (types.Array(kind, 1, "C") for kind in (types.int64, types.uint64))
    numbers = types.Array(getattr(types, dtype), 1, "C")
    fields = [*[places] * 4, chains, *[numbers] * 3]
    of_queries = types.NamedTuple(fields, Queries)
    of_keys = types.NamedUniTuple(places, 2, Keys)

    @words.device(types.Tuple((of_queries, of_keys)))
    def arrays():
        return (
            Queries(
                cuda.shared.array(queries, np.int64),
                cuda.shared.array(queries, np.int64),
                cuda.shared.array(queries, np.int64),
                cuda.shared.array(queries, np.int64),
                cuda.shared.array(queries, np.uint64),
                cuda.shared.array(queries, real),
                cuda.shared.array(queries, real),
                cuda.shared.array(queries, real),
            ),
            Keys(cuda.shared.array(keys, np.int64), cuda.shared.array(keys, np.int64)),
        )

    return arrays


def set_queries(dtype: str, size: int, words: Any) -> Callable:
    """Device function (job, entry, queries, first, stop, heads, first_head): fill `queries` for
    `size` rows from `first` on, as far as `stop`: row r is query r // heads of head
    first_head + r % heads.
    """
    load, load_key, chained = words.load(dtype), words.load("uint64"), random.chained(words)

    @words.device(types.void)
    def set_all(job, entry, queries, first, stop, heads, first_head):
        r = np.int64(cuda.threadIdx.x & LAST_THREAD)
        if r >= size:
            return
        queries.i[r] = NO_ROW
        queries.head[r] = first_head
        queries.q[r] = NOWHERE
        queries.dout[r] = NOWHERE
        if first + r < stop:
            i, head = (first + r) // heads, first_head + (first + r) % heads
            queries.i[r] = i
            queries.head[r] = head
            queries.q[r] = entry.q + head * job.q_head + i * job.q_row
            queries.dout[r] = entry.dout + head * job.dout_head + i * job.dout_row
            if job.dropout_keys != 0:
                key = load_key(job.dropout_keys, entry.b * job.heads_q + head)
                queries.dropout[r] = chained(key, i)
            number = (entry.b * job.heads_q + head) * job.seqlen_q + i
            queries.reference[r] = load(job.reference, number)
            queries.delta[r] = load(job.delta, number)
            queries.weight[r] = load(job.weight, number)

    return set_all


def set_keys(size: int, words: Any) -> Callable:
    """Device function (job, entry, keys, first, stop): fill `keys` for `size` keys from `first` on,
    as far as `stop`; first may be below 0.
    """

    @words.device(types.void)
    def set_all(job, entry, keys, first, stop):
        r = np.int64(cuda.threadIdx.x & LAST_THREAD)
        if r >= size:
            return
        exists = 0 <= first + r < stop
        keys.k[r] = entry.k + (first + r) * job.k_row if exists else NOWHERE
        keys.v[r] = entry.v + (first + r) * job.v_row if exists else NOWHERE

    return set_all


def query_range_of(words: Any) -> Callable:
    """Device function (job, entry, first, last) -> queries (start, stop) that window and chunk let
    see one of keys first to last.
    """

    @words.device(types.UniTuple(types.int64, 2))
    def query_range(job, entry, first, last):
        start = max(np.int64(0), first - job.right - entry.offset)
        stop = min(entry.q_len, last + job.left + 1 - entry.offset)
        if job.chunk > 0:
            before = job.keys_before
            low = (first + before) // job.chunk * job.chunk - before
            high = ((last + before) // job.chunk + 1) * job.chunk - before
            start, stop = max(start, low - entry.offset), min(stop, high - entry.offset)
        return start, stop

    return query_range
