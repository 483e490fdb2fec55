"""Where the keys and values of a block lie: in even steps, or on the pages of a table."""

from __future__ import annotations

import functools

from ..problem import Variant
from .fields import BATCH, FIRST_KEY, HEAD, INTEGERS, batch_offset, field
from .job import ITEM_SIZE, ROWS_AFTER
from .memory import at, pointer_to
from .registers import jit


@functools.cache
def key_rows(variant: Variant):
    """Kernel: (k, rows, v, rows) from the item's key `first` on: where the first lies, and what
    memory.row_at() takes: strides, or tables of offsets behind the item's numbers.

    keys    how many rows are wanted
    beyond  how many the item may read: tables go on for ROWS_AFTER rows past `keys`, the last of
            these repeated
    """
    stored = pointer_to(variant.storage)

    @jit
    def in_steps(job, item, first, keys, beyond):
        k_row, v_row, place = field(job, "k_row"), field(job, "v_row"), item[FIRST_KEY] + first
        k_at = batch_offset(field(job, "k_table"), field(job, "k_batch"), item[BATCH])
        v_at = batch_offset(field(job, "v_table"), field(job, "v_batch"), item[BATCH])
        k_at += item[HEAD] * field(job, "k_head") + place * k_row
        v_at += item[HEAD] * field(job, "v_head") + place * v_row
        return at(stored(field(job, "k")), k_at), k_row, at(stored(field(job, "v")), v_at), v_row

    @jit
    def on_pages(job, item, first, keys, beyond):
        k_row, v_row, size = field(job, "k_row"), field(job, "v_row"), field(job, "page_size")
        table = at(INTEGERS(field(job, "block_table")), item[BATCH] * field(job, "max_pages"))
        length = field(job, "block_n") + ROWS_AFTER
        k_rows = at(item, ITEM_SIZE)
        v_rows = at(k_rows, length)
        stop = min(keys + ROWS_AFTER, beyond)
        place = item[FIRST_KEY] + first
        page, slot, n = place // size, place % size, 0
        while n < stop:
            k_at = table[page] * field(job, "k_page") + slot * k_row
            v_at = table[page] * field(job, "v_page") + slot * v_row
            here = min(size - slot, stop - n)
            for i in range(here):
                k_rows[n + i], v_rows[n + i] = k_at + i * k_row, v_at + i * v_row
            page, slot, n = page + 1, 0, n + here
        for n in range(stop, keys + ROWS_AFTER):
            k_rows[n], v_rows[n] = k_rows[stop - 1], v_rows[stop - 1]
        k = at(stored(field(job, "k")), item[HEAD] * field(job, "k_head"))
        v = at(stored(field(job, "v")), item[HEAD] * field(job, "v_head"))
        return k, k_rows, v, v_rows

    return on_pages if variant.paged else in_steps
