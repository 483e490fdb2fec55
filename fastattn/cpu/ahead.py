"""Asking for memory before it is needed, while the processor computes.

Rows of a mask, of a bias and of the output are far apart, so that no hardware foresees them.
"""

from __future__ import annotations

import functools

from ..problem import Variant
from .fields import BATCH, COUNT, FIRST_BIAS, FIRST_QUERY, HEAD, ROW, batch_offset, field
from .job import LINE
from .memory import pointer_to, prefetch
from .registers import ITEMSIZE, jit

BYTES = pointer_to("bool")


@jit
def ask(operand, first, count, itemsize):
    """Ask for `count` elements that lie side by side."""
    for byte in range(0, count * itemsize, LINE):
        prefetch(BYTES(operand), first * itemsize + byte)


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
