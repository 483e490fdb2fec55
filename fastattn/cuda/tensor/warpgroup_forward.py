"""Forward kernel for compute capability 9.0 alone: FlashAttention-3's order of work.

Of a thread block, one warpgroup copies tiles of keys and values, one thread for all, and two or
three multiply, 64 query rows each. Products run while their warps do other things: q · k of the
next keys and p · v of these are started together, and the softmax of the next runs beside p · v.
The copiers give most of their registers to the others.

Source: Shah et al. 2024, FlashAttention-3, arXiv:2407.08608, algorithms 1 and 2.
"""

from __future__ import annotations

import numpy as np

from ..compile import WARPGROUPS, Source
from ..job import MappedJob
from .ending import row_writer
from .options import option_functions
from .placement import batch_entry, key_range, minus, near, row_functions
from .repair import repairer
from .tilings import Tiling
from .warpgroup_steps import STAGES, Barriers, tiles_of, warpgroup_steps

ZERO = np.uint32(0)


def warpgroup_kernel(tiling: Tiling) -> Source:
    """Return the kernel; its grid is m_blocks * heads_q * batch."""
    steps, (_, k_tile, v_tile) = warpgroup_steps(tiling), tiles_of(tiling)
    block_m, block_n = tiling.block_m, np.int32(tiling.block_n)
    k_start = tiling.block_m * 2 * tiling.q_columns
    v_start = k_start + STAGES * k_tile.nbytes
    first_barrier = v_start + STAGES * v_tile.nbytes
    k_full, k_empty = first_barrier + Barriers.k_full, first_barrier + Barriers.k_empty
    v_full, v_empty = first_barrier + Barriers.v_full, first_barrier + Barriers.v_empty
    shared_base, start_barriers = steps.shared_base, steps.start_barriers
    copies, copies_alone = steps.copies, steps.copies_alone
    give_registers, take_registers = steps.give_registers, steps.take_registers
    copy_q, copy_k, copy_v = steps.copy_q, steps.copy_k, steps.copy_v
    wait_full, wait_empty = steps.wait_full, steps.wait_empty
    release, next_turn, index_along = steps.release, steps.next_turn, steps.index_along
    q_operand, start_products = steps.q_operand, steps.start_products
    all_products, older_products = steps.all_products, steps.older_products
    add_values, all_values = steps.add_values, steps.all_values
    weigh_first = steps.weigh_first
    no_output, no_maximum, no_sum = steps.no_output, steps.no_maximum, steps.no_sum
    window, weigh, pack, rescale = steps.window, steps.weigh, steps.pack, steps.rescale
    look, clear = steps.look, steps.clear
    any_multiplier, multipliers_meet = steps.any_multiplier, steps.multipliers_meet
    rows_are, options = row_functions(False), option_functions(tiling)
    place_of, rows_of = rows_are.place_of, rows_are.rows_of
    repair = repairer(tiling, tiling.storage, options.hides, options.sees)
    write = row_writer(tiling, steps, multipliers_meet, repair)

    def kernel(job):
        m_block, head, key_head, batch, split = place_of(job)
        m_start = m_block * block_m
        seqlen_q, keys, offset, first_query, first_key, _ = batch_entry(job, batch)
        rows = rows_of(job, seqlen_q) - m_start
        if rows <= 0:
            return
        more = min(rows, block_m) - 1
        start, stop, full_start, full_stop, row_low, row_high = key_range(
            job, m_start + offset, more, keys, split, block_n
        )
        start, n, last_key = near(start), near(stop - block_n), near(keys)
        full_start, full_stop = near(full_start), near(full_stop)
        row_low, row_high = near(row_low), near(row_high)

        base = shared_base()
        start_barriers(base + first_barrier)
        if copies():
            give_registers()
            if copies_alone() and n >= start:
                q_head = index_along(job.q_head, head)
                q_batch = index_along(job.q_batch, batch)
                k_head = index_along(job.k_head, key_head)
                k_batch = index_along(job.k_batch, batch)
                v_head = index_along(job.v_head, key_head)
                v_batch = index_along(job.v_batch, batch)
                q_row = first_query + m_start
                copy_q(base, base + first_barrier, ZERO, job.q_map, q_row, q_head, q_batch)
                turn = ZERO
                while n >= start:
                    row = first_key + n
                    wait_empty(base + k_empty, turn)
                    copy_k(base + k_start, base + k_full, turn, job.k_map, row, k_head, k_batch)
                    wait_empty(base + v_empty, turn)
                    copy_v(base + v_start, base + v_full, turn, job.v_map, row, v_head, v_batch)
                    turn = next_turn(turn)
                    n = minus(n, block_n)
            return

        take_registers()
        acc, row_max, row_sum = no_output(), no_maximum(), no_sum()
        lost = False  # whether a value that some row does not see was not finite
        if n >= start:
            q = q_operand(base)
            k, v = base + k_start, base + v_start
            k_full_at, k_empty_at = base + k_full, base + k_empty
            v_full_at, v_empty_at = base + v_full, base + v_empty
            wait_full(base + first_barrier, ZERO)
            wait_full(k_full_at, ZERO)
            s = all_products(start_products(q, k, ZERO))
            release(k_empty_at, ZERO)
            masked = n < full_start or n >= full_stop
            if masked:
                s = window(s, minus(row_low, n), minus(row_high, n), minus(last_key, n))
            weights, row_max, row_sum, alpha, grown = weigh(s, row_max, row_sum, job.scale_log2)
            p = pack(weights)
            turn = ZERO  # of the values; the next keys are one ahead
            n = minus(n, block_n)
            while n >= start:
                if masked:
                    wait_full(v_full_at, turn)
                    found = look(v, turn)
                    if any_multiplier(found):
                        clear(v, turn)
                        multipliers_meet()
                        lost = True
                masked = n < full_start or n >= full_stop
                ahead = next_turn(turn)
                wait_full(k_full_at, ahead)
                s = start_products(q, k, ahead)
                wait_full(v_full_at, turn)
                acc = add_values(acc, p, v, turn)
                s = older_products(s)
                release(k_empty_at, ahead)
                if masked:
                    s = window(s, minus(row_low, n), minus(row_high, n), minus(last_key, n))
                weights, row_max, row_sum, alpha, grown = weigh(s, row_max, row_sum, job.scale_log2)
                weigh_first()
                acc = all_values(acc)
                release(v_empty_at, turn)
                if grown:
                    acc = rescale(acc, alpha)
                p = pack(weights)
                turn = ahead
                n = minus(n, block_n)
            wait_full(v_full_at, turn)
            if masked:
                found = look(v, turn)
                if any_multiplier(found):
                    clear(v, turn)
                    multipliers_meet()
                    lost = True
            acc = all_values(add_values(acc, p, v, turn))
        multipliers_meet()  # before rows of out are put together where q is
        write(job, base, acc, row_max, row_sum, job.scale_log2, lost)

    return Source(kernel, tiling.threads, 1, WARPGROUPS, MappedJob)
