"""The rules of block_table: keys and values on pages of a store that many sequences share."""

from __future__ import annotations

from typing import Any

import numpy as np

from .arguments import Lengths, ranges_of
from .arrays import Names, all_below, integers

TABLE_RULE = "an array of ints of shape (..., max_pages)"
# Plans are made for whole steps of keys, or a cache that grows by one key a call would want a new
# one each time: 120 us. A step is a block of keys, and divides plan.SPLIT_N.
STEP = 256


def table_of(block_table: Any) -> np.ndarray:
    """Return ints of rank 1 and up."""
    table = integers("block_table", TABLE_RULE, block_table)
    if not table.ndim:
        raise ValueError(f"block_table must be {TABLE_RULE}, got shape ()")
    return table


def check_pages(names: Names, k: np.ndarray, v: np.ndarray) -> None:
    """Raise unless k and v are pages that go together; check_sizes() looks at the other axes."""
    for name, a in ((names.k, k), (names.v, v)):
        if a.ndim != 4:
            rule = f"{name} must have shape (num_pages, heads_kv, page_size, dim) with block_table"
            raise ValueError(f"{rule}, got {a.shape}")
    if k.shape[::2] != v.shape[::2]:
        rule = f"{names.k} and {names.v} must have the same num_pages and page_size"
        raise ValueError(f"{rule}, got {k.shape} and {v.shape}")
    if not k.shape[2]:
        raise ValueError(f"{names.k} must have a page_size of 1 or more, got {k.shape}")


def share_batch(names: Names, q: np.ndarray, table: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return views of q, of rank 3 and up, and of the table that agree in the batch."""
    q = q if q.ndim > 2 else q[None]
    if q.shape[:-3] == table.shape[:-1]:
        return q, table
    try:
        lead = np.broadcast_shapes(q.shape[:-3], table.shape[:-1])
    except ValueError:
        rule = f"block_table must broadcast to the leading dimensions of {names.q}"
        raise ValueError(f"{rule}, got {table.shape} and {q.shape}") from None
    q = np.broadcast_to(q, lead + q.shape[-3:])
    return q, np.broadcast_to(table, lead + table.shape[-1:])


def packed_table(block_table: Any, lengths_k: np.ndarray, page_size: int) -> np.ndarray:
    """Return the table (batch, max_pages) of members that have so many keys."""
    table = table_of(block_table)
    if table.shape[:-1] != lengths_k.shape:
        rule = f"block_table must have shape ({len(lengths_k)}, max_pages)"
        raise ValueError(f"{rule}, got {table.shape}")
    most, room = lengths_k.max(initial=0), table.shape[-1] * page_size
    if most > room:
        rule = f"cu_seqlens_k must not count more keys of a member than its pages hold, {room}"
        raise ValueError(f"{rule}, got {most}")
    return table


def places_of(
    table: np.ndarray,
    pages: tuple[int, int],
    lead: tuple[int, ...],
    seqlen_q: int,
    given: Lengths,
) -> tuple[np.ndarray, np.ndarray, int]:
    """Return Operands.ranges and block_table, and for how many keys to plan: those of the entry
    that has most, in steps.

    pages : (num_pages, page_size)
    """
    capacity = table.shape[-1] * pages[1]
    ranges = ranges_of(lead, seqlen_q, capacity, given)
    stop = int(ranges[:, 2].max(initial=0))
    most = stop if given.kv_start is None else int((ranges[:, 2] - ranges[:, 1]).max(initial=0))
    table = used_pages(table, ranges, pages, stop)
    return ranges, table, min(-(-most // STEP) * STEP, capacity)


def used_pages(
    table: np.ndarray, ranges: np.ndarray, pages: tuple[int, int], stop: int
) -> np.ndarray:
    """Return Operands.block_table; raise if an entry that holds keys of `ranges` is no page.

    It has the columns that hold any, and pages where the others hold none.

    pages : (num_pages, page_size)
    stop : the key after the last of any entry
    """
    num_pages, page_size = pages
    columns = -(-stop // page_size)
    table = table.reshape(len(ranges), table.shape[-1])[:, :columns]
    if table.dtype != object:
        found = table.astype(np.int64, order="C")
        if all_below(num_pages, found):
            return found
    starts, stops = ranges[:, 1:2], ranges[:, 2:3]
    first = np.arange(columns) * page_size  # keys
    used = (first < stops) & (first + page_size > starts) & (starts < stops)
    bad = used & ((table < 0) | (table >= num_pages))
    if bad.any():
        b, place = np.argwhere(bad)[0].tolist()
        rule = f"block_table must hold pages from 0 to {num_pages - 1} where there are keys"
        raise ValueError(f"{rule}, got {table[b, place]} at {(b, place)}")
    return np.where(used, table, 0).astype(np.int64, copy=False)
