"""Forward kernel on tensor cores for sm_80 and later: FlashAttention-2's order of work.

A thread block has block_m query rows of one head; each of its warps has warp_m of them, all keys,
and its part of the output in registers. Keys and values come through two buffers each, filled by
asynchronous copies that run while the other one is used. Scores never leave the registers: what
q · k leaves in a thread is what p · v reads there.

Source: Dao 2023, FlashAttention-2, arXiv:2307.08691, algorithm 1.
"""

from __future__ import annotations

import numpy as np

from ..compile import TENSOR_CORES, Source
from .ending import row_writer
from .forward_steps import forward_steps
from .options import option_functions
from .placement import batch_entry, batch_offset, key_range, minus, near, row_functions
from .repair import repairer
from .shapes import Shapes
from .tilings import Tiling

ONE = np.uint32(1)


def forward_kernel(tiling: Tiling) -> Source:
    """Return the kernel; its grid is m_blocks * heads_q * batch * num_splits."""
    steps, shapes = forward_steps(tiling), Shapes.of(tiling)
    block_m, block_n, item = tiling.block_m, np.int32(tiling.block_n), tiling.item
    rounds = tiling.storage == "float32"  # factors, to tf32
    k_start = shapes.q.nbytes
    v_start = k_start + tiling.stages * shapes.k.nbytes
    shared_base, commit, wait_for_all_but_one = steps.shared_base, steps.commit, steps.wait_one
    q_offset, k_offset, v_offset = steps.q_offset, steps.k_offset, steps.v_offset
    q_copy_to, k_copy_to, v_copy_to = steps.q_copy_to, steps.k_copy_to, steps.v_copy_to
    load_q, load_k, load_v = steps.load_q, steps.load_k, steps.load_v
    load_k_edge, load_v_edge, sign_q = steps.load_k_edge, steps.load_v_edge, steps.sign_q
    load_k_pages, load_v_pages, paged = steps.load_k_pages, steps.load_v_pages, tiling.paged
    q_lane, k_lane, v_lane = steps.q_lane, steps.k_lane, steps.v_lane
    k_buffer, v_buffer = steps.k_buffer, steps.v_buffer
    no_output, no_maximum, no_sum = steps.no_output, steps.no_maximum, steps.no_sum
    products, window, weigh, pack = steps.products, steps.window, steps.weigh, steps.pack
    rescale, add_values = steps.rescale, steps.add_values
    look, clear, any_thread = steps.look, steps.clear, steps.any_thread
    rows_are = row_functions(tiling.packed)
    place_of, rows_of, row_of = rows_are.place_of, rows_are.rows_of, rows_are.row_of
    row_step = int(not tiling.packed)  # keys from what a row sees to what the next one does
    general, options = tiling.general, option_functions(tiling)
    change, hides, drop, reached = options.change, options.hides, options.drop, options.reached
    blocks, times = tiling.mask_mod is not None, steps.times
    repair = repairer(tiling, tiling.storage, hides, options.sees)
    repair_partial = repairer(tiling, "float32", hides, options.sees)
    barrier = steps.barrier
    write = row_writer(tiling, steps, barrier, repair)
    store_partial, store_state = steps.store_partial, steps.store_state

    def kernel(job):
        m_block, head, key_head, batch, split = place_of(job)
        m_start = m_block * block_m
        seqlen_q, keys, offset, first_query, first_key, hidden = batch_entry(job, batch)
        rows = rows_of(job, seqlen_q) - m_start
        if rows <= 0:
            return
        more = (min(rows, block_m) - 1) * row_step
        start, stop, full_start, full_stop, row_low, row_high = key_range(
            job, m_start * row_step + offset, more, keys, split, block_n
        )
        # Counts of keys in 32 bits: half the registers through the loop.
        start, n, last_key = near(start), near(stop - block_n), near(keys)
        full_start, full_stop = near(full_start), near(full_stop)
        row_low, row_high = near(row_low), near(row_high)

        base = shared_base()
        scale = 1.0 if general else job.scale_log2  # of what softmax() gets, in base 2
        acc, row_max, row_sum = no_output(), no_maximum(), no_sum()
        lost = False  # whether a value that some row does not see was not finite
        n = reached(job, batch, head, m_start, rows, n, start, keys, hidden)
        if n >= start:
            q_row = item * row_of(job.q_row, job.q_head)
            k_row, v_row = item * job.k_row, item * job.v_row
            q_col, k_col, v_col = item * job.q_col, item * job.k_col, item * job.v_col
            q = batch_offset(job.q_table, job.q_batch, batch) + head * job.q_head
            q = job.q + item * (q + first_query * job.q_row) + m_start * q_row
            k, v = job.k + item * key_head * job.k_head, job.v + item * key_head * job.v_head
            if paged:
                k, v = k + k_offset(0, k_col), v + v_offset(0, v_col)
            else:
                k += item * batch_offset(job.k_table, job.k_batch, batch)
                v += item * batch_offset(job.v_table, job.v_batch, batch)
                k += (first_key + n) * k_row + k_offset(k_row, k_col)
                v += (first_key + n) * v_row + v_offset(v_row, v_col)
            table = job.block_table + 8 * batch * job.max_pages
            page_size, k_page, v_page = job.page_size, item * job.k_batch, item * job.v_batch
            q_to, k_to, v_to = q_copy_to(base), k_copy_to(base + k_start), v_copy_to(base + v_start)
            load_q(q + q_offset(q_row, q_col), q_row, job.head_dim, q_col, q_to, rows)
            # Only the last block may have fewer keys than block_n; the others need no test.
            left, row = keys - n, first_key + n
            if paged:
                load_k_pages(k, k_row, job.head_dim, k_to, left, table, row, page_size, k_page)
            else:
                load_k_edge(k, k_row, job.head_dim, k_col, k_to, left)
            commit()
            if paged:
                load_v_pages(v, v_row, job.head_dim_v, v_to, left, table, row, page_size, v_page)
            else:
                load_v_edge(v, v_row, job.head_dim_v, v_col, v_to, left)
            commit()
            if rounds or job.q_sign != 1.0:
                sign_q(q_to, job.q_sign)
            q_at, k_at, v_at = q_lane(base), k_lane(base + k_start), v_lane(base + v_start)
            now = np.uint32(0)  # which of the two buffers this step reads
            while n >= start:
                wait_for_all_but_one()  # for k
                ahead = minus(n, block_n)
                ahead = reached(job, batch, head, m_start, rows, ahead, start, keys, hidden)
                back = n - ahead if blocks else block_n
                left, row, to = keys - ahead, first_key + ahead, k_buffer(k_to, now ^ ONE)
                if paged and ahead >= start:
                    load_k_pages(k, k_row, job.head_dim, to, left, table, row, page_size, k_page)
                elif ahead >= start:
                    k -= back * k_row
                    load_k(k, k_row, job.head_dim, k_col, to)
                commit()
                s = products(q_at, k_buffer(k_at, now))
                masked = n < full_start or n >= full_stop
                if general:
                    s = change(s, job, batch, head, m_start, offset, rows, n, keys, hidden)
                    masked = masked or hides(job)
                if masked:
                    s = window(s, minus(row_low, n), minus(row_high, n), minus(last_key, n))
                weights, row_max, row_sum, alpha, grown = weigh(s, row_max, row_sum, scale)
                p = pack(drop(weights, job, batch, head, m_start, n))
                if grown:
                    acc = rescale(acc, alpha)
                if masked:
                    found = look(v_buffer(v_to, now))
                    if found:
                        clear(v_buffer(v_to, now))
                    lost = any_thread(found) or lost  # for v
                else:
                    wait_for_all_but_one()  # for v
                to = v_buffer(v_to, now ^ ONE)
                if paged and ahead >= start:
                    load_v_pages(v, v_row, job.head_dim_v, to, left, table, row, page_size, v_page)
                elif ahead >= start:
                    v -= back * v_row
                    load_v(v, v_row, job.head_dim_v, v_col, to)
                commit()
                acc = add_values(acc, p, v_buffer(v_at, now))
                now ^= ONE
                n = ahead

        m_block, head, key_head, batch, split = place_of(job)
        m_start = m_block * block_m
        seqlen_q, keys, offset, first_query, first_key, hidden = batch_entry(job, batch)
        rows = rows_of(job, seqlen_q) - m_start
        if job.num_splits > 1:
            row = (batch * job.heads_q + head) * job.seqlen_q + m_start
            place = row * job.num_splits + split
            partial = job.partial + 4 * place * job.head_dim_v
            row_bytes = 4 * job.num_splits * job.head_dim_v
            state = job.partial_state + 8 * place
            store_partial(acc, partial, row_bytes, job.head_dim_v, rows)
            store_state(row_max, row_sum, scale, state, 8 * job.num_splits, rows)
            if lost:
                barrier()
                step = job.num_splits * job.head_dim_v
                repair_partial(job, m_block, head, key_head, batch, split, partial, step, 1)
            return
        if general and job.dropout_keys != 0:
            acc = times(acc, job.dropout_factor)
        write(job, base, acc, row_max, row_sum, scale, lost)

    return Source(kernel, tiling.threads, tiling.min_blocks, TENSOR_CORES)
