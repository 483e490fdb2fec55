"""Bias, mask and window on scores: everything that hides a key from a row in a partial block."""

from __future__ import annotations

import functools

import numpy as np

from ..machine import VectorUnit
from ..problem import Variant
from .fields import batch_offset, field, next_row
from .simd import ITEMSIZE, at, element_loader, jit, operations, pointer_to

LOG2_E = 1.4426950408889634  # 1 / ln 2


@functools.cache
def mask_row(variant: Variant, unit: VectorUnit):
    """Kernel: apply bias, mask and window to one row of scores, before any maximum is taken.

    s          products q·k [start, stop), multiples of lanes, of the block's keys; with a bias they
               become base-2 logits, scaled, else they stay unscaled
    low, high  the window: keys [low, high) of the block are visible
    width      keys of the block that exist; none at or past it is read from mask or bias
    spare      one register of scratch
    """
    lanes = unit.lanes(ITEMSIZE[variant.dtype])
    simd = operations(variant.dtype, lanes)
    load, store, load_bytes, where = simd.load, simd.store, simd.load_bytes, simd.where
    vmax, vmin, iota, splat = simd.vmax, simd.vmin, simd.iota, simd.splat
    storage = variant.bias_dtype or variant.dtype
    load_bias, one_bias = simd.loader(storage), element_loader(storage, variant.dtype)
    has_mask, has_bias = variant.has_mask, bool(variant.bias_dtype)
    scalar, limits = getattr(np, variant.dtype), np.finfo(variant.dtype)
    neg_inf, inf, log2_e = scalar(-np.inf), scalar(np.inf), scalar(LOG2_E)
    lowest, highest = scalar(limits.min), scalar(limits.max)

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
                        exists = n + i < width
                        spare[i] = one_bias(bias, (n + i) * bias_col) if exists else neg_inf
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
def mask_block(variant: Variant, unit: VectorUnit):
    """Kernel: mask_row() on `count` rows of scores of one key block, columns [start, stop)."""
    apply = mask_row(variant, unit)
    scalar = getattr(np, variant.dtype)
    truths, biases = pointer_to("bool"), pointer_to(variant.bias_dtype or variant.dtype)

    @jit
    def run(job, b, g, row, count, n_start, start, stop, width, s, spare):
        if start >= stop:
            return
        group, s_stride = field(job, "group"), field(job, "s_stride")
        offset, left, right = field(job, "offset"), field(job, "left"), field(job, "right")
        scale = scalar(field(job, "scale_log2"))
        mask_col, bias_col = field(job, "mask_col"), field(job, "bias_col")
        mask_base = batch_offset(field(job, "mask_table"), field(job, "mask_batch"), b)
        bias_base = batch_offset(field(job, "bias_table"), field(job, "bias_batch"), b)
        mask = at(truths(field(job, "mask")), mask_base + n_start * mask_col)
        bias = at(biases(field(job, "bias")), bias_base + n_start * bias_col)
        i, r = row // group, row % group
        for m in range(count):
            h = g * group + r
            low = max(i + offset - left - n_start, 0)
            high = min(i + offset + right + 1 - n_start, width)
            mask_at = h * field(job, "mask_head") + i * field(job, "mask_row")
            bias_at = h * field(job, "bias_head") + i * field(job, "bias_row")
            apply(
                at(s, m * s_stride),
                start,
                stop,
                low,
                high,
                width,
                scale,
                at(mask, mask_at),
                mask_col,
                at(bias, bias_at),
                bias_col,
                spare,
            )
            i, r = next_row(i, r, group)

    return run
