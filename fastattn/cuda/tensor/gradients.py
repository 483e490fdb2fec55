"""Gradients on tensor cores: of queries by one kernel, of keys and values by another.

Each thread block owns the rows that it writes, so nothing is added by several and a result is the
same in every run; for that, scores are computed twice. With p = exp(s - lse), dp = dout · v and
delta = sum(dout * out):

    ds = p * (dp - delta),  dq = scale * ds · k,  dk = scale * ds^T · q,  dv = p^T · dout

Source: Dao 2023, FlashAttention-2, arXiv:2307.08691, algorithm 2.
"""

from __future__ import annotations

import numpy as np
from numba import cuda

from .. import words
from ..compile import Source
from ..job import GradientJob
from .gradient_steps import gradient_steps
from .gradient_tilings import GradientTiling
from .placement import batch_entry, batch_offset, block_place, key_range, near
from .tilings import ITEM

ROWS = 128  # of a thread block of the delta kernel
ONE = np.uint32(1)


def delta_kernel(storage: str) -> Source:
    """Kernel: delta = sum(dout * out) - dlse of each row, one thread for each. Its grid is
    ceil(batch * heads_q * seqlen_q / ROWS).
    """
    load, load_float, store = words.load(storage), words.load("float32"), words.store("float32")
    threads = ROWS

    def kernel(job):
        number = np.int64(cuda.blockIdx.x) * threads + cuda.threadIdx.x
        if number >= job.batch * job.heads_q * job.seqlen_q:
            return
        i = number % job.seqlen_q
        head = number // job.seqlen_q % job.heads_q
        batch = number // job.seqlen_q // job.heads_q
        seqlen_q, _, _, first_query, _, _ = batch_entry(job, batch)
        if i >= seqlen_q:
            return
        row = first_query + i
        out = batch_offset(job.out_table, job.out_batch, batch)
        out += head * job.out_head + row * job.out_row
        dout = batch_offset(job.dout_table, job.dout_batch, batch)
        dout += head * job.dout_head + row * job.dout_row
        total = np.float32(0)
        for column in range(job.head_dim_v):
            x = load(job.out, out + column * job.out_col)
            total += x * load(job.dout, dout + column * job.dout_col)
        if job.dlse != 0:
            total -= load_float(job.dlse, number)
        store(job.delta, number, total)

    return Source(kernel, threads, job=GradientJob)


def query_kernel(tiling: GradientTiling) -> Source:
    """Kernel: dq, for blocks of block_m queries; its grid is m_blocks * heads_q * batch."""
    steps = gradient_steps(tiling)
    block_m, block_n = tiling.block_m, tiling.block_n
    own, other = steps.own_bytes, steps.other_bytes
    load_own, load_other, signed = steps.load_own, steps.load_other, steps.signed
    shared_base, commit, wait_one, barrier = (
        steps.shared_base,
        steps.commit,
        steps.wait_one,
        steps.barrier,
    )
    wait_all, products, add_product = steps.wait_all, steps.products, steps.add_product
    no_output, window, row_vectors = steps.no_output, steps.window, steps.row_vectors
    by_rows, store = steps.by_rows, steps.store

    def kernel(job):
        m_block, head, key_head, batch, _ = block_place(job.m_blocks, job.heads_q, job.group, 1)
        m_start = m_block * block_m
        seqlen_q, keys, offset, first_query, first_key, _ = batch_entry(job, batch)
        rows = seqlen_q - m_start
        if rows <= 0:
            return
        start, stop, full_start, full_stop, row_low, row_high = key_range(
            job, m_start + offset, min(rows, block_m) - 1, keys, 0, block_n
        )
        base = shared_base()
        acc = no_output()
        row = first_query + m_start
        if start < stop:
            q = batch_offset(job.q_table, job.q_batch, batch) + head * job.q_head
            q = job.q + ITEM * (q + row * job.q_row)
            dout = batch_offset(job.dout_table, job.dout_batch, batch) + head * job.dout_head
            dout = job.dout + ITEM * (dout + row * job.dout_row)
            k = batch_offset(job.k_table, job.k_batch, batch) + key_head * job.k_head
            k = job.k + ITEM * (k + (first_key + start) * job.k_row)
            v = batch_offset(job.v_table, job.v_batch, batch) + key_head * job.v_head
            v = job.v + ITEM * (v + (first_key + start) * job.v_row)
            k_row, k_col = ITEM * job.k_row, ITEM * job.k_col
            v_row, v_col = ITEM * job.v_row, ITEM * job.v_col
            load_own(q, ITEM * job.q_row, job.head_dim, ITEM * job.q_col, base, rows)
            dout_row, dout_col = ITEM * job.dout_row, ITEM * job.dout_col
            load_own(dout, dout_row, job.head_dim_v, dout_col, base + own, rows)
            others = base + 2 * own
            load_other(k, k_row, job.head_dim, k_col, others, keys - start)
            load_other(v, v_row, job.head_dim_v, v_col, others + other, keys - start)
            commit()
            if job.q_sign != 1.0:
                wait_all()
                signed(base, job.q_sign)
            lse = batch_offset(job.lse_table, job.lse_batch, batch) + head * job.lse_head + row
            delta = (batch * job.heads_q + head) * job.seqlen_q + m_start
            reference, taken = row_vectors(job.lse + 4 * lse, job.delta + 4 * delta, rows)
            now, n = np.uint32(0), start
            while n < stop:
                k += block_n * k_row
                v += block_n * v_row
                if n + block_n < stop:
                    to = others + (now ^ ONE) * (2 * other)
                    load_other(k, k_row, job.head_dim, k_col, to, keys - n - block_n)
                    load_other(v, v_row, job.head_dim_v, v_col, to + other, keys - n - block_n)
                commit()
                wait_one()
                here = others + now * (2 * other)
                s, dp = products(base, here), products(base + own, here + other)
                if n < full_start or n >= full_stop:
                    s = window(s, near(row_low - n), near(row_high - n), near(keys - n))
                _, ds = by_rows(s, dp, job.scale_log2, reference, taken)
                acc = add_product(acc, ds, here)
                barrier()  # before the next copies overwrite what was read
                now ^= ONE
                n += block_n
        dq = batch_offset(job.dq_table, job.dq_batch, batch) + head * job.dq_head
        dq = job.dq + 4 * (dq + row * job.dq_row)
        store(acc, job.scale, dq, 4 * job.dq_row, 4 * job.dq_col, job.head_dim, rows)

    return Source(kernel, tiling.threads, job=GradientJob)


def key_kernel(tiling: GradientTiling) -> Source:
    """Kernel: dk and dv, for blocks of block_m keys; its grid is blocks * heads_kv * batch, the
    number of blocks in job.m_blocks.
    """
    steps = gradient_steps(tiling)
    block_m, block_n = tiling.block_m, tiling.block_n
    own, other = steps.own_bytes, steps.other_bytes
    load_own, load_other, signed = steps.load_own, steps.load_other, steps.signed
    shared_base, commit, wait_one, barrier = (
        steps.shared_base,
        steps.commit,
        steps.wait_one,
        steps.barrier,
    )
    wait_all, products, add_product = steps.wait_all, steps.products, steps.add_product
    no_output, window, by_columns = steps.no_output, steps.window, steps.by_columns
    store = steps.store

    def kernel(job):
        block, key_head, _, batch, _ = block_place(job.m_blocks, job.heads_kv, 1, 1)
        first = block * block_m
        seqlen_q, keys, offset, first_query, first_key, _ = batch_entry(job, batch)
        rows = keys - first
        if rows <= 0:
            return
        base = shared_base()
        others = base + 2 * own
        dk, dv = no_output(), no_output()
        k = batch_offset(job.k_table, job.k_batch, batch) + key_head * job.k_head
        k = job.k + ITEM * (k + (first_key + first) * job.k_row)
        v = batch_offset(job.v_table, job.v_batch, batch) + key_head * job.v_head
        v = job.v + ITEM * (v + (first_key + first) * job.v_row)
        load_own(k, ITEM * job.k_row, job.head_dim, ITEM * job.k_col, base, rows)
        load_own(v, ITEM * job.v_row, job.head_dim_v, ITEM * job.v_col, base + own, rows)
        commit()
        if job.q_sign != 1.0:
            wait_all()
            signed(base, job.q_sign)
        # Queries that see key `first` are [low, high); those of the next key one more each.
        low, high = first - offset - job.right, first - offset + job.left + 1
        last = min(rows, block_m) - 1
        start = max(low, 0) & -block_n
        stop = min(high + last, seqlen_q)
        q_row, q_col = ITEM * job.q_row, ITEM * job.q_col
        dout_row, dout_col = ITEM * job.dout_row, ITEM * job.dout_col
        for member in range(job.group):
            head = key_head * job.group + member
            q = batch_offset(job.q_table, job.q_batch, batch) + head * job.q_head
            q = job.q + ITEM * (q + first_query * job.q_row)
            dout = batch_offset(job.dout_table, job.dout_batch, batch) + head * job.dout_head
            dout = job.dout + ITEM * (dout + first_query * job.dout_row)
            lse = batch_offset(job.lse_table, job.lse_batch, batch) + head * job.lse_head
            lse = job.lse + 4 * (lse + first_query)
            delta = job.delta + 4 * (batch * job.heads_q + head) * job.seqlen_q
            now, n = np.uint32(0), start
            if n < stop:
                at, left = q + n * q_row, seqlen_q - n
                load_other(at, q_row, job.head_dim, q_col, others, left)
                at = dout + n * dout_row
                load_other(at, dout_row, job.head_dim_v, dout_col, others + other, left)
            commit()
            while n < stop:
                if n + block_n < stop:
                    to, left = others + (now ^ ONE) * (2 * other), seqlen_q - n - block_n
                    at = q + (n + block_n) * q_row
                    load_other(at, q_row, job.head_dim, q_col, to, left)
                    at = dout + (n + block_n) * dout_row
                    load_other(at, dout_row, job.head_dim_v, dout_col, to + other, left)
                commit()
                wait_one()
                here = others + now * (2 * other)
                s, dp = products(base, here), products(base + own, here + other)
                if n < low + last or n + block_n > min(high, seqlen_q):
                    s = window(s, near(low - n), near(high - n), near(seqlen_q - n))
                p, ds = by_columns(s, dp, job.scale_log2, lse + 4 * n, delta + 4 * n, seqlen_q - n)
                dv = add_product(dv, p, here + other)
                dk = add_product(dk, ds, here)
                barrier()  # before the next copies overwrite what was read
                now ^= ONE
                n += block_n
        at = batch_offset(job.dk_table, job.dk_batch, batch) + key_head * job.dk_head
        at = job.dk + 4 * (at + (first_key + first) * job.dk_row)
        store(dk, job.scale, at, 4 * job.dk_row, 4 * job.dk_col, job.head_dim, rows)
        at = batch_offset(job.dv_table, job.dv_batch, batch) + key_head * job.dv_head
        at = job.dv + 4 * (at + (first_key + first) * job.dv_row)
        store(dv, 1.0, at, 4 * job.dv_row, 4 * job.dv_col, job.head_dim_v, rows)

    return Source(kernel, tiling.threads, job=GradientJob)
