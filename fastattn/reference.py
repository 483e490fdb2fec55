"""The core in NumPy: the fallback, and the meaning of the words.

For every query row i, with position p = i + offset and scores

    s = scale * q @ k.T;  s = softcap * tanh(s / softcap);  s = score_mod(s, b, h, i, j, aux)
    s += bias - slope * |p - j|

and s = -inf where a key is hidden, and with the sink, if there is one, as one more score,

    out[i] = sum_j D[i, j] * exp(s[i, j] - max_j s) * v[j] / sum_j exp(s[i, j] - max_j s)
    lse[i] = max_j s + log(sum_j exp(s[i, j] - max_j s))

where D is 1, or 0 and 1 / (1 - p) under dropout. In blocks of queries and keys: O(block_m *
block_n) memory; key blocks outside window and chunk, or that a block mask skips, are skipped.

Source: Dao 2023, FlashAttention-2, arXiv:2307.08691, algorithm 1.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import prod
from typing import Any, NamedTuple

import numpy as np

from . import dropout
from .modified import Places, hidden_keys, key_blocks, modified_scores, places
from .problem import Operands, Plan, Problem

# Heads and batch entries share one batched product up to this size; more gains nothing, as the
# scores then leave the second-level cache, and every block needs its own memory.
BLOCK_BYTES = 2 << 20


def run(plan: Plan, problem: Problem, operands: Operands) -> None:
    """Write operands.out and, if it is there, operands.lse: every element, and nothing else.

    Rows at and past q_len are not written. Raises nothing and gives no NumPy warning: infinities
    and NaNs go where the formula takes them.
    """
    with np.errstate(all="ignore"):
        for one, slots in members(problem, operands):
            block_n = max(1, min(plan.block_n, one.seqlen_k))
            for part in parts(slots, max_slots(plan, one)):
                for m_start in range(0, one.seqlen_q, plan.block_m):
                    m_stop = min(m_start + plan.block_m, one.seqlen_q)
                    _attend_rows(one, part, slice(m_start, m_stop), block_n)


# --- which slots share a product: a slot is one query head of one batch entry ---------------------


class Slots(NamedTuple):
    """Views of what the slots need, all with the same slot axes in front."""

    q: np.ndarray  # (*slots, seqlen_q, head_dim)
    k: np.ndarray  # (*slots, seqlen_k, head_dim), the same for all of a group
    v: np.ndarray  # (*slots, seqlen_k, head_dim_v)
    mask: np.ndarray | None  # (*slots, seqlen_q, seqlen_k)
    bias: np.ndarray | None
    out: np.ndarray  # (*slots, seqlen_q, head_dim_v)
    lse: np.ndarray | None  # (*slots, seqlen_q)
    alibi: np.ndarray | None  # (*slots)
    sinks: np.ndarray | None
    dropout_keys: np.ndarray | None  # (*slots) uint64
    places: Places | None  # where modifiers are run

    def cut(self, at: tuple[Any, ...]) -> Slots:
        """Return those of the slots `at`."""
        arrays: list[Any] = [None if a is None else a[at] for a in self[:-1]]
        arrays.append(None if self.places is None else self.places.cut(at))
        return Slots(*arrays)


class Member(NamedTuple):
    """Where one batch entry lies among slots of the whole batch."""

    place: tuple[Any, ...]  # its index in q, k, v, mask, bias, out and lse
    at: tuple[Any, ...]  # and in what is one number a head
    rows: slice
    keys: slice


def members(problem: Problem, operands: Operands) -> Iterator[tuple[Problem, Slots]]:
    """Yield problems without ranges, and their slots: the whole batch, or one of it at a time."""
    lead, tables = leading(problem, operands), operands.block_table
    slots = _grouped(problem, operands, lead)
    for b, (one, member) in enumerate(spans(problem, operands)):
        if member is not None and tables is not None:
            slots = _grouped(problem, _off_pages(operands, tables[b], member.keys), lead)
        yield one, slots if member is None else _member(slots, member)


def _off_pages(operands: Operands, table: np.ndarray, keys: slice) -> Operands:
    """Return operands with these keys and values of one batch entry, where its slots look for them,
    and 0 before.
    """
    found = []
    j = np.arange(keys.start, keys.stop)
    for pages in (operands.k, operands.v):
        _, heads, size, dim = pages.shape
        rows = np.zeros((heads, keys.stop, dim), pages.dtype)
        rows[:, keys] = pages[table[j // size], :, j % size].swapaxes(0, 1)
        found.append(np.broadcast_to(rows, operands.q.shape[:-3] + rows.shape))
    return operands._replace(k=found[0], v=found[1])


def leading(problem: Problem, operands: Operands) -> tuple[int, ...]:
    """Return the shape of the batch."""
    return (problem.batch,) if operands.starts is not None else operands.q.shape[:-3]


def spans(problem: Problem, operands: Operands) -> Iterator[tuple[Problem, Member | None]]:
    """Yield problems without ranges, and where their slots lie; None for the whole batch."""
    if operands.ranges is None:
        yield problem, None
        return
    lead = leading(problem, operands)
    for b, (q_len, kv_start, kv_stop, offset) in enumerate(operands.ranges.tolist()):
        first_q, first_k = (0, 0) if operands.starts is None else operands.starts[b].tolist()
        rows = slice(first_q, first_q + q_len)
        keys = slice(first_k + kv_start, first_k + kv_stop)
        at = np.unravel_index(b, lead)
        one = replace(
            problem,
            seqlen_q=q_len,
            seqlen_k=kv_stop - kv_start,
            offset=offset,
            first_key=kv_start,
        )
        yield one, Member(at if operands.starts is None else (0,), at, rows, keys)


def _grouped(problem: Problem, operands: Operands, lead: tuple[int, ...]) -> Slots:
    """Return views with slot axes (*lead, heads_kv, group) in front; k, v repeat by stride 0."""
    heads = problem.heads_kv, problem.group

    def split(a: np.ndarray | None, axis: int) -> Any:
        return None if a is None else split_heads(a, axis, heads)

    def repeat(a: np.ndarray) -> np.ndarray:
        return np.broadcast_to(a[..., None, :, :], a.shape[:-3] + heads + a.shape[-2:])

    sinks, keys = operands.sinks, operands.dropout_keys
    sinks = None if sinks is None else np.broadcast_to(sinks, (*lead, problem.heads_q))
    keys = None if keys is None else keys.reshape(*lead, problem.heads_q)
    return Slots(
        q=split(operands.q, -3),
        k=repeat(operands.k),
        v=repeat(operands.v),
        mask=split(operands.mask, -3),
        bias=split(operands.bias, -3),
        out=split(operands.out, -3),
        lse=split(operands.lse, -2),
        alibi=split(operands.alibi, -1),
        sinks=split(sinks, -1),
        dropout_keys=split(keys, -1),
        places=places(problem, operands, lead),
    )


def split_heads(a: np.ndarray, axis: int, heads: tuple[int, int]) -> np.ndarray:
    """Return a view in which `axis` (negative) is two: heads_kv and group."""
    axis += a.ndim
    return a.reshape(a.shape[:axis] + heads + a.shape[axis + 1 :])


def _member(slots: Slots, member: Member) -> Slots:
    """Return the slots of one batch entry."""
    place, at, rows, keys = member
    q, k, v, mask, bias, out, lse, *rest, modified = slots
    arrays: list[Any] = [q[place][..., rows, :], k[place][..., keys, :], v[place][..., keys, :]]
    arrays += [None if a is None else a[place][..., rows, keys] for a in (mask, bias)]
    arrays += [out[place][..., rows, :], None if lse is None else lse[place][..., rows]]
    arrays += [None if a is None else a[at] for a in rest]
    arrays.append(None if modified is None else modified.cut(at))
    return Slots(*arrays)


def max_slots(plan: Plan, problem: Problem) -> int:
    """Return how many slots share a product: scores and blocks of q, k, v, out in BLOCK_BYTES."""
    m = min(plan.block_m, problem.seqlen_q)
    n = min(plan.block_n, problem.seqlen_k)
    elements = m * n + (m + n) * (problem.head_dim + problem.head_dim_v)
    return max(1, BLOCK_BYTES // (max(1, elements) * np.dtype(problem.variant.dtype).itemsize))


def parts(slots: Slots, max_slots: int) -> Iterator[Slots]:
    """Cut the slot axes from the left until at most `max_slots` are in each part."""
    return (slots.cut(at) for at in cuts(slots.q.shape[:-2], max_slots))


def cuts(shape: tuple[int, ...], max_slots: int) -> Iterator[tuple[slice, ...]]:
    """Yield the indices of such parts."""
    inner = prod(shape[1:])
    step = max(1, max_slots // inner)
    for start in range(0, shape[0], step):
        at = slice(start, start + step)
        if inner <= max_slots:
            yield (at,)
        else:
            yield from ((at, *rest) for rest in cuts(shape[1:], max_slots))


# --- scores -------------------------------------------------------------------------------------


def scores(
    problem: Problem, part: Slots, q: np.ndarray, rows: slice | np.ndarray, keys: slice
) -> tuple[np.ndarray, np.ndarray | None]:
    """Return the scores of `rows` and `keys`, (*slots, rows, keys), -inf where a key is hidden.

    And bool that broadcasts to them, True where it is; None if every row sees every key. `q` is
    block() of the rows; `rows` are a slice with both ends, or indices.
    """
    s = products(problem, part, q, keys)
    return s, complete(problem, part, s, rows, keys)


def products(problem: Problem, part: Slots, q: np.ndarray, keys: slice) -> np.ndarray:
    """Return q @ k.T, scaled and capped: (*slots, rows, keys), as score_mod gets it."""
    # All of a group read the same keys.
    k = block(part.k[..., :1, keys, :], q.dtype)
    s = q @ k.swapaxes(-1, -2)
    s *= problem.scale
    if problem.softcap:
        s /= problem.softcap
        np.tanh(s, out=s)
        s *= problem.softcap
    return s


def complete(
    problem: Problem, part: Slots, s: np.ndarray, rows: slice | np.ndarray, keys: slice
) -> np.ndarray | None:
    """Turn products() into scores, in place; return where a key is hidden, as scores() does."""
    i = np.arange(rows.start, rows.stop) if isinstance(rows, slice) else rows
    j = np.arange(keys.start, keys.stop)
    bias = None if part.bias is None else part.bias[..., rows, keys]
    mask = None if part.mask is None else part.mask[..., rows, keys]
    hidden = _either(_outside(problem, i, j), _unseen(mask, bias))
    if part.places is not None:
        hidden = _either(hidden, hidden_keys(problem, part.places, i, j))
        hidden = _either(hidden, modified_scores(problem, part.places, s, i, j))
    hidden = hidden if hidden is not None and hidden.any() else None
    if bias is not None:
        s += _converted(bias, s.dtype)
    if part.alibi is not None:
        s -= part.alibi[..., None, None] * distances(problem, i, j, s.dtype)
    if hidden is not None:
        # Assigned, not added: NaN + -inf is NaN, and a hidden key may hold NaN.
        np.copyto(s, -np.inf, where=hidden)
    return hidden


def distances(problem: Problem, i: np.ndarray, j: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Return |i + offset - j|, (rows, keys)."""
    return np.abs(i[:, None] + problem.offset - j).astype(dtype)


def _outside(problem: Problem, i: np.ndarray, j: np.ndarray) -> np.ndarray | None:
    """Return (rows, keys) bool, True where window or chunk hides a key; None for a full block."""
    start, stop = problem.key_range(i)
    hides = None
    if start.max() > j[0]:
        hides = j < start[:, None]
    if stop.min() <= j[-1]:
        late = j >= stop[:, None]
        hides = late if hides is None else hides | late
    return hides


def _unseen(mask: np.ndarray | None, bias: np.ndarray | None) -> np.ndarray | None:
    """Return bool, True where mask or bias hides a key; None without them."""
    excluded = None if bias is None else bias == -np.inf
    return _either(None if mask is None else ~mask, excluded)


def _either(a: np.ndarray | None, b: np.ndarray | None) -> np.ndarray | None:
    """Return a | b, where None hides nothing."""
    if a is None or b is None:
        return b if a is None else a
    return a | b


def _converted(bias: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Return `bias` in `dtype`; a finite float64 stays finite, as -inf would hide the key."""
    if bias.dtype.itemsize <= dtype.itemsize:
        return bias.astype(dtype, copy=False)
    limit = np.finfo(dtype).max
    return np.where(np.isinf(bias), bias, np.clip(bias, -limit, limit)).astype(dtype)


def block(a: np.ndarray, dtype: np.dtype | str) -> np.ndarray:
    """Return a block of q, k or v in `dtype`; a copy where its strides would keep it from BLAS."""
    row, column = a.strides[-2:]
    if a.dtype != dtype:
        return a.astype(dtype, order="C")
    if column == a.itemsize and row >= a.shape[-1] * a.itemsize:
        return a
    return np.ascontiguousarray(a)


# --- one block of queries -----------------------------------------------------------------------


class _Rows(NamedTuple):
    """The softmax state of a block of query rows; updated in place."""

    row_max: np.ndarray  # (*slots, block_m), the largest score so far
    row_sum: np.ndarray  # (*slots, block_m), sum of exp(s - row_max)
    acc: np.ndarray  # (*slots, block_m, head_dim_v), sum of D * exp(s - row_max) * v


def _attend_rows(problem: Problem, part: Slots, rows: slice, block_n: int) -> None:
    """Run `rows` of every slot against the key blocks that they see."""
    q = block(part.q[..., rows, :], problem.variant.dtype)
    state = start(part, q)
    i = np.arange(rows.start, rows.stop)
    row_keys = None
    if part.dropout_keys is not None:
        row_keys = dropout.chained(part.dropout_keys[..., None], i)
    first, stop = problem.key_range(i)
    seen = slice(int(first.min()), int(stop.max()))
    for keys in key_blocks(problem, part.places, rows, seen, block_n):
        s, hidden = scores(problem, part, q, rows, keys)
        p = online_update(state, s)
        if row_keys is not None:
            j = np.arange(keys.start, keys.stop) + problem.keys_before
            p *= dropout.kept(row_keys, j, problem.dropout_p)
        v = block(part.v[..., :1, keys, :], q.dtype)
        state.acc[...] += _weighted_values(p, v, hidden)
    _finish(state, part, rows, dropout.factor(problem.dropout_p))


def start(part: Slots, q: np.ndarray) -> _Rows:
    """Return the state before any key; a sink is a score that has been seen."""
    shape = q.shape[:-1]
    row_max, row_sum = np.full(shape, -np.inf, q.dtype), np.zeros(shape, q.dtype)
    if part.sinks is not None:
        row_max[...] = part.sinks[..., None]
        row_sum[...] = np.where(row_max == -np.inf, 0, np.exp(row_max - row_max))
    return _Rows(row_max, row_sum, np.zeros(shape + part.v.shape[-1:], q.dtype))


def online_update(rows: _Rows, s: np.ndarray) -> np.ndarray:
    """Fold scores (*slots, block_m, block_n) into the rows; they become exp(s - row_max)."""
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
    return p


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


def _finish(rows: _Rows, part: Slots, at: slice, factor: float) -> None:
    """Write out = factor * acc / row_sum and lse; a row that saw no key is 0, its lse -inf."""
    row_sum = rows.row_sum
    # Only 0 means nothing was seen. A NaN sum must stay NaN.
    divisor = np.where(row_sum == 0, 1, row_sum).astype(row_sum.dtype, copy=False)
    rows.acc[...] /= divisor[..., None]
    if factor != 1:
        rows.acc[...] *= factor
    part.out[..., at, :] = rows.acc  # rounded once, to nearest even
    if part.lse is not None:
        np.add(rows.row_max, np.log(row_sum), out=part.lse[..., at])
