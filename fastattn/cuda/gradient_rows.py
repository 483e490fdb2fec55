"""What the kernels of gradients need to know of each row, for all of them: a warp for each row.

delta      sum(dout * out) - dlse; 0 where a row sees nothing
reference  what is taken from its scores, p = exp(s - reference): lse; infinity where it sees
           nothing; NaN where q, dout or lse is none, so that what it sees becomes NaN
weight     1. Of a row whose lse has lost its sum in its rounding (large_rows.py), reference is its
           largest score, and this 1 / sum, by which p is multiplied
sink_rows  -delta times the probability of the sink, if its gradient is wanted
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import cuda, types

from ..large_rows import LARGEST
from ..problem import Variant
from .compile import Source
from .entry import entry_of
from .job import GradientJob
from .place import key_range_of
from .scores import changed_score, offset_of_entry, visible_key
from .tile import LAST_THREAD, ROW_THREADS, WARP


def rows_source(variant: Variant, weighs: bool) -> Source:
    """The kernel as it is translated for a GPU; its grid has a warp for each row."""
    from . import words

    return Source(rows_kernel(variant, weighs, WARP, words), ROW_THREADS, job=GradientJob)


def rows_kernel(variant: Variant, weighs: bool, lanes: int, words: Any) -> Callable:
    """Kernel (job): the numbers of all rows, each by `lanes` threads of one warp, a power of two.

    weighs  whether large rows are looked at: not where scores are products alone, which are then as
            large as lse, and have been rounded as coarsely
    """
    real = np.dtype(variant.dtype).type
    none, huge, no_number = real(-np.inf), real(np.inf), real(np.nan)
    load, keep = words.load(variant.dtype), words.store(variant.dtype)
    exp, entry_at, place_of = words.functions(variant.dtype).exp, entry_of(words), row_place(words)
    products, sum_of = (
        row_products(variant, lanes, words),
        sum_of_lanes(variant.dtype, lanes, words),
    )
    measured = measured_row(variant, lanes, words)

    def kernel(job):
        thread = np.int64(cuda.threadIdx.x & LAST_THREAD)
        number = (np.int64(cuda.blockIdx.x) * cuda.blockDim.x + thread) // lanes
        if number >= job.batch * job.heads_q * job.seqlen_q:
            return
        i, head = number % job.seqlen_q, number // job.seqlen_q % job.heads_q
        entry = entry_at(job, number // job.seqlen_q // job.heads_q, head // job.group)
        # A row past q_len has an lse, the sink; one past a packed member's is another's.
        if i >= entry.q_len and (job.sink_rows == 0 or job.starts != 0):
            return
        b, row, lane = entry.b, entry.first_q + i, thread % lanes
        delta, strange = products(job, entry, head, i, lane)
        delta, strange = sum_of(delta), sum_of(strange)
        if job.dlse != 0:
            at = place_of(job.dlse_table, job.dlse_batch, b, head * job.dlse_head)
            delta -= load(job.dlse, at + row * job.dlse_row)
        at = place_of(job.lse_table, job.lse_batch, b, head * job.lse_head)
        lse = load(job.lse, at + row * job.lse_row)
        sink = load(job.sinks, head) if job.sinks != 0 else none
        share = real(0) if lse == none else exp(sink - lse)
        weight, reference = real(1), no_number if strange != 0 or not lse < huge else lse
        if weighs and i < entry.q_len:
            reference, weight, share = measured(job, entry, head, i, lane, reference, sink, share)
        if lane == 0:
            if job.sink_rows != 0:
                keep(job.sink_rows, number, -share * delta)
            keep(job.delta, number, real(0) if lse == none else delta)
            keep(job.reference, number, huge if lse == none else reference)
            if job.weight != 0:
                keep(job.weight, number, weight)

    return kernel


def row_place(words: Any) -> Callable:
    """Device function (table, stride, b, more): elements to batch entry b, and so many more."""
    start_of = offset_of_entry(words)

    @words.device(types.int64)
    def place(table, stride, b, more):
        return start_of(table, stride, b) + more

    return place


def row_products(variant: Variant, lanes: int, words: Any) -> Callable:
    """Device function (job, entry, head, i, lane) -> a lane's part of sum(dout * out), and of a sum
    that is 0 only if all of q and dout are finite.
    """
    real, load, place_of = (
        np.dtype(variant.dtype).type,
        words.load(variant.storage),
        row_place(words),
    )
    pair = types.UniTuple(getattr(types, variant.dtype), 2)

    @words.device(pair)
    def products(job, entry, head, i, lane):
        total, strange = real(0), real(0)
        out = place_of(job.out_table, job.out_batch, entry.b, head * job.out_head)
        out += (entry.first_q + i) * job.out_row
        dout = entry.dout + head * job.dout_head + i * job.dout_row
        d = lane
        while d < job.head_dim_v:
            x = load(job.dout, dout + d * job.dout_col)
            total += x * load(job.out, out + d * job.out_col)
            strange += x - x
            d += lanes
        q = entry.q + head * job.q_head + i * job.q_row
        d = lane
        while d < job.head_dim:
            x = load(job.q, q + d * job.q_col)
            strange += x - x
            d += lanes
        return total, strange

    return products


def sum_of_lanes(dtype: str, lanes: int, words: Any) -> Callable:
    """Device function (x): the sum over the lanes of a row, for each of them."""
    other_lane = words.lane_xor(dtype)

    @words.device(getattr(types, dtype))
    def sum_of(x):
        step = lanes // 2
        while step > 0:
            x += other_lane(x, step)
            step //= 2
        return x

    return sum_of


def measured_row(variant: Variant, lanes: int, words: Any) -> Callable:
    """Device function (job, entry, head, i, lane, reference, sink, share) -> (reference, weight,
    share): those of a large row anew, unless its lse is that of more keys than are here.
    """
    real, f = np.dtype(variant.dtype).type, words.functions(variant.dtype)
    exp, log, state_of = f.exp, f.log, state_of_row(variant, lanes, words)
    least, rounding = real(LARGEST), real(2 * np.finfo(variant.dtype).eps)

    @words.device(types.UniTuple(getattr(types, variant.dtype), 3))
    def measured(job, entry, head, i, lane, reference, sink, share):
        # Also false for NaN, infinity and rows that see nothing.
        if not (abs(reference) > least and reference - reference == 0):
            return reference, real(1), share
        best, total = state_of(job, entry, head, i, lane, sink)
        if not abs(best + log(total) - reference) <= rounding * abs(reference):
            return reference, real(1), share
        return best, real(1) / total, exp(sink - best) / total

    return measured


def state_of_row(variant: Variant, lanes: int, words: Any) -> Callable:
    """Device function (job, entry, head, i, lane, sink) -> a row's largest score, and its sum of
    exp(score - that), the sink included.
    """
    real = np.dtype(variant.dtype).type
    none, load, other_lane = (
        real(-np.inf),
        words.load(variant.storage),
        words.lane_xor(variant.dtype),
    )
    change, visible = changed_score(variant, words), visible_key(variant, words)
    key_range, joined = key_range_of(words), joined_states(variant.dtype, words)

    @words.device(types.UniTuple(getattr(types, variant.dtype), 2))
    def state(job, entry, head, i, lane, sink):
        best = sink if lane == 0 else none
        total = real(0) if best == none else real(1)
        start, stop = key_range(job, i + entry.offset, i + entry.offset, entry.seqlen_k)
        q, j = entry.q + head * job.q_head + i * job.q_row, start + lane
        while j < stop:
            if visible(job, entry, head, i, j):
                k, s, d = entry.k + j * job.k_row, real(0), np.int64(0)
                while d < job.head_dim:
                    s += load(job.q, q + d * job.q_col) * load(job.k, k + d * job.k_col)
                    d += 1
                s, hidden = change(job, entry, real(job.scale) * s, head, i, j)
                if not hidden:
                    best, total = joined(best, total, s, real(1))
            j += lanes
        step = lanes // 2
        while step > 0:
            best, total = joined(best, total, other_lane(best, step), other_lane(total, step))
            step //= 2
        return best, total

    return state


def joined_states(dtype: str, words: Any) -> Callable:
    """Device function (best, total, other, more) -> (best, total) of two parts of a row."""
    real, exp = np.dtype(dtype).type, words.functions(dtype).exp
    none = real(-np.inf)

    @words.device(types.UniTuple(getattr(types, dtype), 2))
    def joined(best, total, other, more):
        top = other if other > best else best
        safe = real(0) if top == none else top
        return top, total * exp(best - safe) + more * exp(other - safe)

    return joined
