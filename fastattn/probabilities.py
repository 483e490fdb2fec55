"""Scores of whole rows and their softmax, for those who want them themselves."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .problem import Operands, Problem
from .reference import BLOCK_BYTES, Slots, block, members, parts, products, scores

Values = Callable[[Problem, Slots, np.ndarray], np.ndarray]


def weights(problem: Problem, part: Slots, i: np.ndarray) -> np.ndarray:
    """Return the probabilities of rows i, (*slots, rows, seqlen_k)."""
    s, hidden = _scores(problem, part, i)
    sinks = np.asarray(-np.inf if part.sinks is None else part.sinks[..., None, None], s.dtype)
    row_max = np.maximum(s.max(axis=-1, keepdims=True), sinks)
    row_max = np.where(row_max == -np.inf, 0, row_max).astype(s.dtype, copy=False)
    s -= row_max
    p = np.exp(s, out=s)
    row_sum = p.sum(axis=-1, keepdims=True) + np.exp(sinks - row_max)
    p /= np.where(row_sum == 0, 1, row_sum).astype(s.dtype, copy=False)
    if hidden is not None:
        np.copyto(p, 0, where=hidden)  # also in a row that is NaN
    return p


def final_scores(problem: Problem, part: Slots, i: np.ndarray) -> np.ndarray:
    """Return what weights() takes the softmax of: -inf where a key is hidden."""
    return _scores(problem, part, i)[0]


def capped_products(problem: Problem, part: Slots, i: np.ndarray) -> np.ndarray:
    """Return the scores of rows i before score_mod, bias and mask, (*slots, rows, seqlen_k)."""
    q = block(part.q[..., i, :], problem.variant.dtype)
    return products(problem, part, q, slice(0, problem.seqlen_k))


def visit(
    problem: Problem,
    operands: Operands,
    i: np.ndarray,
    result: np.ndarray,
    write: Callable[[np.ndarray, np.ndarray, np.ndarray], None],
    values: Values = weights,
) -> None:
    """Call write(view of result, which of i exist, their values) for every part of the batch."""
    if not result.size or not i.size:
        return
    lead, ranges = operands.q.shape[:-3], operands.ranges
    heads = problem.heads_kv, problem.group
    result = result.reshape(*lead, *heads, *result.shape[-2:])
    max_slots = max(1, BLOCK_BYTES // (i.size * result.shape[-1] * result.itemsize))
    with np.errstate(all="ignore"):
        for b, (one, slots) in enumerate(members(problem, operands)):
            target, inside = result, i < one.seqlen_q
            if ranges is not None:
                target = result[np.unravel_index(b, lead)][..., ranges[b, 1] : ranges[b, 2]]
            if not one.seqlen_k or not inside.any():
                continue
            for part in parts(slots._replace(out=target, lse=None), max_slots):
                write(part.out, inside, values(one, part, i[inside]))


def _scores(problem: Problem, part: Slots, i: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
    q = block(part.q[..., i, :], problem.variant.dtype)
    return scores(problem, part, q, i, slice(0, problem.seqlen_k))
