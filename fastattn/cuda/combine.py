"""Two small kernels, a block of threads for each row: merge the parts of the keys; write the rows
that see nothing. They serve all kernels that compute attention.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import cuda, types

from ..problem import Variant
from .compile import Source
from .place import member_of
from .tile import LAST_THREAD, ROW_THREADS
from .writing import partial_row, write_row


def combine_source(variant: Variant) -> Source:
    """The kernel as it is translated for a GPU."""
    from . import words

    return Source(combine_kernel(variant, words), ROW_THREADS, min_blocks=4)


def missing_source(variant: Variant) -> Source:
    """The kernel as it is translated for a GPU."""
    from . import words

    return Source(missing_kernel(variant, words), ROW_THREADS, min_blocks=4)


def row_of_block(words: Any) -> Callable:
    """Device function (job) -> (b, head, i) of this block of threads."""

    @words.device(types.UniTuple(types.int64, 3))
    def locate(job):
        item = np.int64(cuda.blockIdx.x)
        i, item = item % job.seqlen_q, item // job.seqlen_q
        return item // job.heads_q, item % job.heads_q, i

    return locate


def sink_of(dtype: str, words: Any) -> Callable:
    """Device function (job, head): the sink's score, -inf without one."""
    load, none = words.load(dtype), np.dtype(dtype).type(-np.inf)

    @words.device(getattr(types, dtype))
    def sink(job, head):
        return load(job.sinks, head) if job.sinks != 0 else none

    return sink


def combine_kernel(variant: Variant, words: Any) -> Callable:
    """Kernel (job): out and lse of rows whose keys were split, from partial and partial_state.

    With a reference max_s, a sum_s and a sum of weighted values acc_s of each part,
    out = sum_s acc_s * exp(max_s - max) / sum_s sum_s * exp(max_s - max).
    """
    real, f = np.dtype(variant.dtype).type, words.functions(variant.dtype)
    exp, log, none = f.exp, f.log, np.dtype(variant.dtype).type(-np.inf)
    load, sink, partial = (
        words.load(variant.dtype),
        sink_of(variant.dtype, words),
        partial_row(words),
    )
    locate, member, write = row_of_block(words), member_of(words), write_row(variant, words)

    def kernel(job):
        b, head, i = locate(job)
        if i >= member(job, b)[0]:
            return
        row, best = partial(job, b, head, i, 0), sink(job, head)
        for s in range(job.num_splits):
            x = load(job.partial_state, 2 * (row + s))
            best = x if x > best else best
        safe = real(0) if best == none else best
        d = np.int64(cuda.threadIdx.x & LAST_THREAD)
        while d < job.head_dim_v:
            total, acc = exp(sink(job, head) - safe), real(0)
            for s in range(job.num_splits):
                factor = exp(load(job.partial_state, 2 * (row + s)) - safe)
                total += factor * load(job.partial_state, 2 * (row + s) + 1)
                acc += factor * load(job.partial, (row + s) * job.head_dim_v + d)
            divisor = real(1) if total == 0 else total
            value = acc / divisor * real(job.dropout_factor)
            write(job, b, head, i, d, value, best + log(total))
            d += cuda.blockDim.x

    return kernel


def missing_kernel(variant: Variant, words: Any) -> Callable:
    """Kernel (job): rows at and past q_len, or all where there are no keys: out 0, lse -inf or the
    sink.
    """
    real, sink = np.dtype(variant.dtype).type, sink_of(variant.dtype, words)
    locate, member, write = row_of_block(words), member_of(words), write_row(variant, words)

    def kernel(job):
        b, head, i = locate(job)
        exists = i < member(job, b)[0]
        # What is past a packed member's rows is another's.
        if (exists and job.seqlen_k > 0) or (not exists and job.starts != 0):
            return
        d = np.int64(cuda.threadIdx.x & LAST_THREAD)
        while d < job.head_dim_v:
            write(job, b, head, i, d, real(0), sink(job, head))
            d += cuda.blockDim.x

    return kernel
