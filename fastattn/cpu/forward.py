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
from .ahead import ask_for_next, ask_for_output, ask_for_scores
from .fields import (
    ASKS,
    BATCH,
    COUNT,
    HEAD,
    INTEGERS,
    KEYS,
    OFFSET_IN_KEYS,
    ROW,
    drawing_items,
    field,
    high_key,
    low_key,
    next_row,
)
from .items import describe_item
from .job import ITEM_SIZE, ROWS_AFTER
from .masking import hide_padding, mask_block, scores_block
from .memory import address, at, pointer_to
from .microkernel import tile_shape
from .overflow import mark_overflow
from .packing import pack_k, pack_v
from .pages import key_rows
from .random import row_key
from .registers import ITEMSIZE, jit
from .softmax import drop_row, merge, row_top, row_update
from .spans import mask_span, visible_span

# Tiles of rows whose scores are held at once where rows see unlike keys: all compute as far as the
# last one sees (48 rows: 6 % of the scores of 1024 causal keys for nothing).
STRIP = 2


@functools.cache
def softmax_block(variant: Variant, unit: VectorUnit):
    """Kernel: fold `count` rows of scores [start, stop) into their state, then add p · v to acc.

    v, rs_v, panel_n  the values: packed (panel_n rows a panel) or a few rows' as they lie (0)
    first             key of the block that v starts with
    exclude           values that are not finite may belong to keys that a row does not see
    final             the rows see no later block
    sums              scratch of FEW_ROWS rows like those of acc, if values are not packed
    """
    dtype = variant.dtype
    lanes = unit.lanes(ITEMSIZE[dtype])
    largest, update, drop = row_top(dtype, lanes), row_update(dtype, lanes), drop_row(dtype, lanes)
    add_output, add_few = products.asking_outputs(dtype, unit), products.few_outputs(dtype, unit)
    add_carefully, ask_output = products.careful_product(dtype, unit), ask_for_output(variant)
    scalar = getattr(np, dtype)

    @jit
    def drop_rows(job, item, row, count, n_start, s, start, stop):
        """Dropout on every row of p."""
        group, s_stride = field(job, "group"), field(job, "s_stride")
        keys, first_j = INTEGERS(field(job, "dropout_keys")), n_start + field(job, "keys_before")
        head = item[BATCH] * group * field(job, "heads_kv") + item[HEAD] * group
        i, r = row // group, row % group
        for m in range(count):
            key = row_key(keys[head + r], i)
            drop(at(s, m * s_stride), start, stop, first_j, key, field(job, "dropout_threshold"))
            i, r = next_row(i, r, group)

    @jit
    def run(
        job,
        item,
        row,
        count,
        n_start,
        s,
        start,
        stop,
        v,
        rs_v,
        panel_n,
        first,
        acc,
        row_max,
        row_sum,
        exclude,
        final,
        sums,
    ):
        s_stride, acc_stride = field(job, "s_stride"), field(job, "acc_stride")
        # Scores that are more than scaled products have been scaled already.
        scaled = field(job, "changes_scores") != 0
        scale = scalar(1) if scaled else scalar(field(job, "scale_log2"))
        padded = (stop + lanes - 1) // lanes * lanes
        has_scores = field(job, "mask") != 0 or field(job, "bias") != 0
        # A row's maximum is found amid the exponentials of two rows before. Found with those of the
        # last row, it came too late for rows without a reference (128 keys: 61 -> 52 cycles a row).
        top = next_top = largest(s, start, padded)
        if count > 1:
            next_top = largest(at(s, s_stride), start, padded)
        for m in range(count):
            state, total = at(row_max, m), at(row_sum, m)
            scores, out = at(s, m * s_stride), at(acc, m * acc_stride)
            ahead = at(scores, 2 * s_stride if m + 2 < count else 0)
            if has_scores:
                ask_for_scores(job, item, row + m + field(job, "mc"), n_start, start, stop)
            if final:
                ask_output(job, item, row + m)
            to = out, acc_stride, state, total
            later = update(scores, ahead, start, padded, top, scale, *to, exclude)
            top, next_top = next_top, later
        if field(job, "dropout_keys") != 0:
            drop_rows(job, item, row, count, n_start, s, start, padded)
        p, begin, end = at(s, first), start - first, stop - first
        if exclude:
            for m in range(count):
                out = at(acc, m * acc_stride)
                add_carefully(at(p, m * s_stride), v, panel_n, begin, end, out, acc_stride)
        elif panel_n != 0:
            width = field(job, "head_dim_v")
            to = acc, acc_stride, width, at(item, ASKS)
            add_output(p, s_stride, count, v, panel_n, begin, end, *to)
        else:
            add_few(p, s_stride, count, v, rs_v, begin, end, acc, acc_stride, sums)

    return run


@functools.cache
def key_block(variant: Variant, unit: VectorUnit):
    """Kernel: all rows of a work item against the keys from n_start of one block.

    panels  scratch for the packed keys, then the packed values
    s       scratch for the scores of mc rows, then for a few registers and one more row
    """
    dtype, storage = variant.dtype, variant.storage
    lanes = unit.lanes(ITEMSIZE[dtype])
    mr, nv = tile_shape(unit)
    nr = nv * lanes
    pack_keys, pack_values = pack_k(dtype, unit, storage), pack_v(dtype, unit, storage)
    score_packed = products.asking_scores(dtype, unit)
    score_few = products.few_scores(dtype, unit, storage)
    change, apply_mask = scores_block(variant, lanes), mask_block(variant, lanes)
    hide_past = hide_padding(dtype, lanes)
    fold, mark_lost = softmax_block(variant, unit), mark_overflow(variant, unit)
    find_rows, real, as_stored = key_rows(variant), pointer_to(dtype), storage == dtype
    has_score_mod, has_mask_mod = variant.score_mod is not None, variant.mask_mod is not None
    few_rows, ask_next = products.FEW_ROWS, ask_for_next(variant)
    # Two tiles of scores stay in level 1 while masks and biases go through them: 0.98 of the time.
    # On AVX2 these are 12 rows, and the product loses as much.
    in_level_1 = unit.registers == 32

    @jit
    def run(job, item, n_start, q_rows, acc, row_max, row_sum, panels, s):
        head_dim, head_dim_v = field(job, "head_dim"), field(job, "head_dim_v")
        mc, s_stride = field(job, "mc"), field(job, "s_stride")
        acc_stride, block_n = field(job, "acc_stride"), field(job, "block_n")
        group, row, count = field(job, "group"), item[ROW], item[COUNT]
        spare = at(s, mc * s_stride)
        # Whether a key may be hidden anywhere, and not only at the edges of the window: by a mask,
        # or by a score of -inf.
        masks = field(job, "mask") != 0
        hides = masks or field(job, "bias") != 0 or has_score_mod
        blocks = field(job, "block_mask") != 0
        # Keys that some row sees, and whether all rows see all of them.
        width = min(item[KEYS] - n_start, block_n)
        top = row // group + item[OFFSET_IN_KEYS]
        bottom = (row + count - 1) // group + item[OFFSET_IN_KEYS]
        first = max(low_key(job, top) - n_start, 0) // nr * nr
        last = min(high_key(job, bottom, item[KEYS]) - n_start, width)
        if blocks:
            low, last, _ = visible_span(job, item, row, count, n_start, first, last)
            first = low // nr * nr
        if masks and first < last:
            low, last, _ = mask_span(job, item, row, count, n_start, first, last, first)
            first = low // nr * nr
        if first >= last:
            return
        keys = last - first
        beyond = high_key(job, bottom, item[KEYS]) - n_start - first
        shared = (
            low_key(job, bottom) - n_start <= first
            and high_key(job, top, item[KEYS]) - n_start >= last
        )
        k_col, v_col = field(job, "k_col"), field(job, "v_col")
        k, k_row, v, v_row = find_rows(job, item, n_start + first, keys, beyond)

        # Packing pays if enough rows use it. Values are also packed where some may be excluded, and
        # where they have to be converted.
        few = count <= few_rows
        final = first + beyond <= block_n and not few
        keys_lie = few and k_col == 1
        values_lie = few and v_col == 1 and acc_stride == head_dim_v and shared
        values_lie = values_lie and as_stored and not hides and not has_mask_mod
        unsafe = 0
        if not keys_lie:
            pack_keys(k, k_row, k_col, keys, head_dim, at(panels, first * head_dim))
        values, panel_n = real(address(v)), 0
        panel_v = at(panels, block_n * head_dim)
        if not values_lie:
            values, panel_n = panel_v, block_n
            unsafe = pack_values(v, v_row, v_col, keys, block_n, head_dim_v, values)

        ask_next(job, item, k, k_row, v, v_row, keys, beyond, few)
        passes = in_level_1 and (masks or field(job, "changes_scores") != 0)
        strip = mc if shared and not passes else STRIP * mr
        for step in range((count + strip - 1) // strip):
            m = step * strip
            here = min(strip, count - m)
            top = (row + m) // group + item[OFFSET_IN_KEYS]
            bottom = (row + m + here - 1) // group + item[OFFSET_IN_KEYS]
            start = max(low_key(job, top) - n_start, first) // nr * nr
            stop = min(high_key(job, bottom, item[KEYS]) - n_start, last)
            modify = has_mask_mod
            if blocks:
                low, stop, full = visible_span(job, item, row + m, here, n_start, start, stop)
                start = low // nr * nr
                # Whole tiles are computed: what they add to the span is skipped, and to be hidden.
                modify = not full or start < low or stop % lanes != 0
            hidden = block_n
            if masks and start < stop:
                low, stop, hidden = mask_span(job, item, row + m, here, n_start, start, stop, stop)
                start = low // nr * nr
            if start >= stop:
                continue
            padded = (stop + lanes - 1) // lanes * lanes
            q = at(q_rows, m * head_dim)
            if keys_lie:
                to = at(s, first)
                score_few(q, here, head_dim, k, k_row, keys, beyond, to, s_stride, spare)
            else:
                to = s, s_stride, at(item, ASKS)
                score_packed(q, head_dim, here, head_dim, panels, start, stop, *to)
            # Columns that every row sees need no mask: only those around them are masked.
            full_start = max(low_key(job, bottom) - n_start, start)
            full_stop = min(high_key(job, top, item[KEYS]) - n_start, hidden, padded)
            partial = modify or full_start > start or full_stop < stop
            full_start = min((full_start + lanes - 1) // lanes * lanes, padded)
            full_stop = max(full_stop // lanes * lanes, full_start)
            if modify or full_start == full_stop:
                full_start = full_stop = padded
            careful = unsafe != 0 and (partial or hides)
            if careful:
                mark_lost(
                    job,
                    item,
                    row + m,
                    here,
                    n_start,
                    s,
                    start,
                    stop,
                    padded,
                    values,
                    panel_n,
                    first,
                    at(acc, m * acc_stride),
                    spare,
                    modify,
                )
            if field(job, "changes_scores") != 0:
                change(job, item, row + m, here, n_start, start, padded, s, spare)
            if partial:
                apply_mask(
                    job,
                    item,
                    row + m,
                    here,
                    n_start,
                    start,
                    full_start,
                    full_stop,
                    padded,
                    s,
                    spare,
                    modify,
                )
            elif stop < padded:
                hide_past(s, s_stride, here, padded - lanes, stop)
            fold(
                job,
                item,
                row + m,
                here,
                n_start,
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
                careful,
                final,
                panel_v,
            )

    return run


@functools.cache
def work_item(variant: Variant, unit: VectorUnit):
    """Kernel: one work item, by its number."""
    dtype = variant.dtype
    lanes = unit.lanes(ITEMSIZE[dtype])
    pack_q, clear = rows.pack_q(variant, lanes), rows.clear(dtype, lanes)
    finish, keep = rows.write_rows(variant, lanes), rows.keep_partial(dtype, lanes)
    see_keys, fold = key_block(variant, unit), merge(dtype, lanes)
    real, tables = pointer_to(dtype), 2 if variant.paged else 0

    @jit
    def key_range(job, item, start, stop, q_rows, acc, row_max, row_sum, panels, s):
        """See the key blocks of [start, stop), start a multiple of block_n, in order."""
        n = start
        while n < stop:  # a range whose step may be 0 would bring an exception's data with it
            see_keys(job, item, n, q_rows, acc, row_max, row_sum, panels, s)
            n += field(job, "block_n")

    @jit
    def run(job, number, scratch):
        item = INTEGERS(scratch)
        split = describe_item(job, number, item)
        row, count = item[ROW], item[COUNT]
        if count <= 0:
            return
        block_n = field(job, "block_n")
        # Room for whole registers of rows: all that follows begins with a line of the cache.
        block_m = (field(job, "block_m") + lanes - 1) // lanes * lanes
        acc_stride, group = field(job, "acc_stride"), field(job, "group")
        split_n, num_splits = field(job, "split_n"), field(job, "num_splits")
        # scratch: item, tables, q_rows, acc, later acc, their states, packed keys, values, scores
        q_rows = real(scratch + 8 * (ITEM_SIZE + tables * (block_n + ROWS_AFTER)))
        acc = at(q_rows, block_m * field(job, "head_dim"))
        later = at(acc, block_m * acc_stride)
        row_max = at(later, block_m * acc_stride)
        row_sum, later_max = at(row_max, block_m), at(row_max, 2 * block_m)
        later_sum = at(row_max, 3 * block_m)
        panels = at(row_max, 4 * block_m)
        s = at(panels, block_n * (field(job, "head_dim") + acc_stride))
        pack_q(job, item, row, count, q_rows)
        clear(acc, row_max, row_sum, count, acc_stride)
        start = low_key(job, row // group + item[OFFSET_IN_KEYS])
        stop = high_key(job, (row + count - 1) // group + item[OFFSET_IN_KEYS], item[KEYS])
        if num_splits > 1:
            start, stop = max(start, split * split_n), min(stop, (split + 1) * split_n)
        start = start // block_n * block_n
        if field(job, "mask") != 0 or field(job, "bias") != 0:
            none = np.int64(0)  # for a literal, Numba would compile what is called once more
            for m in range(min(count, field(job, "mc"))):
                ask_for_scores(job, item, row + m, start, none, min(block_n, stop - start))
        end = min((start // split_n + 1) * split_n, stop)
        key_range(job, item, start, end, q_rows, acc, row_max, row_sum, panels, s)
        while end < stop:
            n, end = end, min(end + split_n, stop)
            clear(later, later_max, later_sum, count, acc_stride)
            key_range(job, item, n, end, q_rows, later, later_max, later_sum, panels, s)
            for m in range(count):
                place = m * acc_stride
                to, more = at(acc, place), at(later, place)
                total = at(row_sum, m)
                fold(to, at(row_max, m), total, more, later_max[m], later_sum[m], acc_stride)
        if num_splits > 1:
            keep(job, item, row, count, split, acc, row_max, row_sum)
        else:
            finish(job, item, row, count, acc, row_max, row_sum)

    return run


def forward_kernel(variant: Variant, unit: VectorUnit):
    """Return the kernel: draw work items until none is left; see cpu/job.py for its argument."""
    return drawing_items(work_item(variant, unit), unit)
