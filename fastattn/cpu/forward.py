"""One block of queries against the key blocks it sees: online softmax.

A work item is a block of query rows of one key head against a range of keys. The rows of all query
heads that share the key head stand together, ordered (query, head): a key block is packed once for
all of them, and a single query of a grouped model still fills a register tile. Items share nothing
but the counter they are drawn from.

What fixes the bits of a row is only its own data and the absolute index of each key: key blocks
start at multiples of block_n, and the running softmax starts anew at multiples of split_n and is
merged there. So a row comes out the same whatever rows it is computed with, in how many calls, and
whether the keys are split over several items or not.
"""

from __future__ import annotations

import functools

import numpy as np

from ..machine import VectorUnit
from ..problem import Variant
from . import products, rows
from .fields import batch_offset, field
from .masking import mask_block
from .microkernel import pack_k, pack_v, tile_shape
from .simd import ITEMSIZE, address, at, fetch_add, jit, pointer_to
from .softmax import merge, row_update


@functools.cache
def softmax_block(variant: Variant, unit: VectorUnit):
    """Kernel: fold `count` rows of scores [start, stop) into their state, then add p · v to acc.

    v, rs_v, panel_n  the values: packed (panel_n rows a panel) or as they lie (panel_n 0)
    first             key of the block that v starts with
    exclude           values that are not finite may belong to keys that a row does not see
    """
    dtype = variant.dtype
    lanes = unit.lanes(ITEMSIZE[dtype])
    update = row_update(dtype, lanes)
    add_output = products.output_block(dtype, unit)
    add_carefully = products.careful_product(dtype, unit)
    scaled, scalar = bool(variant.bias_dtype), getattr(np, dtype)

    @jit
    def run(job, count, s, start, stop, v, rs_v, panel_n, first, acc, row_max, row_sum, exclude):
        s_stride, acc_stride = field(job, "s_stride"), field(job, "acc_stride")
        # Masking has applied the scale where there is a bias to add to it.
        scale = scalar(1) if scaled else scalar(field(job, "scale_log2"))
        padded = (stop + lanes - 1) // lanes * lanes
        for m in range(count):
            state, total = at(row_max, m), at(row_sum, m)
            row, out = at(s, m * s_stride), at(acc, m * acc_stride)
            update(row, start, padded, scale, out, acc_stride, state, total, exclude)
        p, begin, end = at(s, first), start - first, stop - first
        if exclude:
            for m in range(count):
                out = at(acc, m * acc_stride)
                add_carefully(at(p, m * s_stride), v, panel_n, begin, end, out, acc_stride)
        else:
            add_output(p, s_stride, count, v, rs_v, panel_n, begin, end, acc, acc_stride)

    return run


@functools.cache
def key_block(variant: Variant, unit: VectorUnit):
    """Kernel: all rows of a work item against the keys [n_start, n_stop) of one block.

    panels  scratch for the packed keys, then the packed values
    s       scratch for the scores of mc rows, then for a few registers
    """
    dtype = variant.dtype
    lanes = unit.lanes(ITEMSIZE[dtype])
    nr = tile_shape(unit)[1] * lanes
    pack_keys, pack_values = pack_k(dtype, unit), pack_v(dtype, unit)
    score_packed, score_few = products.score_block(dtype, unit), products.few_scores(dtype, unit)
    apply_mask, fold = mask_block(variant, unit), softmax_block(variant, unit)
    real, masked = pointer_to(dtype), variant.has_mask or bool(variant.bias_dtype)
    few_rows = products.FEW_ROWS

    @jit
    def run(job, b, g, row, count, n_start, n_stop, q_rows, acc, row_max, row_sum, panels, s):
        head_dim, head_dim_v = field(job, "head_dim"), field(job, "head_dim_v")
        group, offset = field(job, "group"), field(job, "offset")
        left, right = field(job, "left"), field(job, "right")
        mc, s_stride, acc_stride = (
            field(job, "mc"),
            field(job, "s_stride"),
            field(job, "acc_stride"),
        )
        block_n = field(job, "block_n")
        spare = at(s, mc * s_stride)
        width = n_stop - n_start
        # Keys that some row sees, and keys that every row sees.
        top, bottom = row // group + offset, (row + count - 1) // group + offset
        first = max(top - left - n_start, 0) // nr * nr
        last = min(bottom + right + 1 - n_start, width)
        if first >= last:
            return
        keys = last - first
        shared = bottom - left - n_start <= first and top + right + 1 - n_start >= last
        k_row, k_col = field(job, "k_row"), field(job, "k_col")
        v_row, v_col = field(job, "v_row"), field(job, "v_col")
        k = at(real(field(job, "k")), batch_offset(field(job, "k_table"), field(job, "k_batch"), b))
        v = at(real(field(job, "v")), batch_offset(field(job, "v_table"), field(job, "v_batch"), b))
        k = at(k, g * field(job, "k_head") + (n_start + first) * k_row)
        v = at(v, g * field(job, "v_head") + (n_start + first) * v_row)

        # Packing pays if enough rows use it; values are also packed where some may be excluded.
        few = count <= few_rows
        keys_lie = few and k_col == 1
        values_lie = few and v_col == 1 and acc_stride == head_dim_v and shared and not masked
        unsafe = 0
        if not keys_lie:
            pack_keys(k, k_row, k_col, keys, head_dim, at(panels, first * head_dim))
        values, panel_n = v, 0
        if not values_lie:
            values, panel_n = at(panels, block_n * head_dim), block_n
            unsafe = pack_values(v, v_row, v_col, keys, block_n, head_dim_v, values)

        for m in range(0, count, mc):
            here = min(mc, count - m)
            top, bottom = (row + m) // group + offset, (row + m + here - 1) // group + offset
            start = max(top - left - n_start, first) // nr * nr
            stop = min(bottom + right + 1 - n_start, last)
            if start >= stop:
                continue
            padded = (stop + lanes - 1) // lanes * lanes
            if keys_lie:
                ahead = head_dim_v if values_lie else 0
                to = at(s, first)
                score_few(
                    q_rows, count, head_dim, k, k_row, keys, to, s_stride, v, v_row, ahead, spare
                )
            else:
                q = at(q_rows, m * head_dim)
                score_packed(q, here, head_dim, panels, start, padded, s, s_stride)
            # Columns that every row sees need no window: only those around them are masked.
            full_start = max(bottom - left - n_start, start)
            full_stop = min(top + right + 1 - n_start, width)
            partial = masked or full_start > start or full_stop < padded
            if partial:
                full_start = min((full_start + lanes - 1) // lanes * lanes, padded)
                full_stop = max(full_stop // lanes * lanes, full_start)
                if masked:
                    full_start = full_stop = padded
                apply_mask(job, b, g, row + m, here, n_start, start, full_start, width, s, spare)
                apply_mask(job, b, g, row + m, here, n_start, full_stop, padded, width, s, spare)
            fold(
                job,
                here,
                s,
                start,
                stop,
                values,
                v_row,
                panel_n,
                first,
                at(acc, m * acc_stride),
                at(row_max, m),
                at(row_sum, m),
                partial and unsafe != 0,
            )

    return run


@functools.cache
def work_item(variant: Variant, unit: VectorUnit):
    """Kernel: one work item, by its number."""
    dtype = variant.dtype
    lanes = unit.lanes(ITEMSIZE[dtype])
    pack_q, clear = rows.pack_q(dtype, lanes), rows.clear(dtype, lanes)
    finish, keep = rows.write_rows(dtype, lanes), rows.keep_partial(dtype, lanes)
    see_keys, fold = key_block(variant, unit), merge(dtype, lanes)

    @jit
    def key_range(job, b, g, row, count, start, stop, q_rows, acc, row_max, row_sum, panels, s):
        """See the key blocks of [start, stop), start a multiple of block_n, in order."""
        block_n, seqlen_k = field(job, "block_n"), field(job, "seqlen_k")
        for n in range(start, stop, block_n):
            n_stop = min(n + block_n, seqlen_k)
            see_keys(job, b, g, row, count, n, n_stop, q_rows, acc, row_max, row_sum, panels, s)

    @jit
    def run(job, item, scratch):
        heads_kv, block_m = field(job, "heads_kv"), field(job, "block_m")
        acc_stride, block_n = field(job, "acc_stride"), field(job, "block_n")
        split_n, num_splits = field(job, "split_n"), field(job, "num_splits")
        group, offset = field(job, "group"), field(job, "offset")
        heads = field(job, "num_items") // (field(job, "m_blocks") * num_splits)
        # The last rows first: under a causal mask they see most, and the large items should not
        # come last.
        m_block = field(job, "m_blocks") - 1 - item // (heads * num_splits)
        split, head = item // heads % num_splits, item % heads
        b, g = head // heads_kv, head % heads_kv
        row = m_block * block_m
        count = min(block_m, field(job, "rows") - row)
        # scratch: q_rows, acc, later acc, their states, packed keys and values, scores
        q_rows = scratch
        acc = at(q_rows, block_m * field(job, "head_dim"))
        later = at(acc, block_m * acc_stride)
        row_max = at(later, block_m * acc_stride)
        row_sum, later_max = at(row_max, block_m), at(row_max, 2 * block_m)
        later_sum = at(row_max, 3 * block_m)
        panels = at(row_max, 4 * block_m)
        s = at(panels, block_n * (field(job, "head_dim") + acc_stride))
        pack_q(job, b, g, row, count, q_rows)
        clear(acc, row_max, row_sum, count, acc_stride)
        start = max(row // group + offset - field(job, "left"), 0)
        stop = (row + count - 1) // group + offset + field(job, "right") + 1
        stop = min(stop, field(job, "seqlen_k"))
        if num_splits > 1:
            start, stop = max(start, split * split_n), min(stop, (split + 1) * split_n)
        start = start // block_n * block_n
        end = min((start // split_n + 1) * split_n, stop)
        key_range(job, b, g, row, count, start, end, q_rows, acc, row_max, row_sum, panels, s)
        for n in range(end, stop, split_n):
            clear(later, later_max, later_sum, count, acc_stride)
            end = min(n + split_n, stop)
            key_range(job, b, g, row, count, n, end, q_rows, later, later_max, later_sum, panels, s)
            for m in range(count):
                fold(
                    at(acc, m * acc_stride),
                    at(row_max, m),
                    at(row_sum, m),
                    at(later, m * acc_stride),
                    later_max[m],
                    later_sum[m],
                    acc_stride,
                )
        if num_splits > 1:
            keep(job, b, g, row, count, split, acc, row_max, row_sum)
        else:
            finish(job, b, g, row, count, acc, row_max, row_sum)

    return run


def forward_kernel(variant: Variant, unit: VectorUnit):
    """Return the kernel: draw work items until none is left; see cpu/job.py for its argument."""
    do_item = work_item(variant, unit)
    real, integers = pointer_to(variant.dtype), pointer_to("int64")

    def forward(job, scratch, quota):
        counter, num_items = integers(field(job, "counter")), field(job, "num_items")
        scratch_address = address(scratch)
        while quota > 0:
            item = fetch_add(counter, 1)
            if item >= num_items:
                return 0
            do_item(job, item, real(scratch_address))
            quota -= 1
        return 1

    return forward
