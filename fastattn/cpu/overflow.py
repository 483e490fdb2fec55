"""Products that overflow to -inf: the one score of -inf that does not hide its key."""

from __future__ import annotations

import functools

import numpy as np

from ..machine import VectorUnit
from ..problem import Variant
from .fields import field
from .job import SPARE_REGISTERS
from .masking import mask_block, scores_block
from .memory import at
from .microkernel import tile_shape
from .registers import ITEMSIZE, jit


@functools.cache
def mark_overflow(variant: Variant, unit: VectorUnit):
    """Kernel: NaN in acc for a visible key whose product is -inf and whose value is not finite.

    The key weighs 0, and 0 times infinity or NaN is NaN. careful_product() would leave it out, as
    it does all scores of -inf: masks and biases hide keys by them. Wanted only where it is used,
    and before masks and biases are applied. A score_mod's -inf hides, whatever it made it from.

    s        products of `count` rows, [start, padded)
    values   packed, panel_n rows a panel, from key `first` on
    spare    SPARE_REGISTERS registers of scratch, then one row of scores
    """
    dtype, lanes = variant.dtype, unit.lanes(ITEMSIZE[variant.dtype])
    change, hide = scores_block(variant, lanes), mask_block(variant, lanes)
    nr = tile_shape(unit)[1] * lanes
    scalar = getattr(np, dtype)
    neg_inf, nan = scalar(-np.inf), scalar(np.nan)
    none = variant.score_mod is not None

    @jit
    def spread(values, panel_n, key, acc, acc_stride):
        """acc[d] = NaN where the key's value is not finite."""
        for d in range(acc_stride):
            panel = d // nr * nr
            width = min(nr, acc_stride - panel)
            value = values[panel * panel_n + key * width + d - panel]
            if value - value != scalar(0):
                acc[d] = nan

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
        padded,
        values,
        panel_n,
        first,
        acc,
        spare,
        modify,
    ):
        s_stride, acc_stride = field(job, "s_stride"), field(job, "acc_stride")
        scores = at(spare, SPARE_REGISTERS * lanes)
        one = np.int64(1)  # for a literal, Numba would compile what is called once more
        for m in range(0 if none else count):
            products = at(s, m * s_stride)
            found = False
            for n in range(start, padded):
                lost = products[n] == neg_inf
                found = found or lost
                scores[n] = scalar(0) if lost else products[n]
            if not found:
                continue
            if field(job, "changes_scores") != 0:
                change(job, item, row + m, one, n_start, start, padded, scores, spare)
            hide(
                job,
                item,
                row + m,
                one,
                n_start,
                start,
                padded,
                padded,
                padded,
                scores,
                spare,
                modify,
            )
            for n in range(start, stop):
                if products[n] == neg_inf and scores[n] != neg_inf:
                    spread(values, panel_n, n - first, at(acc, m * acc_stride), acc_stride)

    return run
