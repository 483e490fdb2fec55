"""One block of keys against the rows that see it: the gradients, in five products.

A work item is a block of keys of one key head. It goes through the rows of all query heads that
share it, block by block, and keeps dk and dv of its keys:

    s = q · k -> p        dp = dout · v -> ds        dv += p.T dout    dk += ds.T q    dq += ds k

dq is everybody's: the items of one head add to a block of rows in the order of the keys. Each item
says how far it has come, and waits, before it adds, until the one before it has come further. As
items are drawn in order, that one is done or at work; with heads to spare nobody waits. So each
result is one chain of additions, whatever the number of threads, with neither a copy of dq nor a
product computed twice.

Source: Dao 2023, FlashAttention-2, arXiv:2307.08691, algorithm 2.
"""

from __future__ import annotations

import functools

import numpy as np

from ..machine import VectorUnit
from ..problem import Variant
from . import gradient_rows, gradient_scores, products
from .fields import (
    BATCH,
    COUNT,
    FIRST_KEY,
    HEAD,
    INTEGERS,
    KEYS,
    OFFSET_IN_KEYS,
    batch_offset,
    drawing_items,
    field,
    high_key,
    low_key,
)
from .items import read_ranges
from .job import DONE, ITEM_SIZE
from .masking import mask_block, scores_block
from .memory import at, load_acquire, pause, pointer_to, store_release
from .microkernel import panel_product, tile_shape
from .packing import pack_k
from .registers import ITEMSIZE, jit
from .simd import operations
from .spans import mask_span, visible_span


@jit
def scratch_places(job, start):
    """Where a thread keeps what: see run_backward.scratch_elements()."""
    block_m, block_n = field(job, "block_m"), field(job, "block_n")
    q_stride, d_stride = field(job, "q_stride"), field(job, "d_stride")
    s_size = block_m * field(job, "s_stride")
    q_rows = start
    d_rows = at(q_rows, block_m * q_stride)
    lse = at(d_rows, block_m * d_stride)
    delta = at(lse, block_m)
    k_panels = at(delta, block_m)
    v_panels = at(k_panels, block_n * q_stride)
    k_rows = at(v_panels, block_n * d_stride)
    dk = at(k_rows, block_n * q_stride)
    dv = at(dk, block_n * q_stride)
    s = at(dv, block_n * d_stride)
    ds, raw = at(s, s_size), at(s, 2 * s_size)
    tile = at(s, 3 * s_size)
    spare = at(tile, block_m * q_stride)
    return q_rows, d_rows, lse, delta, k_panels, v_panels, k_rows, dk, dv, s, ds, raw, tile, spare


@functools.cache
def columns(variant: Variant, unit: VectorUnit):
    """Kernel: which keys of a block `count` rows see.

    Returns (start, stop, full_start, full_stop, modify): they see none outside [start, stop), all
    see all of [full_start, full_stop); and whether the mask_mod is to be asked about the rest.
    start is a multiple of nr, the full ones are of lanes.
    """
    lanes = unit.lanes(ITEMSIZE[variant.dtype])
    nr = tile_shape(unit)[1] * lanes
    has_score_mod, has_mask_mod = variant.score_mod is not None, variant.mask_mod is not None

    @jit
    def run(job, item, row, count, n_start):
        group = field(job, "group")
        width = min(item[KEYS] - n_start, field(job, "block_n"))
        top = row // group + item[OFFSET_IN_KEYS]
        bottom = (row + count - 1) // group + item[OFFSET_IN_KEYS]
        first = max(low_key(job, top) - n_start, 0)
        stop = min(high_key(job, bottom, item[KEYS]) - n_start, width)
        modify = has_mask_mod
        if field(job, "block_mask") != 0 and first < stop:
            first, stop, full = visible_span(job, item, row, count, n_start, first, stop)
            modify = not full or first % nr != 0 or stop % lanes != 0
        hidden = field(job, "block_n")
        if field(job, "mask") != 0 and first < stop:
            first, stop, hidden = mask_span(job, item, row, count, n_start, first, stop, stop)
        start = first // nr * nr
        padded = (stop + lanes - 1) // lanes * lanes
        full_start = max(low_key(job, bottom) - n_start, start)
        full_stop = min(high_key(job, top, item[KEYS]) - n_start, hidden, padded)
        full_start = min((full_start + lanes - 1) // lanes * lanes, padded)
        full_stop = max(full_stop // lanes * lanes, full_start)
        hides = field(job, "bias") != 0 or has_score_mod
        if hides or modify or full_start == full_stop:
            full_start = full_stop = padded
        return first if first >= stop else start, stop, full_start, full_stop, modify

    return run


@functools.cache
def scores_of_pair(variant: Variant, unit: VectorUnit):
    """Kernel: s and ds of `count` rows and the columns [start, stop) of a block: p and ds."""
    dtype = variant.dtype
    lanes = unit.lanes(ITEMSIZE[dtype])
    simd = operations(dtype, lanes)
    load, store = simd.load, simd.store
    product = products.score_block(dtype, unit)
    change, hide = scores_block(variant, lanes), mask_block(variant, lanes)
    to_probabilities = gradient_scores.probabilities_block(variant, lanes)
    shift, add_bias, add_alibi, apply_slopes = (
        make(variant, lanes)
        for make in (
            gradient_scores.shift_large_rows,
            gradient_scores.bias_block,
            gradient_scores.alibi_block,
            gradient_scores.slopes_block,
        )
    )
    has_slopes = variant.score_mod_grad is not None

    @jit
    def run(job, item, row, count, n_start, start, stop, full_start, full_stop, modify, places):
        q_rows, d_rows, lse, delta, k_panels, v_panels = places[:6]
        s, ds, raw, spare = places[9], places[10], places[11], places[13]
        s_stride, padded = field(job, "s_stride"), (stop + lanes - 1) // lanes * lanes
        q_stride, d_stride = field(job, "q_stride"), field(job, "d_stride")
        head_dim, head_dim_v = field(job, "head_dim"), field(job, "head_dim_v")
        product(q_rows, q_stride, count, head_dim, k_panels, start, padded, s, s_stride)
        bends = has_slopes or field(job, "softcap") != 0
        if bends:
            for m in range(count):
                for n in range(m * s_stride + start, m * s_stride + padded, lanes):
                    store(raw, n, load(s, n))
        if field(job, "changes_scores") != 0:
            change(job, item, row, count, n_start, start, padded, s, spare)
        partial = full_start > start or full_stop < padded
        if partial:
            hide(
                job,
                item,
                row,
                count,
                n_start,
                start,
                full_start,
                full_stop,
                padded,
                s,
                spare,
                modify,
            )
        if field(job, "row_weight") != 0 and field(job, "changes_scores") == 0:
            shift(job, count, s, start, padded, lse)
        product(d_rows, d_stride, count, head_dim_v, v_panels, start, padded, ds, s_stride)
        to_probabilities(job, item, row, count, n_start, s, ds, start, padded, lse, delta, partial)
        if field(job, "dbias") != 0:
            add_bias(job, item, row, count, n_start, ds, start, stop)
        if field(job, "dalibi") != 0:
            add_alibi(job, item, row, count, n_start, ds, start, padded)
        if bends:
            apply_slopes(job, item, row, count, n_start, raw, ds, start, padded)

    return run


@functools.cache
def products_of_pair(variant: Variant, unit: VectorUnit):
    """Kernel: dv += p.T dout, dk += ds.T q, tile = ds k, from what scores_of_pair() leaves."""
    dtype = variant.dtype
    lanes = unit.lanes(ITEMSIZE[dtype])
    nr = tile_shape(unit)[1] * lanes
    across, along = panel_product(dtype, unit, True), panel_product(dtype, unit)
    no, add = np.int64(0), np.int64(1)

    @jit
    def add_transposed(weights, s_stride, keys, rows, stride, dim, count, to):
        """to[n] += sum_m weights[m, n] * rows[m]."""
        for d in range(0, dim, nr):
            wide = d + lanes < dim
            across(
                wide, keys, weights, s_stride, at(rows, d), stride, at(to, d), stride, count, add
            )

    @jit
    def run(job, count, start, stop, places):
        q_rows, d_rows, k_rows, dk, dv = places[0], places[1], places[6], places[7], places[8]
        s, ds, tile = places[9], places[10], places[12]
        q_stride, d_stride = field(job, "q_stride"), field(job, "d_stride")
        head_dim, head_dim_v = field(job, "head_dim"), field(job, "head_dim_v")
        s_stride, keys = field(job, "s_stride"), stop - start
        s, ds = at(s, start), at(ds, start)
        dk, dv, k_rows = (
            at(dk, start * q_stride),
            at(dv, start * d_stride),
            at(k_rows, start * q_stride),
        )
        add_transposed(s, s_stride, keys, d_rows, d_stride, head_dim_v, count, dv)
        add_transposed(ds, s_stride, keys, q_rows, q_stride, head_dim, count, dk)
        for d in range(0, head_dim, nr):
            wide = d + lanes < head_dim
            k, to = at(k_rows, d), at(tile, d)
            along(wide, count, ds, s_stride, k, q_stride, to, q_stride, keys, no)

    return run


@functools.cache
def waiting(unit: VectorUnit):
    """Kernel: return once the item before has added to this block of rows."""
    relax = pause(unit)

    @jit
    def wait_for(progress, m_block):
        while load_acquire(progress) <= m_block:
            relax()

    return wait_for


@functools.cache
def start_keys(variant: Variant, unit: VectorUnit):
    """Kernel: pack the keys and values of a block, and clear their gradients."""
    dtype, storage = variant.dtype, variant.storage
    lanes = unit.lanes(ITEMSIZE[dtype])
    simd = operations(dtype, lanes)
    store, splat, zero = simd.store, simd.splat, getattr(np, dtype)(0)
    pack, pack_rows = pack_k(dtype, unit, storage), gradient_rows.pack_finite_keys(variant, lanes)
    stored = pointer_to(storage)

    @jit
    def run(job, item, n_start, keys, places):
        k_panels, v_panels, k_rows, dk, dv = (
            places[4],
            places[5],
            places[6],
            places[7],
            places[8],
        )
        k_at = batch_offset(field(job, "k_table"), field(job, "k_batch"), item[BATCH])
        v_at = batch_offset(field(job, "v_table"), field(job, "v_batch"), item[BATCH])
        k_row, k_col = field(job, "k_row"), field(job, "k_col")
        v_row, v_col = field(job, "v_row"), field(job, "v_col")
        k_at += item[HEAD] * field(job, "k_head") + (item[FIRST_KEY] + n_start) * k_row
        v_at += item[HEAD] * field(job, "v_head") + (item[FIRST_KEY] + n_start) * v_row
        k, v = at(stored(field(job, "k")), k_at), at(stored(field(job, "v")), v_at)
        head_dim, head_dim_v = field(job, "head_dim"), field(job, "head_dim_v")
        q_stride, d_stride = field(job, "q_stride"), field(job, "d_stride")
        pack(k, k_row, k_col, keys, head_dim, k_panels)
        pack(v, v_row, v_col, keys, head_dim_v, v_panels)
        pack_rows(k, k_row, k_col, keys, head_dim, k_rows, q_stride)
        for n in range(0, keys * q_stride, lanes):
            store(dk, n, splat(zero))
        for n in range(0, keys * d_stride, lanes):
            store(dv, n, splat(zero))

    return run


@functools.cache
def key_block(variant: Variant, unit: VectorUnit):
    """Kernel: all rows of one key head against one of its key blocks."""
    lanes = unit.lanes(ITEMSIZE[variant.dtype])
    see, start_block = columns(variant, unit), start_keys(variant, unit)
    pack_rows = gradient_rows.pack_rows(variant, lanes)
    to_scores, multiply = scores_of_pair(variant, unit), products_of_pair(variant, unit)
    add_queries = gradient_rows.add_to_queries(variant, lanes)
    finish, wait_for = gradient_rows.write_keys(variant, lanes), waiting(unit)

    @jit
    def run(job, item, n_block, progress, places):
        q_rows, d_rows, lse, delta = places[:4]
        dk, dv, tile = places[7], places[8], places[12]
        block_m, block_n = field(job, "block_m"), field(job, "block_n")
        q_stride, d_stride = field(job, "q_stride"), field(job, "d_stride")
        n_start = n_block * block_n
        keys, rows = min(item[KEYS] - n_start, block_n), item[COUNT] * field(job, "group")
        started = False
        for m_block in range((rows + block_m - 1) // block_m if keys > 0 else 0):
            row = m_block * block_m
            count = min(block_m, rows - row)
            start, stop, full_start, full_stop, modify = see(job, item, row, count, n_start)
            if start >= stop:
                continue
            if not started:
                start_block(job, item, n_start, keys, places)
                started = True
            pack_rows(job, item, row, count, q_rows, d_rows, lse, delta)
            to_scores(
                job,
                item,
                row,
                count,
                n_start,
                start,
                stop,
                full_start,
                full_stop,
                modify,
                places,
            )
            multiply(job, count, start, stop, places)
            if n_block > 0:
                wait_for(at(progress, -1), m_block)
            add_queries(job, item, row, count, tile, q_stride)
            store_release(progress, m_block + 1)
        if started:
            finish(job, item, n_start, keys, dk, q_stride, dv, d_stride)

    return run


def backward_kernel(variant: Variant, unit: VectorUnit):
    """Return the kernel: draw work items until none is left; see cpu/job.py for its argument."""
    do_block, real = key_block(variant, unit), pointer_to(variant.dtype)
    wait_for = waiting(unit)

    @jit
    def run(job, number, scratch):
        item = INTEGERS(scratch)
        places = scratch_places(job, real(scratch + 8 * ITEM_SIZE))
        heads_kv, n_blocks = field(job, "heads_kv"), field(job, "n_blocks")
        heads, together = field(job, "heads_per_item"), field(job, "together")
        shares = field(job, "num_items") // n_blocks
        start = number // (n_blocks * together) * together
        width, rest = min(together, shares - start), number - start * n_blocks
        # The first keys first: under a causal mask most rows see them.
        n_block, first = rest // width, (start + rest % width) * heads
        for head in range(first, first + heads):
            item[BATCH], item[HEAD] = head // heads_kv, head % heads_kv
            read_ranges(job, item)
            progress = at(INTEGERS(field(job, "progress")), head * n_blocks + n_block)
            do_block(job, item, n_block, progress, places)
            if n_block > 0:
                wait_for(at(progress, -1), DONE - 1)
            store_release(progress, DONE)

    return drawing_items(run, unit)
