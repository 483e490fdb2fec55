"""The core in NumPy: the fallback, and the meaning of the words.

For every query row i, with s = scale * q @ k.T + bias, and s = -inf where a key is hidden,

    out[i] = sum_j exp(s[i, j] - max_j s) * v[j] / sum_j exp(s[i, j] - max_j s)
    lse[i] = max_j s + log(sum_j exp(s[i, j] - max_j s))

in blocks of queries and keys: O(block_m * block_n) memory, key blocks outside the window skipped.

Source: Dao 2023, FlashAttention-2, arXiv:2307.08691, algorithm 1.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any, NamedTuple

import numpy as np

from .problem import Operands, Plan, Problem

# Heads and batch entries share one batched product up to this size; more gains nothing, as the
# scores then leave the second-level cache, and every block needs its own memory.
BLOCK_BYTES = 2 << 20


def run(plan: Plan, problem: Problem, operands: Operands) -> None:
    """Write operands.out and, if it is there, operands.lse: every element, and nothing else.

    Sums are in the dtype of q. Needs seqlen_k >= 1. Raises nothing and gives no NumPy warning:
    infinities and NaNs go where the formula takes them.
    """
    block_n = min(plan.block_n, problem.seqlen_k)
    with np.errstate(all="ignore"):
        for part in _parts(_grouped(problem, operands), _max_slots(plan, problem)):
            for m_start in range(0, problem.seqlen_q, plan.block_m):
                m_stop = min(m_start + plan.block_m, problem.seqlen_q)
                _attend_rows(problem, part, m_start, m_stop, block_n)


# --- which slots share a product: a slot is one query head of one batch entry ---------------------


def _grouped(problem: Problem, operands: Operands) -> Operands:
    """Return views with slot axes (*lead, heads_kv, group) in front; k, v repeat by stride 0."""
    heads = problem.heads_kv, problem.group

    def split(a: np.ndarray, axis: int) -> np.ndarray:
        axis += a.ndim
        return a.reshape(a.shape[:axis] + heads + a.shape[axis + 1 :])

    def repeat(a: np.ndarray) -> np.ndarray:
        return np.broadcast_to(a[..., None, :, :], a.shape[:-3] + heads + a.shape[-2:])

    q, k, v, mask, bias, out, lse = operands
    return Operands(
        split(q, -3),
        repeat(k),
        repeat(v),
        None if mask is None else split(mask, -3),
        None if bias is None else split(bias, -3),
        split(out, -3),
        None if lse is None else split(lse, -2),
    )


def _max_slots(plan: Plan, problem: Problem) -> int:
    """Return how many slots share a product: scores and blocks of q, k, v, out in BLOCK_BYTES."""
    m = min(plan.block_m, problem.seqlen_q)
    n = min(plan.block_n, problem.seqlen_k)
    elements = m * n + (m + n) * (problem.head_dim + problem.head_dim_v)
    return max(1, BLOCK_BYTES // (elements * np.dtype(problem.variant.dtype).itemsize))


def _parts(operands: Operands, max_slots: int, axis: int = 0) -> Iterator[Operands]:
    """Cut the slot axes from the left until at most `max_slots` are in each part."""
    slots = operands.q.shape[axis:-2]
    inner = prod(slots[1:])
    step = max(1, max_slots // inner)
    for start in range(0, slots[0], step):
        cut = (slice(None),) * axis + (slice(start, start + step),)
        arrays: list[Any] = [None if a is None else a[cut] for a in operands]
        part = Operands(*arrays)
        if inner <= max_slots:
            yield part
        else:
            yield from _parts(part, max_slots, axis + 1)


# --- one block of queries -----------------------------------------------------------------------


class _Rows(NamedTuple):
    """The softmax state of a block of query rows; updated in place."""

    row_max: np.ndarray  # (*slots, block_m), the largest score so far
    row_sum: np.ndarray  # (*slots, block_m), sum of exp(s - row_max)
    acc: np.ndarray  # (*slots, block_m, head_dim_v), sum of exp(s - row_max) * v


def _attend_rows(problem: Problem, part: Operands, m_start: int, m_stop: int, block_n: int) -> None:
    """Run the rows m_start:m_stop of every slot against the key blocks that they see."""
    q = _blas_ready(part.q[..., m_start:m_stop, :])
    shape = q.shape[:-1]
    rows = _Rows(
        np.full(shape, -np.inf, q.dtype),
        np.zeros(shape, q.dtype),
        np.zeros(shape + part.v.shape[-1:], q.dtype),
    )
    first, stop = _key_range(problem, m_start, m_stop)
    for n_start in range(first, stop, block_n):
        n_stop = min(n_start + block_n, stop)
        keys = slice(n_start, n_stop)
        bias = None if part.bias is None else part.bias[..., m_start:m_stop, keys]
        mask = None if part.mask is None else part.mask[..., m_start:m_stop, keys]
        window = _window_hides(problem, m_start, m_stop, n_start, n_stop)
        hidden = _hidden(window, mask, bias)
        s = _scores(q, part.k[..., keys, :], problem.scale, bias, hidden)
        _online_update(rows, s, _blas_ready(part.v[..., keys, :]), hidden)
    _finish(rows, part, m_start, m_stop)


def _key_range(problem: Problem, m_start: int, m_stop: int) -> tuple[int, int]:
    """Return (first, stop): the window lets no row of m_start:m_stop see a key outside of them."""
    first, stop = 0, problem.seqlen_k
    if problem.left is not None:
        first = max(first, m_start + problem.offset - problem.left)
    if problem.right is not None:
        stop = min(stop, m_stop + problem.offset + problem.right)
    return first, stop


def _window_hides(
    problem: Problem, m_start: int, m_stop: int, n_start: int, n_stop: int
) -> np.ndarray | None:
    """Return (block_m, block_n) bool, True where the window hides a key; None for a full block."""
    first, last = m_start + problem.offset, m_stop - 1 + problem.offset
    left, right = problem.left, problem.right
    i = np.arange(first, last + 1)[:, None]
    j = np.arange(n_start, n_stop)
    hides = None
    if left is not None and n_start < last - left:
        hides = j < i - left
    if right is not None and n_stop - 1 > first + right:
        late = j > i + right
        hides = late if hides is None else hides | late
    return hides


def _hidden(
    window: np.ndarray | None, mask: np.ndarray | None, bias: np.ndarray | None
) -> np.ndarray | None:
    """Return bool, True where a row may not see a key; None if every row sees every key."""
    hidden = window
    if mask is not None:
        hidden = ~mask if hidden is None else hidden | ~mask
    if bias is not None:
        excluded = bias == -np.inf
        hidden = excluded if hidden is None else hidden | excluded
    return hidden if hidden is not None and hidden.any() else None


def _scores(
    q: np.ndarray,
    k: np.ndarray,
    scale: float,
    bias: np.ndarray | None,
    hidden: np.ndarray | None,
) -> np.ndarray:
    """Return scale * q @ k.T + bias, (*slots, block_m, block_n), -inf where hidden."""
    s = q @ _blas_ready(k).swapaxes(-1, -2)
    s *= scale
    if bias is not None:
        s += _converted(bias, s.dtype)
    if hidden is not None:
        # Assigned, not added: NaN + -inf is NaN, and a hidden key may hold NaN.
        np.copyto(s, -np.inf, where=hidden)
    return s


def _converted(bias: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Return `bias` in `dtype`; a finite float64 stays finite, as -inf would hide the key."""
    if bias.dtype.itemsize <= dtype.itemsize:
        return bias.astype(dtype, copy=False)
    limit = np.finfo(dtype).max
    return np.where(np.isinf(bias), bias, np.clip(bias, -limit, limit)).astype(dtype)


def _online_update(rows: _Rows, s: np.ndarray, v: np.ndarray, hidden: np.ndarray | None) -> None:
    """Fold one block of scores into the rows. s (*slots, block_m, block_n) becomes p."""
    new_max = np.maximum(rows.row_max, s.max(axis=-1))
    # A row that has seen no key yet: -inf - -inf would be NaN.
    safe_max = np.where(new_max == -np.inf, 0, new_max).astype(s.dtype, copy=False)
    alpha = np.exp(rows.row_max - safe_max)
    s -= safe_max[..., None]
    p = np.exp(s, out=s)
    rows.row_max[...] = new_max
    rows.row_sum[...] *= alpha
    rows.row_sum[...] += p.sum(axis=-1)
    rows.acc[...] *= alpha[..., None]
    rows.acc[...] += _weighted_values(p, v, hidden)


def _weighted_values(p: np.ndarray, v: np.ndarray, hidden: np.ndarray | None) -> np.ndarray:
    """Return p @ v, (*slots, block_m, head_dim_v); hidden keys contribute exactly nothing."""
    product = p @ v
    # A hidden key has p = 0, which is only nothing while its v is finite: 0 * inf is NaN.
    if hidden is None or np.isfinite(product).all():
        return product
    finite = np.isfinite(v)
    product = p @ np.where(finite, v, 0)
    rest = np.where(finite, 0, v)
    hidden = np.broadcast_to(hidden, p.shape)
    slots = tuple(range(v.ndim - 2))
    seen = ~finite.all(axis=(*slots, -1)) & ~hidden.all(axis=(*slots, -2))
    for j in np.flatnonzero(seen):
        term = p[..., :, j, None] * rest[..., j, None, :]
        product += np.where(hidden[..., :, j, None], 0, term)
    return product


def _finish(rows: _Rows, part: Operands, m_start: int, m_stop: int) -> None:
    """Write out = acc / row_sum and lse; a row that saw no key is 0, its lse -inf."""
    row_sum = rows.row_sum
    # Only 0 means nothing was seen. A NaN sum must stay NaN.
    divisor = np.where(row_sum == 0, 1, row_sum).astype(row_sum.dtype, copy=False)
    np.divide(rows.acc, divisor[..., None], out=part.out[..., m_start:m_stop, :])
    if part.lse is not None:
        np.add(rows.row_max, np.log(row_sum), out=part.lse[..., m_start:m_stop])


def _blas_ready(block: np.ndarray) -> np.ndarray:
    """Return `block`, or a copy of it where matmul would leave BLAS for its strides."""
    row, column = block.strides[-2:]
    if column == block.itemsize and row >= block.shape[-1] * block.itemsize:
        return block
    return np.ascontiguousarray(block)
