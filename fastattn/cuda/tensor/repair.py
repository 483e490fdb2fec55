"""What a row sees of the values that lost_steps.py has made 0: a thread for each output, slowly."""

from __future__ import annotations

import math
from collections.abc import Callable

from numba import cuda

from ..words import device, load, store
from .operation import void
from .placement import batch_entry, batch_offset, key_range, value_on_page
from .tilings import Tiling


def repairer(tiling: Tiling, kind: str, hides: Callable, sees: Callable) -> Callable:
    """Device function (job, m_block, head, key_head, batch, split, out, out_row, out_col): add to
    the block's rows, of which `out` is the first and `kind` the type, what is not finite.

    hides, sees  options.option_functions()
    """
    block_m, block_n, threads = tiling.block_m, tiling.block_n, 32 * tiling.warps
    value_at, out_at, put = load(tiling.storage), load(kind), store(kind)
    infinity, row_step, packed = math.inf, int(not tiling.packed), tiling.packed
    paged = tiling.paged

    @device(void)
    def repair(job, m_block, head, key_head, batch, split, out, out_row, out_col):
        m_start = m_block * block_m
        seqlen_q, keys, offset, _, first_key, hidden = batch_entry(job, batch)
        rows = min((job.group if packed else seqlen_q) - m_start, block_m)
        start, stop, full_start, full_stop, row_low, row_high = key_range(
            job, m_start * row_step + offset, (rows - 1) * row_step, keys, split, block_n
        )
        values = key_head * job.v_head
        if not paged:
            values += batch_offset(job.v_table, job.v_batch, batch) + first_key * job.v_row
        hidden_anywhere = hides(job)
        for row in range(rows):
            low, high = max(row_low, start), min(row_high, min(keys, stop))
            row_low, row_high = row_low + row_step, row_high + row_step
            column = cuda.threadIdx.x
            while column < job.head_dim_v:
                lost, key = 0.0, low
                while key < high:
                    n = key & -block_n
                    at = value_on_page(job, batch, first_key + key) if paged else key * job.v_row
                    value = value_at(job.v, values + at + column * job.v_col)
                    finite = abs(value) < infinity
                    made_0 = not finite and (hidden_anywhere or n < full_start or n >= full_stop)
                    if made_0 and sees(job, batch, head, m_start + row, key, offset, hidden):
                        lost += value
                    key += 1
                if lost != 0.0:
                    place = row * out_row + column * out_col
                    put(out, place, out_at(out, place) + lost)
                column += threads

    return repair
