"""Chunks that fit a worker."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import Any

import numpy as np
from dask.utils import parse_bytes

from ..arguments import count, integer
from ..arrays import FLOAT_RULE, NAMES, check_sizes, float_name

# Multiples of this keep the places where the kernel's running softmax starts anew.
STEP = 1024
SHARE = 0.5  # of a worker's memory: the rest is Python's, dask's, and for blocks on their way
# A pair of this much work takes some 1 s on one thread: longer ones leave too few to go round.
MOST_FLOP = 1e11
# And of this much 0.2 s: dask needs about 1 ms for a task, so shorter ones are put together.
LEAST_FLOP = 2e10
KEY_CHUNKS = 3  # of k and v in memory at once
OUT_CHUNKS = 6  # of out: results that wait to be merged, and what merging two takes


@dataclass(frozen=True)
class _Sizes:
    """What does not change with the chunks."""

    seqlen_q: int
    seqlen_k: int
    head_dim: int
    head_dim_v: int
    group: int
    itemsize: int

    def lengths(self, n: int) -> tuple[int, int]:
        """Rows and keys of chunks of at most n."""
        return min(n, max(self.seqlen_q, 1)), min(n, max(self.seqlen_k, 1))

    def nbytes(self, n: int) -> int:
        """What a task needs for a key head, in chunks of n."""
        rows, keys = self.lengths(n)
        queries = self.group * rows * (self.head_dim + OUT_CHUNKS * self.head_dim_v)
        return self.itemsize * (queries + KEY_CHUNKS * keys * (self.head_dim + self.head_dim_v))

    def flop(self, n: int) -> int:
        rows, keys = self.lengths(n)
        return 2 * self.group * rows * keys * (self.head_dim + self.head_dim_v)


def suggest_chunks(
    q_shape: tuple[int, ...],
    k_shape: tuple[int, ...],
    *,
    memory: int | str,
    threads: int = 1,
    dtype: Any = "float32",
    head_dim_v: int | None = None,
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return chunks for q, and for k and v, so that tasks fit into the memory of a worker.

    Batch entries and heads are cut first, as they share nothing. Then both sequences are, alike,
    into chunks as long as memory and a few seconds of work allow, for keys are read once for each
    chunk of queries. Heads and entries whose task would be over at once share one.

    Parameters
    ----------
    q_shape : (..., heads_q, seqlen_q, head_dim)
    k_shape : (..., heads_kv, seqlen_k, head_dim)
    memory : of a worker: bytes, or text as "4 GiB"
    threads : int >= 1, of a worker: as many tasks share its memory
    dtype : of the arrays
    head_dim_v : int. Default head_dim.

    Returns
    -------
    chunks_q, chunks_k : the size along each axis, -1 for the whole of the last, as
        dask.array.from_array(chunks=) and rechunk() take it

    Raises
    ------
    ValueError   shapes that do not fit together, memory in which no task fits
    TypeError    another dtype, no ints
    """
    sizes = _sizes_of(q_shape, k_shape, dtype, head_dim_v)
    budget = _budget(memory, threads)
    n = _length(sizes, budget)
    lead = np.broadcast_shapes(q_shape[:-3], k_shape[:-3])
    heads_kv = k_shape[-3] if len(k_shape) > 2 else 1
    shared = 1  # key heads, of all entries together, that a task has
    chosen: list[int] = []
    for size in (heads_kv, *reversed(lead)):
        whole = all(a == b for a, b in zip(chosen, (heads_kv, *reversed(lead)), strict=False))
        wanted = LEAST_FLOP / max(sizes.flop(n) * shared, 1)
        fits = budget // (sizes.nbytes(n) * shared)
        number = min(size, int(fits), ceil(wanted)) if whole else 1
        chosen.append(max(number, 1))
        shared *= chosen[-1]
    rows, keys = sizes.lengths(n)
    heads, *batch = chosen
    chunks = [*reversed(batch), heads]
    return _of_shape(q_shape, chunks, sizes.group, rows), _of_shape(k_shape, chunks, 1, keys)


def _of_shape(shape: tuple[int, ...], shared: list[int], group: int, rows: int) -> tuple[int, ...]:
    """Return the chunks of an array: shared is of batch and key heads."""
    own = [*shared[:-1], shared[-1] * group][len(shared) - (len(shape) - 2) :]
    return (*(min(a, max(b, 1)) for a, b in zip(own, shape, strict=False)), rows, -1)


def _sizes_of(
    q_shape: tuple[int, ...], k_shape: tuple[int, ...], dtype: Any, head_dim_v: int | None
) -> _Sizes:
    for name, shape in (("q_shape", q_shape), ("k_shape", k_shape)):
        if len(shape) < 2:
            raise ValueError(f"{name} must have rank 2 or more, got {shape}")
    dtype = np.dtype(dtype)
    if not float_name(dtype):
        raise TypeError(f"dtype must be {FLOAT_RULE}, got {dtype}")
    whole = [(1,) * (3 - len(shape)) + tuple(shape) for shape in (q_shape, k_shape)]
    q, k = (tuple(integer("a size must be an int", n) for n in shape) for shape in whole)
    check_sizes(NAMES, q, k, k)
    group = q[-3] // k[-3] if k[-3] else 1
    dim_v = q[-1] if head_dim_v is None else integer("head_dim_v must be an int", head_dim_v)
    return _Sizes(q[-2], k[-2], q[-1], dim_v, max(group, 1), max(dtype.itemsize, 4))


def _budget(memory: int | str, threads: int) -> int:
    """Return the bytes that one task may use."""
    return int(parse_bytes(memory) * SHARE / count("threads", threads, 1))


def _length(sizes: _Sizes, budget: int) -> int:
    """Return the longest chunk of both sequences that is allowed."""
    longest = max(sizes.seqlen_q, sizes.seqlen_k, 1)
    if sizes.nbytes(1) > budget:
        rule = f"memory must be at least {ceil(sizes.nbytes(1) / SHARE)} bytes for each thread"
        raise ValueError(f"{rule}, of which half is for blocks, got {ceil(budget / SHARE)}")

    def allowed(n: int) -> bool:
        return sizes.nbytes(n) <= budget and sizes.flop(n) <= max(MOST_FLOP, sizes.flop(1))

    if allowed(longest):
        return longest
    step = STEP if allowed(STEP) else 1
    low, high = 1, ceil(longest / step)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if allowed(middle * step) else (low, middle)
    # The same number of chunks, of one size as far as that goes.
    number = ceil(longest / (low * step))
    return ceil(longest / (number * step)) * step
