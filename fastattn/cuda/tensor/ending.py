"""The end of a forward kernel: rows of out and lse, with what hidden values have left out."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

from ..words import device
from .operation import void
from .placement import batch_entry, batch_offset, row_functions
from .tilings import Tiling


def row_writer(tiling: Tiling, steps: SimpleNamespace, barrier: Callable, repair: Callable):
    """Device function (job, base, acc, row_max, row_sum, scale, lost): write the block's rows.

    steps    end_steps(), by name
    barrier  of the threads that call this
    repair   repairer()
    """
    finish, store_rows, store_lse = steps.finish, steps.store_rows, steps.store_lse
    rows_are, block_m = row_functions(tiling.packed), tiling.block_m
    place_of, rows_of, row_of = rows_are.place_of, rows_are.rows_of, rows_are.row_of
    row_step, item = int(not tiling.packed), tiling.item

    @device(void)
    def write(job, base, acc, row_max, row_sum, scale, lost):
        m_block, head, key_head, batch, split = place_of(job)
        m_start = m_block * block_m
        seqlen_q, _, _, first_query, _, _ = batch_entry(job, batch)
        rows = rows_of(job, seqlen_q) - m_start
        sinks = job.sinks + 4 * (head + m_start * (1 - row_step)) if job.sinks != 0 else 0
        factor, lse = finish(row_max, row_sum, scale, sinks, rows)
        out = batch_offset(job.out_table, job.out_batch, batch) + head * job.out_head
        out_row = row_of(job.out_row, job.out_head)
        out = job.out + item * (out + first_query * job.out_row + m_start * out_row)
        out_col = item * job.out_col
        store_rows(acc, factor, base, out, item * out_row, job.head_dim_v, out_col, rows)
        if job.lse != 0:
            place = batch_offset(job.lse_table, job.lse_batch, batch) + head * job.lse_head
            lse_row = row_of(job.lse_row, job.lse_head)
            place += first_query * job.lse_row + m_start * lse_row
            store_lse(lse, job.lse + 4 * place, 4 * lse_row, rows)
        if lost:
            barrier()
            repair(job, m_block, head, key_head, batch, split, out, out_row, job.out_col)

    return write
