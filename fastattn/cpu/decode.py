"""Few queries against many keys: the keys are split over work items, and their partial results
merged here.

The items themselves are forward()'s; the merge is the one that forward() does at the same key
indices, in the same order, so that a row's bits do not depend on whether its keys were split.
"""

from __future__ import annotations

from ..machine import VectorUnit
from ..problem import Variant
from .fields import BATCH, COUNT, HEAD, INTEGERS, drawing_items, field
from .items import read_ranges
from .memory import at, pointer_to
from .registers import ITEMSIZE, jit
from .rows import write_rows
from .softmax import merge


def combine_kernel(variant: Variant, unit: VectorUnit):
    """Return the kernel: merge the splits of each row in order, normalise, write out and lse.

    An item is one row.
    """
    lanes = unit.lanes(ITEMSIZE[variant.dtype])
    fold, finish = merge(variant.dtype, lanes), write_rows(variant, lanes)
    real = pointer_to(variant.dtype)

    @jit
    def combine_row(job, number, scratch):
        rows, heads_kv, group = field(job, "rows"), field(job, "heads_kv"), field(job, "group")
        num_splits, acc_stride = field(job, "num_splits"), field(job, "acc_stride")
        item = INTEGERS(scratch)
        head, row = number // rows, number % rows
        item[BATCH], item[HEAD] = head // heads_kv, head % heads_kv
        read_ranges(job, item)
        if row >= item[COUNT] * group:
            return
        size = acc_stride + 2
        acc = at(real(field(job, "partial")), number * num_splits * size)
        row_max, row_sum = at(acc, acc_stride), at(acc, acc_stride + 1)
        for split in range(1, num_splits):
            part = at(acc, split * size)
            fold(acc, row_max, row_sum, part, part[acc_stride], part[acc_stride + 1], acc_stride)
        finish(job, item, row, 1, acc, row_max, row_sum)

    return drawing_items(combine_row, unit)
