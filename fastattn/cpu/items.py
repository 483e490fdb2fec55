"""The numbers of a work item, from its place in the list of all."""

from __future__ import annotations

from .fields import (
    BATCH,
    COUNT,
    FIRST_BIAS,
    FIRST_KEY,
    FIRST_QUERY,
    HEAD,
    INTEGERS,
    KEYS,
    NUMBER,
    OFFSET_IN_KEYS,
    ROW,
    field,
)
from .memory import at
from .registers import jit


@jit
def describe_item(job, number, item):
    """Fill in a work item's numbers; return which split of the keys it is."""
    heads_kv, block_m, group = field(job, "heads_kv"), field(job, "block_m"), field(job, "group")
    m_blocks, num_splits = field(job, "m_blocks"), field(job, "num_splits")
    heads = field(job, "num_items") // (m_blocks * num_splits)
    # The last rows first: under a causal mask they see most, and the large items should not come
    # last.
    m_block = m_blocks - 1 - number // (heads * num_splits)
    head = number % heads
    item[NUMBER] = number
    item[BATCH], item[HEAD] = head // heads_kv, head % heads_kv
    item[ROW] = m_block * block_m
    read_ranges(job, item)
    item[COUNT] = min(block_m, item[COUNT] * group - item[ROW])
    return number // heads % num_splits


@jit
def read_ranges(job, item):
    """Fill in what a batch entry has of its own; item[COUNT] becomes its number of queries."""
    item[COUNT] = field(job, "rows") // field(job, "group")
    item[OFFSET_IN_KEYS], item[KEYS] = field(job, "offset"), field(job, "seqlen_k")
    item[FIRST_KEY], item[FIRST_BIAS], item[FIRST_QUERY] = 0, 0, 0
    if field(job, "ranges") != 0:
        ranges = at(INTEGERS(field(job, "ranges")), 4 * item[BATCH])
        item[COUNT], item[FIRST_KEY], item[OFFSET_IN_KEYS] = ranges[0], ranges[1], ranges[3]
        item[KEYS], item[FIRST_BIAS] = ranges[2] - ranges[1], ranges[1]
    if field(job, "starts") != 0:
        starts = at(INTEGERS(field(job, "starts")), 2 * item[BATCH])
        item[FIRST_QUERY] = starts[0]
        item[FIRST_KEY] += starts[1]
