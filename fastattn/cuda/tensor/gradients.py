"""Gradients on tensor cores: of queries by one kernel, of keys and values by another.

Each thread block owns the rows that it writes, so nothing is added by several and a result is the
same in every run; for that, scores are computed twice. With reference and delta of
gradient_rows.py, and dp = dout · v:

    p = exp(s - reference),  ds = p * (dp - delta)
    dq = scale * ds · k,  dk = scale * ds^T · q,  dv = p^T · dout

What a row does not see adds nothing, whatever it holds: where some row does not see all of a block,
p and ds are 0 by choice, and numbers of the block that are not finite become 0 in shared memory
before they meet them. Rows that see such a key are NaN by their reference.

Source: Dao 2023, FlashAttention-2, arXiv:2307.08691, algorithm 2.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np

from ..compile import TENSOR_CORES, Source
from ..job import GradientJob
from ..words import device
from .gradient_steps import gradient_steps
from .gradient_tilings import GradientTiling
from .operation import i64, types, void
from .placement import batch_entry, batch_offset, block_place, key_range, minus, near
from .tilings import ITEM

ONE = np.uint32(1)
ROW_BYTES = 4  # of the numbers of gradient_rows.py


@device(types.UniTuple(i64, 2))
def queries_at(job, batch, head, row):
    """Addresses of a row of q and of dout."""
    q = batch_offset(job.q_table, job.q_batch, batch) + head * job.q_head
    dout = batch_offset(job.dout_table, job.dout_batch, batch) + head * job.dout_head
    return job.q + ITEM * (q + row * job.q_row), job.dout + ITEM * (dout + row * job.dout_row)


@device(types.UniTuple(i64, 2))
def keys_at(job, batch, head, row):
    """Addresses of a row of k and of v."""
    k = batch_offset(job.k_table, job.k_batch, batch) + head * job.k_head
    v = batch_offset(job.v_table, job.v_batch, batch) + head * job.v_head
    return job.k + ITEM * (k + row * job.k_row), job.v + ITEM * (v + row * job.v_row)


@device(types.UniTuple(i64, 2))
def numbers_at(job, batch, head, row):
    """Addresses of a row's reference and delta."""
    place = ROW_BYTES * ((batch * job.heads_q + head) * job.seqlen_q + row)
    return job.reference + place, job.delta + place


def frame(tiling: GradientTiling) -> SimpleNamespace:
    """What both kernels begin and go on with: device functions, by name.

    own_*, other_*  start to copy rows of two operands, which the thread block keeps or which stream
                    through, from their addresses to shared memory
    begin           after the first copies: takes the sign of scale into the rows that are kept
    place           where the rows that stream through are, in one of two buffers
    """
    steps = gradient_steps(tiling)
    own, other = steps.own_bytes, steps.other_bytes
    commit, wait_all, signed = steps.commit, steps.wait_all, steps.signed

    def queries(load, nbytes):
        @device(void)
        def load_queries(job, at, to, rows):
            load(at[0], ITEM * job.q_row, job.head_dim, ITEM * job.q_col, to, rows)
            row, column = ITEM * job.dout_row, ITEM * job.dout_col
            load(at[1], row, job.head_dim_v, column, to + nbytes, rows)

        return load_queries

    def keys(load, nbytes):
        @device(void)
        def load_keys(job, at, to, rows):
            load(at[0], ITEM * job.k_row, job.head_dim, ITEM * job.k_col, to, rows)
            load(at[1], ITEM * job.v_row, job.head_dim_v, ITEM * job.v_col, to + nbytes, rows)

        return load_keys

    @device(void)
    def begin(job, base):
        commit()
        if job.q_sign != 1.0:
            wait_all()
            signed(base, job.q_sign)

    @device(types.uint32)
    def place(base, buffer):
        return np.uint32(base + 2 * own + buffer * (2 * other))

    return SimpleNamespace(
        own_queries=queries(steps.load_own, own),
        own_keys=keys(steps.load_own, own),
        other_queries=queries(steps.load_other, other),
        other_keys=keys(steps.load_other, other),
        begin=begin,
        place=place,
        **vars(steps),
    )


def query_kernel(tiling: GradientTiling) -> Source:
    """Kernel: dq, for blocks of block_m queries; its grid is m_blocks * heads_q * batch."""
    f, own = frame(tiling), gradient_steps(tiling).own_bytes
    block_m, block_n, other = tiling.block_m, tiling.block_n, f.other_bytes
    load_own, load_other, begin, place = f.own_queries, f.other_keys, f.begin, f.place
    shared_base, commit, wait_one, barrier = f.shared_base, f.commit, f.wait_one, f.barrier
    products, add_product, no_output, store = f.products, f.add_product, f.no_output, f.store
    next_n = np.int32(-block_n)
    row_vectors, by_rows, by_rows_in = f.row_vectors, f.by_rows, f.by_rows_in
    copy_to, look, clear, any_thread = f.copy_to, f.look, f.clear, f.any_thread

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
        # Counts of keys in 32 bits: half the registers through the loop.
        start, stop = near(start), near(stop)
        full_start, full_stop = near(full_start), near(full_stop)
        row_low, row_high, last_key = near(row_low), near(row_high), near(keys)
        base, acc, row = shared_base(), no_output(), first_query + m_start
        if start < stop:
            load_own(job, queries_at(job, batch, head, row), base, rows)
            at = keys_at(job, batch, key_head, first_key + start)
            load_other(job, at, place(base, 0), minus(last_key, start))
            begin(job, base)
            reference, delta = numbers_at(job, batch, head, m_start)
            exponents, delta = row_vectors(reference, delta, rows)
            now, n = np.uint32(0), start
            while n < stop:
                more = minus(n, next_n)
                if more < stop:
                    at = keys_at(job, batch, key_head, first_key + more)
                    load_other(job, at, place(base, now ^ ONE), minus(last_key, more))
                commit()
                wait_one()
                here = place(base, now)
                s, dp = products(base, here), products(base + own, here + other)
                if n < full_start or n >= full_stop:
                    window = minus(row_low, n), minus(row_high, n), minus(last_key, n)
                    _, ds = by_rows_in(s, dp, job.scale_log2, exponents, delta, *window)
                    k = copy_to(here)
                    if any_thread(look(k)):
                        clear(k)
                        barrier()
                else:
                    _, ds = by_rows(s, dp, job.scale_log2, exponents, delta)
                acc = add_product(acc, ds, here)
                barrier()  # before the next copies overwrite what was read
                now ^= ONE
                n = more
        dq = batch_offset(job.dq_table, job.dq_batch, batch) + head * job.dq_head
        dq = job.dq + ITEM * (dq + row * job.dq_row)
        store(acc, job.scale, dq, ITEM * job.dq_row, job.head_dim, rows)

    return Source(kernel, tiling.threads, target=TENSOR_CORES, job=GradientJob)


def key_kernel(tiling: GradientTiling) -> Source:
    """Kernel: dk and dv, for blocks of block_m keys; its grid is m_blocks * heads_kv * batch, where
    m_blocks are blocks of keys.
    """
    f, own = frame(tiling), gradient_steps(tiling).own_bytes
    block_m, block_n, other = tiling.block_m, tiling.block_n, f.other_bytes
    load_own, load_other, begin, place = f.own_keys, f.other_queries, f.begin, f.place
    shared_base, commit, wait_one, barrier = f.shared_base, f.commit, f.wait_one, f.barrier
    products, add_product, no_output, store = f.products, f.add_product, f.no_output, f.store
    next_n = np.int32(-block_n)
    by_columns, by_columns_in = f.by_columns, f.by_columns_in
    copy_to, look, clear, any_thread = f.copy_to, f.look, f.clear, f.any_thread

    def kernel(job):
        block, key_head, _, batch, _ = block_place(job.m_blocks, job.heads_kv, 1, 1)
        first = block * block_m
        seqlen_q, keys, offset, first_query, first_key, _ = batch_entry(job, batch)
        rows = keys - first
        if rows <= 0:
            return
        base, dk, dv = shared_base(), no_output(), no_output()
        row = first_key + first
        load_own(job, keys_at(job, batch, key_head, row), base, rows)
        begin(job, base)
        # Queries that see key `first` are [low, high); those of the next key one more each.
        low, high = first - offset - job.right, first - offset + job.left + 1
        last = min(rows, block_m) - 1
        # In 32 bits: half the registers through the loop.
        start, stop = near(max(low, 0) & -block_n), near(min(high + last, seqlen_q))
        full_start, full_stop = near(low + last), near(min(high, seqlen_q) - block_n + 1)
        low, high, queries = near(low), near(high), near(seqlen_q)
        for member in range(job.group):
            head = key_head * job.group + member
            now, n = np.uint32(0), start
            if n < stop:
                at = queries_at(job, batch, head, first_query + n)
                load_other(job, at, place(base, 0), minus(queries, n))
            commit()
            while n < stop:
                more = minus(n, next_n)
                if more < stop:
                    at = queries_at(job, batch, head, first_query + more)
                    load_other(job, at, place(base, now ^ ONE), minus(queries, more))
                commit()
                wait_one()
                here = place(base, now)
                s, dp = products(base, here), products(base + own, here + other)
                reference, delta = numbers_at(job, batch, head, n)
                rows_at = reference, delta, minus(queries, n)
                if n < full_start or n >= full_stop:
                    window = minus(low, n), minus(high, n), minus(queries, n)
                    p, ds = by_columns_in(s, dp, job.scale_log2, *rows_at, *window)
                    q, dout = copy_to(here), copy_to(here + other)
                    if any_thread(look(q) or look(dout)):
                        clear(q)
                        clear(dout)
                        barrier()
                else:
                    p, ds = by_columns(s, dp, job.scale_log2, *rows_at)
                dv = add_product(dv, p, here + other)
                dk = add_product(dk, ds, here)
                barrier()  # before the next copies overwrite what was read
                now ^= ONE
                n = more
        at = batch_offset(job.dk_table, job.dk_batch, batch) + key_head * job.dk_head
        at = job.dk + ITEM * (at + row * job.dk_row)
        store(dk, job.scale, at, ITEM * job.dk_row, job.head_dim, rows)
        at = batch_offset(job.dv_table, job.dv_batch, batch) + key_head * job.dv_head
        at = job.dv + ITEM * (at + row * job.dv_row)
        store(dv, 1.0, at, ITEM * job.dv_row, job.head_dim_v, rows)

    return Source(kernel, tiling.threads, target=TENSOR_CORES, job=GradientJob)
