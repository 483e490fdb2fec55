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
from types import SimpleNamespace

import numpy as np
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from ..machine import VectorUnit
from ..problem import Variant
from .job import FLOATS, OFFSET
from .microkernel import pack_k, pack_v, panel_product, tile_shape
from .simd import (
    FLOAT,
    I64,
    ITEMSIZE,
    address,
    at,
    element_loader,
    fetch_add,
    jit,
    operations,
    pointer_to,
)
from .softmax import merge, row_update

LOG2_E = 1.4426950408889634  # 1 / ln 2
# Dimensions that one chain of a score adds up. A chain of 224 errs 2.7 times as much as NumPy's
# small products do, one of 64 at most 1.9 times; shorter ones cost more than they give.
KC = 64


@intrinsic(prefer_literal=True)
def field(typingctx, job, name):
    """One field of the Job at this address, by name."""
    is_float = name.literal_value in FLOATS
    kind, element = (types.float64, FLOAT["float64"]) if is_float else (types.int64, I64)

    def codegen(context, builder, sig, args):
        place = builder.gep(
            builder.bitcast(args[0], ir.IntType(8).as_pointer()),
            [ir.Constant(I64, OFFSET[name.literal_value])],
        )
        return builder.load(builder.bitcast(place, element.as_pointer()))

    return kind(job, name), codegen


@jit
def batch_offset(table, stride, b):
    """Elements from the start of an operand to batch b."""
    return INT_POINTER(table)[b] if table != 0 else b * stride


INT_POINTER = pointer_to("int64")


@jit
def next_row(i, r, group):
    """(query, head in group) of the next row. Dividing for each costs 7 % at 128 keys."""
    last = r + 1 == group
    return (i + 1, 0) if last else (i, r + 1)


@functools.cache
def mask_row(variant: Variant, unit: VectorUnit):
    """Kernel: apply bias, mask and window to one row of scores, before any maximum is taken.

    s       products q·k [start, stop), multiples of lanes, of keys n_start + start ...; with a bias
            they become base-2 logits, scaled, else they stay unscaled
    low, high  the window: keys [low, high) of the block are visible
    width   keys of the block that exist; none at or past it is read from mask or bias
    """
    lanes = unit.lanes(ITEMSIZE[variant.dtype])
    simd = operations(variant.dtype, lanes)
    load, store, load_bytes, where, vmax, vmin, iota = (
        simd.load,
        simd.store,
        simd.load_bytes,
        simd.where,
        simd.vmax,
        simd.vmin,
        simd.iota,
    )
    storage = variant.bias_dtype or variant.dtype
    load_bias, one_bias = simd.loader(storage), element_loader(storage, variant.dtype)
    scalar = getattr(np, variant.dtype)
    neg_inf, inf, log2_e = scalar(-np.inf), scalar(np.inf), scalar(LOG2_E)
    lowest, highest = scalar(np.finfo(variant.dtype).min), scalar(np.finfo(variant.dtype).max)
    splat, has_mask, has_bias = simd.splat, variant.has_mask, bool(variant.bias_dtype)

    @jit
    def run(s, start, stop, low, high, width, scale, mask, mask_col, bias, bias_col, spare):
        for n in range(start, stop, lanes):
            j = iota(n)
            visible = (j >= low) & (j < high)
            x = load(s, n)
            inside = n + lanes <= width
            if has_bias:
                if inside and bias_col == 1:
                    y = load_bias(bias, n)
                else:
                    for i in range(lanes):
                        spare[i] = one_bias(bias, (n + i) * bias_col) if n + i < width else neg_inf
                    y = load(spare, 0)
                visible = visible & (y != neg_inf)
                # A finite bias must stay finite in base 2: finfo.min * log2(e) is -inf. This order
                # keeps NaN.
                base_2 = vmin(splat(highest), vmax(splat(lowest), y * log2_e))
                x = x * scale + where(y == inf, inf, base_2)
            if has_mask:
                if inside and mask_col == 1:
                    visible = visible & load_bytes(mask, n)
                else:
                    for i in range(lanes):
                        seen = n + i < width and mask[(n + i) * mask_col] != 0
                        spare[i] = scalar(1) if seen else scalar(0)
                    visible = visible & (load(spare, 0) > scalar(0))
            # A minimum and not a select: select between load and store of one place becomes a
            # masked store (5 x slower on AMD). Excluded: -inf, even where x is NaN. Visible: x, and
            # +inf for NaN, which makes the row NaN as it must.
            store(s, n, vmin(x, where(visible, inf, neg_inf)))

    return run


@functools.cache
def careful_product(dtype: str, lanes: int):
    """Kernel: acc += p @ v for one row, without touching keys whose p is -0.0 (excluded): their v
    may be NaN or inf.

    The additions are product()'s, in its order.
    """
    simd = operations(dtype, lanes)
    load, store, splat, fma = simd.load, simd.store, simd.splat, simd.fma
    scalar = getattr(np, dtype)
    one = scalar(1)

    @jit
    def run(p, start, stop, panels, nr, block_n, acc, acc_stride):
        for d in range(0, acc_stride, lanes):
            first = d // nr * nr
            width = min(nr, acc_stride - first)
            panel = at(panels, first * block_n + d - first)
            total = splat(scalar(0))
            for n in range(start, stop):
                weight = p[n]
                if weight != scalar(0) or one / weight > scalar(0):
                    total = fma(splat(weight), load(panel, n * width), total)
            store(acc, d, load(acc, d) + total)

    return run


@functools.cache
def write_rows(dtype: str, lanes: int):
    """Kernel: normalise `count` finished rows and write out and lse."""
    simd = operations(dtype, lanes)
    load, store = simd.load, simd.store
    scalar, real = getattr(np, dtype), pointer_to(dtype)

    @jit
    def run(job, b, g, row, count, acc, row_max, row_sum):
        group, heads_kv = field(job, "group"), field(job, "heads_kv")
        head_dim_v, acc_stride = field(job, "head_dim_v"), field(job, "acc_stride")
        base = at(
            real(field(job, "out")),
            batch_offset(field(job, "out_table"), field(job, "out_batch"), b),
        )
        col = field(job, "out_col")
        whole = head_dim_v // lanes * lanes if col == 1 else 0
        seqlen_q = field(job, "rows") // group
        i, r = row // group, row % group
        for m in range(count):
            h = g * group + r
            out = at(base, h * field(job, "out_head") + i * field(job, "out_row"))
            total = row_sum[m]
            # exactly 0: a row that saw nothing. A NaN is not swallowed.
            divisor = scalar(1) if total == scalar(0) else total  # acc is 0 then
            of = at(acc, m * acc_stride)
            for d in range(0, whole, lanes):
                store(out, d, load(of, d) / divisor)
            for d in range(whole, head_dim_v):
                out[d * col] = of[d] / divisor
            if field(job, "lse") != 0:
                state = at(real(field(job, "lse")), 2 * ((b * heads_kv * group + h) * seqlen_q + i))
                state[0] = row_max[m]
                state[1] = total
            i, r = next_row(i, r, group)

    return run


def _parts(variant: Variant, unit: VectorUnit) -> SimpleNamespace:
    """The kernels that a forward kernel is made of."""
    dtype = variant.dtype
    lanes = unit.lanes(ITEMSIZE[dtype])
    _, nv = tile_shape(unit)
    return SimpleNamespace(
        pack_k=pack_k(dtype, unit),
        pack_v=pack_v(dtype, unit),
        scores=[panel_product(dtype, unit, n + 1, False) for n in range(nv)],
        outputs=[panel_product(dtype, unit, n + 1, True) for n in range(nv)],
        mask_row=mask_row(variant, unit),
        row_update=row_update(dtype, lanes),
        careful=careful_product(dtype, lanes),
        merge=merge(dtype, lanes),
        write_rows=write_rows(dtype, lanes),
    )


def forward_kernel(variant: Variant, unit: VectorUnit):
    """Return the kernel: draw work items until none is left; see cpu/job.py for its argument."""
    dtype = variant.dtype
    lanes = unit.lanes(ITEMSIZE[dtype])
    _, nv = tile_shape(unit)
    nr = nv * lanes
    parts = _parts(variant, unit)
    pack_keys, pack_values, mask_scores = parts.pack_k, parts.pack_v, parts.mask_row
    update, careful, fold = parts.row_update, parts.careful, parts.merge
    finish = parts.write_rows
    scores_1, scores_2 = parts.scores
    outputs_1, outputs_2 = parts.outputs
    scalar = getattr(np, dtype)
    neg_inf = scalar(-np.inf)
    simd = operations(dtype, lanes)
    load, store, splat = simd.load, simd.store, simd.splat
    real, integers, truths = pointer_to(dtype), pointer_to("int64"), pointer_to("bool")
    biases = pointer_to(variant.bias_dtype or dtype)
    has_mask, has_bias = variant.has_mask, bool(variant.bias_dtype)
    masked = has_mask or has_bias

    @jit
    def pack_q(job, b, g, row, count, q_rows):
        """Query rows, (count, head_dim), times the sign of the scale: so that the largest product
        is the largest score.
        """
        head_dim, group = field(job, "head_dim"), field(job, "group")
        sign = scalar(field(job, "q_sign"))
        base = at(
            real(field(job, "q")), batch_offset(field(job, "q_table"), field(job, "q_batch"), b)
        )
        col = field(job, "q_col")
        whole = head_dim // lanes * lanes if col == 1 else 0
        i, r = row // group, row % group
        for m in range(count):
            q = at(base, (g * group + r) * field(job, "q_head") + i * field(job, "q_row"))
            to = at(q_rows, m * head_dim)
            for d in range(0, whole, lanes):
                store(to, d, load(q, d) * sign)
            for d in range(whole, head_dim):
                to[d] = q[d * col] * sign
            i, r = next_row(i, r, group)

    @jit
    def clear(acc, row_max, row_sum, count, acc_stride):
        zero = splat(scalar(0))
        for d in range(0, count * acc_stride, lanes):
            store(acc, d, zero)
        for m in range(count):
            row_max[m] = neg_inf
            row_sum[m] = scalar(0)

    @jit
    def mask_block(job, b, g, row, count, n_start, start, stop, width, s, spare):
        """Bias, mask and window on `count` rows of scores."""
        if start >= stop:
            return
        group, s_stride = field(job, "group"), field(job, "s_stride")
        offset, left, right = field(job, "offset"), field(job, "left"), field(job, "right")
        mask_base = batch_offset(field(job, "mask_table"), field(job, "mask_batch"), b)
        bias_base = batch_offset(field(job, "bias_table"), field(job, "bias_batch"), b)
        mask_col, bias_col = field(job, "mask_col"), field(job, "bias_col")
        i, r = row // group, row % group
        for m in range(count):
            h = g * group + r
            low = max(i + offset - left - n_start, 0)
            high = min(i + offset + right + 1 - n_start, width)
            mask_at = (
                mask_base
                + h * field(job, "mask_head")
                + i * field(job, "mask_row")
                + n_start * mask_col
            )
            bias_at = (
                bias_base
                + h * field(job, "bias_head")
                + i * field(job, "bias_row")
                + n_start * bias_col
            )
            mask_scores(
                at(s, m * s_stride),
                start,
                stop,
                low,
                high,
                width,
                scalar(field(job, "scale_log2")),
                at(truths(field(job, "mask")), mask_at),
                mask_col,
                at(biases(field(job, "bias")), bias_at),
                bias_col,
                spare,
            )
            i, r = next_row(i, r, group)

    @jit
    def score_block(q_rows, count, head_dim, k_panels, start, stop, s, s_stride):
        """s[m, n] = q_rows[m] · k[n] for n in [start, stop), multiples of lanes; start of nr."""
        n = start
        while n < stop:
            panel, to = at(k_panels, n * head_dim), at(s, n)
            wide = n + nr <= stop
            depth = min(KC, head_dim)
            if wide:
                scores_2(count, q_rows, head_dim, panel, nr, to, s_stride, depth)
            else:
                scores_1(count, q_rows, head_dim, panel, nr, to, s_stride, depth)
            for d in range(KC, head_dim, KC):
                depth = min(KC, head_dim - d)
                if wide:
                    outputs_2(
                        count, at(q_rows, d), head_dim, at(panel, d * nr), nr, to, s_stride, depth
                    )
                else:
                    outputs_1(
                        count, at(q_rows, d), head_dim, at(panel, d * nr), nr, to, s_stride, depth
                    )
            n += nr

    @jit
    def output_block(s, s_stride, count, v_panels, block_n, start, stop, acc, acc_stride):
        """acc[m] += sum_n p[m, n] * v[n] for n in [start, stop)."""
        p, depth = at(s, start), stop - start
        d = 0
        while d + nr <= acc_stride:
            panel = at(v_panels, d * block_n + start * nr)
            outputs_2(count, p, s_stride, panel, nr, at(acc, d), acc_stride, depth)
            d += nr
        if d < acc_stride:
            panel = at(v_panels, d * block_n + start * lanes)
            outputs_1(count, p, s_stride, panel, lanes, at(acc, d), acc_stride, depth)

    @jit
    def key_block(
        job, b, g, row, count, n_start, n_stop, q_rows, acc, row_max, row_sum, panels, s, spare
    ):
        """All rows of an item against the keys [n_start, n_stop) of one block."""
        head_dim, head_dim_v = field(job, "head_dim"), field(job, "head_dim_v")
        group, offset = field(job, "group"), field(job, "offset")
        left, right = field(job, "left"), field(job, "right")
        mc, s_stride, acc_stride = (
            field(job, "mc"),
            field(job, "s_stride"),
            field(job, "acc_stride"),
        )
        block_n = field(job, "block_n")
        scale = (
            scalar(1) if has_bias else scalar(field(job, "scale_log2"))
        )  # mask_row() has applied it with the bias
        width = n_stop - n_start
        first = max(row // group + offset - left - n_start, 0) // nr * nr
        last = min((row + count - 1) // group + offset + right + 1 - n_start, width)
        if first >= last:
            return
        k_panels, v_panels = panels, at(panels, block_n * head_dim)
        k = at(real(field(job, "k")), batch_offset(field(job, "k_table"), field(job, "k_batch"), b))
        v = at(real(field(job, "v")), batch_offset(field(job, "v_table"), field(job, "v_batch"), b))
        k_row, k_col = field(job, "k_row"), field(job, "k_col")
        v_row, v_col = field(job, "v_row"), field(job, "v_col")
        k = at(k, g * field(job, "k_head") + (n_start + first) * k_row)
        v = at(v, g * field(job, "v_head") + (n_start + first) * v_row)
        pack_keys(k, k_row, k_col, last - first, head_dim, at(k_panels, first * head_dim))
        keys = last - first
        unsafe = pack_values(v, v_row, v_col, keys, block_n, head_dim_v, v_panels)
        for m in range(0, count, mc):
            here = min(mc, count - m)
            top, bottom = (row + m) // group + offset, (row + m + here - 1) // group + offset
            start = max(top - left - n_start, first) // nr * nr
            stop = min(bottom + right + 1 - n_start, last)
            if start >= stop:
                continue
            padded = (stop + lanes - 1) // lanes * lanes
            score_block(
                at(q_rows, m * head_dim), here, head_dim, k_panels, start, padded, s, s_stride
            )
            # Columns that every row sees need no window: only those before and after them are
            # masked.
            full_start = max(bottom - left - n_start, start)
            full_stop = min(top + right + 1 - n_start, width)
            partial = masked or full_start > start or full_stop < padded
            if masked:
                mask_block(job, b, g, row + m, here, n_start, start, padded, width, s, spare)
            elif partial:
                full_start = min((full_start + lanes - 1) // lanes * lanes, padded)
                full_stop = max(full_stop // lanes * lanes, full_start)
                mask_block(job, b, g, row + m, here, n_start, start, full_start, width, s, spare)
                mask_block(job, b, g, row + m, here, n_start, full_stop, padded, width, s, spare)
            exclude = partial and unsafe != 0
            for i in range(here):
                update(
                    at(s, i * s_stride),
                    start,
                    padded,
                    scale,
                    at(acc, (m + i) * acc_stride),
                    acc_stride,
                    at(row_max, m + i),
                    at(row_sum, m + i),
                    exclude,
                )
            if exclude:
                for i in range(here):
                    careful(
                        at(s, i * s_stride + first),
                        start - first,
                        stop - first,
                        v_panels,
                        nr,
                        block_n,
                        at(acc, (m + i) * acc_stride),
                        acc_stride,
                    )
            else:
                output_block(
                    at(s, first),
                    s_stride,
                    here,
                    v_panels,
                    block_n,
                    start - first,
                    stop - first,
                    at(acc, m * acc_stride),
                    acc_stride,
                )

    @jit
    def keep_partial(job, b, g, row, count, split, acc, row_max, row_sum):
        """Leave one split's unnormalised rows for combine()."""
        acc_stride, num_splits = field(job, "acc_stride"), field(job, "num_splits")
        base = (b * field(job, "heads_kv") + g) * field(job, "rows")
        for m in range(count):
            place = ((base + row + m) * num_splits + split) * (acc_stride + 2)
            to = at(real(field(job, "partial")), place)
            for d in range(0, acc_stride):
                to[d] = acc[m * acc_stride + d]
            to[acc_stride] = row_max[m]
            to[acc_stride + 1] = row_sum[m]

    @jit
    def work_item(job, item, scratch):
        heads_kv, rows, block_m = field(job, "heads_kv"), field(job, "rows"), field(job, "block_m")
        head_dim, acc_stride = field(job, "head_dim"), field(job, "acc_stride")
        block_n, split_n, num_splits = (
            field(job, "block_n"),
            field(job, "split_n"),
            field(job, "num_splits"),
        )
        group, offset, seqlen_k = field(job, "group"), field(job, "offset"), field(job, "seqlen_k")
        heads = field(job, "num_items") // (field(job, "m_blocks") * num_splits)
        # The last rows first: under a causal mask they see most, and the large items should not
        # come last.
        m_block = field(job, "m_blocks") - 1 - item // (heads * num_splits)
        split, head = item // heads % num_splits, item % heads
        b, g = head // heads_kv, head % heads_kv
        row = m_block * block_m
        count = min(block_m, rows - row)
        # scratch: q_rows, acc, later acc, states, k and v panels, scores, one spare register
        q_rows = scratch
        acc = at(q_rows, block_m * head_dim)
        later = at(acc, block_m * acc_stride)
        row_max = at(later, block_m * acc_stride)
        row_sum, later_max, later_sum = (
            at(row_max, block_m),
            at(row_max, 2 * block_m),
            at(row_max, 3 * block_m),
        )
        panels = at(row_max, 4 * block_m)
        s = at(panels, block_n * (head_dim + acc_stride))
        spare = at(s, field(job, "mc") * field(job, "s_stride"))
        pack_q(job, b, g, row, count, q_rows)
        clear(acc, row_max, row_sum, count, acc_stride)
        start = max(row // group + offset - field(job, "left"), 0)
        stop = min((row + count - 1) // group + offset + field(job, "right") + 1, seqlen_k)
        if num_splits > 1:
            start, stop = max(start, split * split_n), min(stop, (split + 1) * split_n)
        n_start = start // block_n * block_n
        while n_start < stop:
            boundary = (n_start // split_n + 1) * split_n
            fresh = n_start > start and n_start % split_n == 0
            if fresh:
                clear(later, later_max, later_sum, count, acc_stride)
                while n_start < min(stop, boundary):
                    n_stop = min(n_start + block_n, seqlen_k)
                    key_block(
                        job,
                        b,
                        g,
                        row,
                        count,
                        n_start,
                        n_stop,
                        q_rows,
                        later,
                        later_max,
                        later_sum,
                        panels,
                        s,
                        spare,
                    )
                    n_start += block_n
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
            else:
                n_stop = min(n_start + block_n, seqlen_k)
                key_block(
                    job,
                    b,
                    g,
                    row,
                    count,
                    n_start,
                    n_stop,
                    q_rows,
                    acc,
                    row_max,
                    row_sum,
                    panels,
                    s,
                    spare,
                )
                n_start += block_n
        if num_splits > 1:
            keep_partial(job, b, g, row, count, split, acc, row_max, row_sum)
        else:
            finish(job, b, g, row, count, acc, row_max, row_sum)

    def forward(job, scratch, quota):
        counter = integers(field(job, "counter"))
        num_items = field(job, "num_items")
        scratch_address = address(scratch)
        while quota > 0:
            item = fetch_add(counter, 1)
            if item >= num_items:
                return 0
            work_item(job, item, real(scratch_address))
            quota -= 1
        return 1

    return forward
