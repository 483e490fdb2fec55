"""Asking for memory before it is needed, while the processor computes.

Rows of a mask, of a bias and of the output are far apart, so that no hardware foresees them.
"""

from __future__ import annotations

import functools

from ..problem import Variant
from .asks import forget, want
from .fields import (
    ASKS,
    BATCH,
    COUNT,
    FIRST_BIAS,
    FIRST_QUERY,
    HEAD,
    KEYS,
    NEXT,
    NUMBER,
    OFFSET_IN_KEYS,
    ROW,
    batch_offset,
    field,
    high_key,
    low_key,
)
from .items import describe_item
from .job import LINE
from .memory import address, at, pointer_to, prefetch
from .pages import key_rows
from .registers import ITEMSIZE, jit

BYTES = pointer_to("bool")


@jit
def ask(operand, first, count, itemsize):
    """Ask for `count` elements that lie side by side, for every line that holds one: arrays seldom
    begin with a line, and the last one of each row was then waited for.
    """
    begin = operand + first * itemsize
    for line in range(begin // LINE * LINE, begin + count * itemsize, LINE):
        prefetch(BYTES(line), 0)


@jit
def ask_for_scores(job, item, row, n_start, start, stop):
    """Ask for mask and bias of one row, columns [start, stop) of a key block.

    After the last row of the item comes its first one, in the next key block.
    """
    if row >= item[ROW] + item[COUNT]:
        row, n_start = row - item[COUNT], n_start + field(job, "block_n")
    group = field(job, "group")
    i, h, j = row // group, item[HEAD] * group + row % group, n_start + item[FIRST_BIAS] + start
    if field(job, "bias") != 0:
        kind = field(job, "bias_kind")
        itemsize = 8 if kind == 2 else 4 if kind == 1 else 2
        place = batch_offset(field(job, "bias_table"), field(job, "bias_batch"), item[BATCH])
        place += h * field(job, "bias_head") + i * field(job, "bias_row")
        col = field(job, "bias_col")
        ask(field(job, "bias"), place + j * col, (stop - start) * col, itemsize)
    if field(job, "mask") != 0:
        place = batch_offset(field(job, "mask_table"), field(job, "mask_batch"), item[BATCH])
        place += h * field(job, "mask_head") + i * field(job, "mask_row")
        col = field(job, "mask_col")
        ask(field(job, "mask"), place + j * col, (stop - start) * col, 1)


@functools.cache
def ask_for_output(variant: Variant):
    """Kernel: ask for one row of the output."""
    itemsize = ITEMSIZE[variant.storage]

    @jit
    def run(job, item, row):
        group = field(job, "group")
        i, h = item[FIRST_QUERY] + row // group, item[HEAD] * group + row % group
        place = batch_offset(field(job, "out_table"), field(job, "out_batch"), item[BATCH])
        place += h * field(job, "out_head") + i * field(job, "out_row")
        ask(field(job, "out"), place, field(job, "head_dim_v"), itemsize)

    return run


@functools.cache
def ask_for_next(variant: Variant):
    """Kernel: let the products of a block ask for what is packed after it: the keys and values of
    the item's next block, or queries, keys and values of the item that this thread will likely do
    next. Not where keys lie on pages, nor for few rows, which read them as they lie.

    k, v, rows, keys, beyond  as of pages.key_rows()
    """
    size, find = ITEMSIZE[variant.storage], key_rows(variant)

    @jit
    def on_pages(job, item, k, k_row, v, v_row, keys, beyond, few):
        forget(at(item, ASKS))

    @jit
    def want_keys(job, asks, k, k_row, v, v_row, keys):
        want(asks, address(k), k_row * size, keys, field(job, "head_dim") * size)
        want(asks, address(v), v_row * size, keys, field(job, "head_dim_v") * size)

    @jit
    def want_item(job, asks, item):
        row, count = item[ROW], item[COUNT]
        group, block_n = field(job, "group"), field(job, "block_n")
        if group == 1:  # else rows are not in even steps
            place = batch_offset(field(job, "q_table"), field(job, "q_batch"), item[BATCH])
            place += item[HEAD] * field(job, "q_head")
            place += (item[FIRST_QUERY] + row) * field(job, "q_row")
            place, step = field(job, "q") + place * size, field(job, "q_row") * size
            want(asks, place, step, count, field(job, "head_dim") * size)
        start = low_key(job, row // group + item[OFFSET_IN_KEYS]) // block_n * block_n
        stop = high_key(job, (row + count - 1) // group + item[OFFSET_IN_KEYS], item[KEYS])
        keys = min(stop - start, block_n)
        want_keys(job, asks, *find(job, item, start, keys, keys), keys)

    @jit
    def run(job, item, k, k_row, v, v_row, keys, beyond, few):
        asks, number = at(item, ASKS), item[NUMBER] + field(job, "num_threads")
        forget(asks)
        if few:
            return
        if beyond > keys:
            more = min(beyond - keys, field(job, "block_n"))
            want_keys(job, asks, at(k, keys * k_row), k_row, at(v, keys * v_row), v_row, more)
        elif number < field(job, "num_items"):
            describe_item(job, number, at(item, NEXT))
            want_item(job, asks, at(item, NEXT))

    return on_pages if variant.paged else run
