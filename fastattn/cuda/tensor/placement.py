"""Which part of the work a thread block has, and where its data is."""

from __future__ import annotations

from types import SimpleNamespace

from ..words import device
from .mma import I32
from .operation import i32, i64, operation, types

FAR = 1 << 30
ANY = "float16"  # nothing here has to do with storage elements


@operation(ANY, types.UniTuple(i64, 5), i64, i64, i64, i64)
def block_place(e, m_blocks, heads, group, splits):
    """(m_block, head, key_head, batch, split) of this thread block; splits of a head come together,
    and the last queries first: under a causal mask they see most, and should not come last.

    It is computed anew at each call: cheaper than keeping it in registers through a loop.
    """
    number = e.asm("mov.u32 $0, %ctaid.x;", "=r", [I32], [], True)
    m_blocks, heads, group, splits = (e.b.trunc(x, I32) for x in (m_blocks, heads, group, splits))
    place = []
    for count in (m_blocks, splits, heads):  # 32 bits: a division of 64 is a function of 100
        place.append(e.b.urem(number, count))
        number = e.b.udiv(number, count)
    m_block, split, head = place
    m_block = e.sub(e.sub(m_blocks, m_block), 1)
    return [e.i64(x) for x in (m_block, head, e.b.udiv(head, group), number, split)]


@operation(ANY, types.boolean, i64, i64, i64)
def same_chunk(e, position, key, chunk):
    """Whether position // chunk is key // chunk, rounded down; in 32 bits, as block_place()."""
    position, key, chunk = (
        e.b.trunc(e.larger(e.smaller(x, FAR), -FAR), I32) for x in (position, key, chunk)
    )
    return e.b.icmp_unsigned("<", e.sub(key, e.chunk_start(position, chunk)), chunk)


@operation(ANY, i64, i64, i64)
def quotient(e, x, y):
    """x // y of numbers from 0 to 2**31, in 32 bits: a division of 64 is a function of 100
    instructions.
    """
    return e.i64(e.b.udiv(e.b.trunc(x, I32), e.b.trunc(y, I32)))


@operation(ANY, i32, i64)
def near(e, x):
    """As 32 bits; what is further than any key of interest stays far."""
    return e.b.trunc(e.larger(e.smaller(x, FAR), -FAR), I32)


@operation(ANY, i32, i32, i32)
def minus(e, x, y):
    """x - y in 32 bits, where Python's operators make 64."""
    return e.sub(x, y)


@operation(ANY, i64, i64, i64)
def integer_at(e, address, index):
    """The index-th int64 from an address in global memory."""
    return e.load_global("b64", e.add(address, e.shl(index, 3)))


@operation(ANY, types.float32, i64, i64)
def float_at(e, address, index):
    """The index-th float32 from an address in global memory."""
    return e.load_global("f32", e.add(address, e.shl(index, 2)))


@operation(ANY, i64, i64, i64, i64)
def batch_offset(e, table, stride, batch):
    """Elements before a batch entry: from a table, or where it is 0, by their stride."""
    listed = e.b.icmp_signed("!=", table, e.i64(0))
    offset = e.load_global("b64", e.add(table, e.shl(batch, 3)), listed)
    return e.b.select(listed, offset, e.mul(batch, stride))


@device(types.UniTuple(i64, 6))
def batch_entry(job, batch):
    """(seqlen_q, keys, offset, first_query, first_key, hidden) of a batch entry: `hidden` keys of
    the caller's come before its first one.
    """
    seqlen_q, keys, offset, hidden = job.seqlen_q, job.seqlen_k, job.offset, 0
    first_query, first_key = 0, 0
    if job.ranges != 0:
        seqlen_q = integer_at(job.ranges, 4 * batch)
        hidden = integer_at(job.ranges, 4 * batch + 1)
        keys = integer_at(job.ranges, 4 * batch + 2) - hidden
        offset = integer_at(job.ranges, 4 * batch + 3)
    if job.starts != 0:
        first_query = integer_at(job.starts, 2 * batch)
        first_key = integer_at(job.starts, 2 * batch + 1)
    return seqlen_q, keys, offset, first_query, first_key + hidden, hidden


@device(i64)
def value_on_page(job, batch, key):
    """Elements from the first page to a row of v, of a batch entry whose keys lie on pages."""
    number = quotient(key, job.page_size)
    page = integer_at(job.block_table, batch * job.max_pages + number)
    return page * job.v_batch + (key - number * job.page_size) * job.v_row


@device(types.UniTuple(i64, 6))
def key_range(job, top, more, keys, split, block_n):
    """(start, stop, full_start, full_stop, row_low, row_high) of a thread block.

    Its rows stand at positions top to top + more; all count from the first key.
    start, stop            multiples of block_n around the keys that any row sees
    full_start, full_stop  blocks that begin in here are seen by all rows: no mask
    row_low, row_high      what the window lets the first row see
    """
    bottom = top + more
    row_low, row_high = top - job.left, top + job.right + 1
    low, high = max(row_low, 0), min(bottom + job.right + 1, keys)
    if job.num_splits > 1:
        low, high = max(low, split * job.split_n), min(high, (split + 1) * job.split_n)
    start, stop = low & -block_n, (high + block_n - 1) & -block_n
    full_start, full_stop = max(bottom - job.left, 0), min(row_high, keys) - block_n + 1
    return start, stop, full_start, full_stop, row_low, row_high


def row_functions(packed: bool) -> SimpleNamespace:
    """What a kernel's rows are: queries of one head, or where packed, the heads that share a key
    head, of one query. Device functions, by name.

    place_of(job)       (m_block, head, key_head, batch, split): head is that of the first row
    rows_of(job, seqlen_q)
    row_of(row, head)   the stride from row to row, of those of queries and heads
    """

    @device(types.UniTuple(i64, 5))
    def place_of(job):
        if packed:
            m_block, key_head, _, batch, split = block_place(
                job.m_blocks, job.heads_kv, 1, job.num_splits
            )
            return m_block, key_head * job.group, key_head, batch, split
        return block_place(job.m_blocks, job.heads_q, job.group, job.num_splits)

    @device(i64)
    def rows_of(job, seqlen_q):
        return min(seqlen_q, 1) * job.group if packed else seqlen_q

    @device(i64)
    def row_of(row, head):
        return head if packed else row

    return SimpleNamespace(place_of=place_of, rows_of=rows_of, row_of=row_of)
