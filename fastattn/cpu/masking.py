"""What is done to scores before the softmax: softcap, modifiers, bias, ALiBi; and what hides a key
from a row: window, chunk, mask, bias of -inf.
"""

from __future__ import annotations

import functools

import numpy as np

from ..machine import VectorUnit
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
from .memory import at, element_loader, pointer_to
from .registers import ITEMSIZE, jit
from .simd import operations

LOG2_E = 1.4426950408889634  # 1 / ln 2
LN_2 = 0.6931471805599453


def changes_scores(variant: Variant) -> bool:
    """Whether scores are more than scaled products: scores_row() then scales them too."""
    return bool(variant.bias_dtype) or variant.softcap or variant.alibi


def hides_any(variant: Variant) -> bool:
    """Whether a key may be hidden anywhere, and not only at the edges of the window."""
    return bool(variant.bias_dtype) or variant.has_mask


@functools.cache
def scores_row(variant: Variant, unit: VectorUnit):
    """Kernel: take one row of products q·k to base-2 logits, where the variant changes scores.

    The order is scale, softcap, bias, ALiBi. Keys that a bias of -inf excludes become -inf.

    s          products, [start, stop), multiples of lanes
    width      keys of the block that exist; none at or past it is read
    scale      to base 2
    softcap    in natural units
    distance   position of the query less that of s[0]
    slope      of ALiBi, in base 2
    spare      one register of scratch
    """
    lanes = unit.lanes(ITEMSIZE[variant.dtype])
    simd = operations(variant.dtype, lanes)
    load, store, where, tanh = simd.load, simd.store, simd.where, simd.tanh
    vmax, vmin, iota, splat, fabs = simd.vmax, simd.vmin, simd.iota, simd.splat, simd.fabs
    storage = variant.bias_dtype or variant.dtype
    load_bias, one_bias = simd.loader(storage), element_loader(storage, variant.dtype)
    has_bias, softcapped, alibi = bool(variant.bias_dtype), variant.softcap, variant.alibi
    scalar, limits = getattr(np, variant.dtype), np.finfo(variant.dtype)
    neg_inf, inf, log2_e = scalar(-np.inf), scalar(np.inf), scalar(LOG2_E)
    lowest, highest = scalar(limits.min), scalar(limits.max)

    @jit
    def run(s, start, stop, width, scale, softcap, distance, slope, bias, bias_col, spare):
        for n in range(start, stop, lanes):
            x = load(s, n) * scale
            if softcapped:
                x = tanh(x * (scalar(LN_2) / softcap)) * (softcap * log2_e)
            if has_bias:
                if n + lanes <= width and bias_col == 1:
                    y = load_bias(bias, n)
                else:
                    for i in range(lanes):
                        exists = n + i < width
                        spare[i] = one_bias(bias, (n + i) * bias_col) if exists else neg_inf
                    y = load(spare, 0)
                # A finite bias must stay finite in base 2: finfo.min * log2(e) is -inf. This order
                # keeps NaN.
                base_2 = vmin(splat(highest), vmax(splat(lowest), y * log2_e))
                x = x + where(y == inf, inf, base_2)
                x = where(y == neg_inf, neg_inf, x)
            if alibi:
                x = x - fabs(iota(n) * scalar(1) - scalar(distance)) * slope
            store(s, n, x)

    return run


@functools.cache
def mask_row(variant: Variant, unit: VectorUnit):
    """Kernel: hide keys from one row of scores, before any maximum is taken.

    s          scores, [start, stop), multiples of lanes
    low, high  keys [low, high) of the block are in the window
    width      keys of the block that exist; none at or past it is read from the mask
    spare      one register of scratch
    """
    lanes = unit.lanes(ITEMSIZE[variant.dtype])
    simd = operations(variant.dtype, lanes)
    load, store, load_bytes, where = simd.load, simd.store, simd.load_bytes, simd.where
    vmin, iota, has_mask = simd.vmin, simd.iota, variant.has_mask
    scalar = getattr(np, variant.dtype)
    neg_inf, inf = scalar(-np.inf), scalar(np.inf)

    @jit
    def run(s, start, stop, low, high, width, mask, mask_col, spare):
        for n in range(start, stop, lanes):
            j = iota(n)
            visible = (j >= low) & (j < high)
            if has_mask:
                if n + lanes <= width and mask_col == 1:
                    visible = visible & load_bytes(mask, n)
                else:
                    for i in range(lanes):
                        seen = n + i < width and mask[(n + i) * mask_col] != 0
                        spare[i] = scalar(1) if seen else scalar(0)
                    visible = visible & (load(spare, 0) > scalar(0))
            # A minimum and not a select: select between load and store of one place becomes a
            # masked store (5 x slower on AMD). Excluded: -inf, even where the score is NaN.
            # Visible: the score, and +inf for NaN, which makes the row NaN as it must.
            store(s, n, vmin(load(s, n), where(visible, inf, neg_inf)))

    return run


@functools.cache
def mask_block(variant: Variant, unit: VectorUnit):
    """Kernel: mask_row() on `count` rows of scores of one key block.

    Columns [start, full_start) and [full_stop, stop) are masked: those between are seen by all.
    """
    apply = mask_row(variant, unit)
    truths = pointer_to("bool")

    @jit
    def run(job, item, row, count, n_start, start, full_start, full_stop, stop, s, spare):
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
            mask = at(truths(field(job, "mask")), place)
            scores = at(s, m * s_stride)
            apply(scores, start, full_start, low, high, width, mask, col, spare)
            apply(scores, full_stop, stop, low, high, width, mask, col, spare)
            i, r = next_row(i, r, group)

    return run


@functools.cache
def scores_block(variant: Variant, unit: VectorUnit):
    """Kernel: scores_row() on `count` rows of products of one key block, columns [start, stop)."""
    apply = scores_row(variant, unit)
    scalar = getattr(np, variant.dtype)
    real, biases = pointer_to(variant.dtype), pointer_to(variant.bias_dtype or variant.dtype)
    alibi = variant.alibi

    @jit
    def run(job, item, row, count, n_start, start, stop, s, spare):
        group, s_stride = field(job, "group"), field(job, "s_stride")
        width = item[KEYS] - n_start
        scale, softcap = scalar(field(job, "scale_log2")), scalar(field(job, "softcap"))
        col = field(job, "bias_col")
        base = batch_offset(field(job, "bias_table"), field(job, "bias_batch"), item[BATCH])
        base += (n_start + item[FIRST_BIAS]) * col
        heads_q = group * field(job, "heads_kv")
        slope = scalar(0)
        i, r = row // group, row % group
        for m in range(count):
            h = item[HEAD] * group + r
            distance = i + item[OFFSET_IN_KEYS] - n_start
            if alibi:
                slopes = real(field(job, "alibi"))
                slope = slopes[item[BATCH] * heads_q + h] * scalar(LOG2_E)
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
                at(biases(field(job, "bias")), place),
                col,
                spare,
            )
            i, r = next_row(i, r, group)

    return run
