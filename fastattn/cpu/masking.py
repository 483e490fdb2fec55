"""What is done to scores before the softmax: softcap, score_mod, bias, ALiBi; and what hides a key
from a row: window, chunk, mask, mask_mod, scores of -inf.
"""

from __future__ import annotations

import functools

import numpy as np

from ..modifier import Modifier
from ..problem import Variant
from .fields import (
    BATCH,
    FIRST_BIAS,
    HEAD,
    KEYS,
    OFFSET_IN_KEYS,
    batch_offset,
    field,
    high_key,
    low_key,
    next_row,
)
from .job import BIAS_KINDS, LN_2, LOG2_E
from .memory import at, element_loader, pointer_to
from .modifiers import mask_mod, score_mod
from .registers import jit
from .simd import operations


@functools.cache
def bias_reader(dtype: str, lanes: int):
    """(read, element): a register of bias from an address, and one element; both as dtype."""
    f32, f64, f16, bf16 = (pointer_to(kind) for kind in BIAS_KINDS[1:])

    def by_kind(load_32, load_64, load_16, load_b16):
        @jit
        def read(address, index, kind):
            if kind == 1:
                return load_32(f32(address), index)
            if kind == 2:
                return load_64(f64(address), index)
            if kind == 3:
                return load_16(f16(address), index)
            return load_b16(bf16(address), index)

        return read

    loader = operations(dtype, lanes).loader
    return (
        by_kind(*(loader(kind) for kind in BIAS_KINDS[1:])),
        by_kind(*(element_loader(kind, dtype) for kind in BIAS_KINDS[1:])),
    )


@functools.cache
def scores_row(dtype: str, lanes: int, modifier: Modifier | None):
    """Kernel: take one row of products q·k to base-2 logits, where they are more than scaled.

    The order is scale, softcap, score_mod, bias, ALiBi. Keys that a score or a bias of -inf
    excludes become -inf.

    s          products, [start, stop), multiples of lanes
    width      keys of the block that exist; none at or past it is read
    scale      to base 2
    softcap    in natural units, 0 if off
    distance   position of the query less that of s[0]
    slope      of ALiBi, in base 2, 0 if off
    bias, kind address of the row's first bias, less bias_at elements; how it is stored
    b, h, i, j, aux  what a score_mod is given for s[0]
    spare      one register of scratch
    """
    simd = operations(dtype, lanes)
    load, store, where, splat = simd.load, simd.store, simd.where, simd.splat
    vmax, vmin, iota, fabs, some = simd.vmax, simd.vmin, simd.iota, simd.fabs, simd.some
    tanh = simd.tanh_of_some
    read, element = bias_reader(dtype, lanes)
    scalar, limits = getattr(np, dtype), np.finfo(dtype)
    neg_inf, inf, log2_e = scalar(-np.inf), scalar(np.inf), scalar(LOG2_E)
    lowest, highest = scalar(limits.min), scalar(limits.max)
    usual, own_kind, real = highest / scalar(2), BIAS_KINDS.index(dtype), pointer_to(dtype)
    modified = modifier is not None
    modify = score_mod(modifier, dtype, lanes) if modifier is not None else None

    @jit
    def base_2(x):
        """x / ln 2. What is finite stays so: finfo.min * log2(e) is -inf. This order keeps NaN."""
        y = vmin(splat(highest), vmax(splat(lowest), x * log2_e))
        return where(fabs(x) == inf, x, y)

    @jit
    def unusual(x, y, z, w):
        """Whether any is infinite, or would be in base 2; passes over NaN, which stays NaN."""
        largest = vmax(fabs(x), vmax(fabs(y), vmax(fabs(z), vmax(fabs(w), splat(scalar(0))))))
        return some(largest >= usual)

    @jit
    def four_base_2(x, y, z, w):
        if unusual(x, y, z, w):
            return base_2(x), base_2(y), base_2(z), base_2(w)
        return x * log2_e, y * log2_e, z * log2_e, w * log2_e

    @jit
    def bend(s, start, stop, scale, softcap, b, h, i, j, aux):
        """Softcap and score_mod, four registers step by step: one tanh is a chain of 90 cycles."""
        natural = scale * scalar(LN_2)
        # Two divisions cost more than all else that tanh does: 1.34 -> 1.23 times plain on AVX2.
        softcap = min(softcap, highest * scalar(LN_2))  # it must be finite in base 2
        inverse = scalar(1) / softcap if softcap != scalar(0) else scalar(0)
        cap, last = softcap if modified else softcap * log2_e, stop - lanes
        for n in range(start, stop, 4 * lanes):
            # Past the last register comes that one again, and what is right is stored last.
            one, two = min(n + lanes, last), min(n + 2 * lanes, last)
            three = min(n + 3 * lanes, last)
            x, y, z, w = load(s, n), load(s, one), load(s, two), load(s, three)
            x, y, z, w = x * natural, y * natural, z * natural, w * natural
            if softcap != scalar(0):
                x, y, z, w = tanh((x * inverse, y * inverse, z * inverse, w * inverse))
                x, y, z, w = x * cap, y * cap, z * cap, w * cap
            if modified:
                x, y, z, w = modify((x, y, z, w), b, h, i, j + n, aux)
                x, y, z, w = four_base_2(x, y, z, w)
            store(s, three, w)
            store(s, two, z)
            store(s, one, y)
            store(s, n, x)

    @jit
    def add_usual_bias(s, start, stop, bias, scale):
        """Scale products and add a row of bias, as far as none is infinite, nor will be in base 2.
        Return the column to go on with. To the bit what the general way gives: 0.15 for 0.30 ns a
        score.
        """
        n = start
        while n + 4 * lanes <= stop:
            one, two, three = n + lanes, n + 2 * lanes, n + 3 * lanes
            x, y, z, w = load(bias, n), load(bias, one), load(bias, two), load(bias, three)
            if unusual(x, y, z, w):
                break
            store(s, n, load(s, n) * scale + x * log2_e)
            store(s, one, load(s, one) * scale + y * log2_e)
            store(s, two, load(s, two) * scale + z * log2_e)
            store(s, three, load(s, three) * scale + w * log2_e)
            n += 4 * lanes
        return n

    @jit
    def biased(x, n, width, bias, bias_at, col, kind, spare):
        if n + lanes <= width and col == 1:
            y = read(bias, bias_at + n, kind)
        else:
            for i in range(lanes):
                place = bias_at + (n + i) * col
                spare[i] = element(bias, place, kind) if n + i < width else neg_inf
            y = load(spare, 0)
        return where(y == neg_inf, neg_inf, x + base_2(y))

    @jit
    def run(
        s,
        start,
        stop,
        width,
        scale,
        softcap,
        distance,
        slope,
        bias,
        bias_at,
        col,
        kind,
        spare,
        b,
        h,
        i,
        j,
        aux,
    ):
        bends = modified or softcap != scalar(0)
        if bends:
            bend(s, start, stop, scale, softcap, b, h, i, j, aux)
            scale = scalar(1)
        if kind != 0:
            n = start
            if kind == own_kind and col == 1:
                n = add_usual_bias(s, n, min(stop, width), at(real(bias), bias_at), scale)
            for m in range(n, stop, lanes):
                x = load(s, m) * scale
                store(s, m, biased(x, m, width, bias, bias_at, col, kind, spare))
            scale = scalar(1)
        if slope != scalar(0) or not (bends or kind != 0):
            for n in range(start, stop, lanes):
                far = fabs(iota(n) * scalar(1) - scalar(distance))
                store(s, n, load(s, n) * scale - far * slope)

    return run


@functools.cache
def mask_row(dtype: str, lanes: int, modifier: Modifier | None):
    """Kernel: hide keys from one row of scores, before any maximum is taken.

    s          scores, [start, stop), multiples of lanes
    low, high  keys [low, high) of the block are in the window
    width      keys of the block that exist; none at or past it is read from the mask
    mask       address of the row's first truth value, less mask_at; 0 without a mask
    spare      one register of scratch
    modify     whether the mask_mod is to be asked
    b, h, i, j, aux  what it is given for s[0]
    """
    simd = operations(dtype, lanes)
    load, store, load_bytes, where = simd.load, simd.store, simd.load_bytes, simd.where
    number_min, iota, truths = simd.number_min, simd.iota, pointer_to("bool")
    scalar = getattr(np, dtype)
    neg_inf, inf = scalar(-np.inf), scalar(np.inf)
    modified = modifier is not None
    may_see = mask_mod(modifier, dtype, lanes) if modifier is not None else None

    @jit
    def run(s, start, stop, low, high, width, mask, mask_at, col, spare, modify, b, h, i, j, aux):
        if mask != 0 and col == 1 and not modify and low <= start:
            row = at(truths(mask), mask_at)
            whole = start + (min(stop, width, high) - start) // lanes * lanes
            for n in range(start, whole, lanes):
                store(s, n, number_min(load(s, n), where(load_bytes(row, n), inf, neg_inf)))
            start = max(start, whole)
        for n in range(start, stop, lanes):
            key = iota(n)
            visible = (key >= low) & (key < high)
            if modified and modify:
                visible = visible & may_see(b, h, i, j + n, aux)
            if mask != 0:
                row = at(truths(mask), mask_at)
                if n + lanes <= width and col == 1:
                    visible = visible & load_bytes(row, n)
                else:
                    for m in range(lanes):
                        seen = n + m < width and row[(n + m) * col] != 0
                        spare[m] = scalar(1) if seen else scalar(0)
                    visible = visible & (load(spare, 0) > scalar(0))
            # A minimum and not a select: select between load and store of one place becomes a
            # masked store (5 x slower on AMD). Excluded: -inf, even where the score is NaN.
            # Visible: the score, and +inf for NaN, which makes the row NaN as it must.
            store(s, n, number_min(load(s, n), where(visible, inf, neg_inf)))

    return run


@functools.cache
def hide_padding(dtype: str, lanes: int):
    """Kernel: hide the keys past the last one, `stop`, of a register from n on in `count` rows.

    What mask_row() does, where these alone are hidden (197 keys: 0.97 of the time of a call).
    """
    simd = operations(dtype, lanes)
    load, store, where, iota = simd.load, simd.store, simd.where, simd.iota
    number_min = simd.number_min
    scalar = getattr(np, dtype)
    neg_inf, inf = scalar(-np.inf), scalar(np.inf)

    @jit
    def run(s, s_stride, count, n, stop):
        limit = where(iota(n) < stop, inf, neg_inf)
        for m in range(count):
            row = at(s, m * s_stride)
            store(row, n, number_min(load(row, n), limit))

    return run


@functools.cache
def mask_block(variant: Variant, lanes: int):
    """Kernel: mask_row() on `count` rows of scores of one key block.

    Columns [start, full_start) and [full_stop, stop) are masked: those between are seen by all.
    """
    apply = mask_row(variant.dtype, lanes, variant.mask_mod)

    @jit
    def run(job, item, row, count, n_start, start, full_start, full_stop, stop, s, spare, modify):
        group, s_stride = field(job, "group"), field(job, "s_stride")
        width = item[KEYS] - n_start
        col = field(job, "mask_col")
        base = batch_offset(field(job, "mask_table"), field(job, "mask_batch"), item[BATCH])
        base += (n_start + item[FIRST_BIAS]) * col
        i, r = row // group, row % group
        for m in range(count):
            position = i + item[OFFSET_IN_KEYS]
            low = low_key(job, position) - n_start
            high = high_key(job, position, item[KEYS]) - n_start
            h = item[HEAD] * group + r
            place = base + h * field(job, "mask_head") + i * field(job, "mask_row")
            scores, mask = at(s, m * s_stride), field(job, "mask")
            j, aux = n_start + item[FIRST_BIAS] + field(job, "first_key"), field(job, "mask_aux")
            for part in range(2):
                begin, end = (start, full_start) if part == 0 else (full_stop, stop)
                apply(
                    scores,
                    begin,
                    end,
                    low,
                    high,
                    width,
                    mask,
                    place,
                    col,
                    spare,
                    modify,
                    item[BATCH],
                    h,
                    i,
                    j,
                    aux,
                )
            i, r = next_row(i, r, group)

    return run


@functools.cache
def scores_block(variant: Variant, lanes: int):
    """Kernel: scores_row() on `count` rows of products of one key block, columns [start, stop)."""
    apply = scores_row(variant.dtype, lanes, variant.score_mod)
    scalar, real = getattr(np, variant.dtype), pointer_to(variant.dtype)
    largest = scalar(np.finfo(variant.dtype).max)  # what is finite must stay so in base 2

    @jit
    def run(job, item, row, count, n_start, start, stop, s, spare):
        group, s_stride = field(job, "group"), field(job, "s_stride")
        width = item[KEYS] - n_start
        scale, softcap = scalar(field(job, "scale_log2")), scalar(field(job, "softcap"))
        col = field(job, "bias_col")
        base = batch_offset(field(job, "bias_table"), field(job, "bias_batch"), item[BATCH])
        base += (n_start + item[FIRST_BIAS]) * col
        kind = field(job, "bias_kind")
        heads_q = group * field(job, "heads_kv")
        slope = scalar(0)
        i, r = row // group, row % group
        for m in range(count):
            h = item[HEAD] * group + r
            distance = i + item[OFFSET_IN_KEYS] - n_start
            if field(job, "alibi") != 0:
                slopes = real(field(job, "alibi"))
                slope = min(
                    max(slopes[item[BATCH] * heads_q + h] * scalar(LOG2_E), -largest), largest
                )
            place = base + h * field(job, "bias_head") + i * field(job, "bias_row")
            apply(
                at(s, m * s_stride),
                start,
                stop,
                width,
                scale,
                softcap,
                distance,
                slope,
                field(job, "bias"),
                place,
                col,
                kind,
                spare,
                item[BATCH],
                h,
                i,
                n_start + item[FIRST_BIAS] + field(job, "first_key"),
                field(job, "score_aux"),
            )
            i, r = next_row(i, r, group)

    return run
