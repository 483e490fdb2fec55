"""score_mod, mask_mod and block masks of the NumPy backend, on one block of scores at a time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from .block_mask import FULL, SKIPPED
from .modifier import Modifier, evaluate
from .problem import Operands, Problem


class Places(NamedTuple):
    """What modifiers need to know of the slots of a block: see reference.Slots."""

    b: np.ndarray  # (*slots) int64, place in the batch
    h: np.ndarray  # (*slots) int64, query head
    kinds: np.ndarray | None  # (*slots, query blocks, key blocks): Operands.block_mask
    score_aux: tuple[np.ndarray, ...]
    mask_aux: tuple[np.ndarray, ...]

    def cut(self, at: Any) -> Places:
        """Return those of the slots `at`."""
        kinds = None if self.kinds is None else self.kinds[at]
        return self._replace(b=self.b[at], h=self.h[at], kinds=kinds)


def places(problem: Problem, operands: Operands, lead: tuple[int, ...]) -> Places | None:
    """Return the places of slots (*lead, heads_kv, group); None without modifiers."""
    if problem.variant.score_mod is None and problem.variant.mask_mod is None:
        return None
    slots = (*lead, problem.heads_kv, problem.group)
    b, h = (a.reshape(slots) for a in np.indices((problem.batch, problem.heads_q)))
    kinds = operands.block_mask
    if kinds is not None:
        kinds = kinds.reshape(slots + kinds.shape[2:])
    return Places(b, h, kinds, operands.score_aux, operands.mask_aux)


def modified_scores(
    problem: Problem, at: Places, s: np.ndarray, i: np.ndarray, j: np.ndarray
) -> np.ndarray | None:
    """Apply score_mod to scores (*slots, rows, keys) in place; return where it hides a key, if it
    can.
    """
    modifier = problem.variant.score_mod
    if modifier is None:
        return None
    s[...] = _run(problem, modifier, at, at.score_aux, i, j, s)
    return s == -np.inf


def score_slopes(
    problem: Problem, at: Places | None, s: np.ndarray, i: np.ndarray, j: np.ndarray
) -> np.ndarray | None:
    """Return the derivative of softcap and score_mod, where `s` is what score_mod gets; None for 1.

    (*slots, rows, keys), an array of its own.
    """
    slopes = None
    if problem.softcap:
        slopes = 1 - (s / problem.softcap) ** 2
    modifier = problem.variant.score_mod_grad
    if modifier is not None and at is not None:
        own = _run(problem, modifier, at, at.score_aux, i, j, s)
        slopes = np.broadcast_to(own, s.shape).copy() if slopes is None else slopes * own
    return slopes


def hidden_keys(problem: Problem, at: Places, i: np.ndarray, j: np.ndarray) -> np.ndarray | None:
    """Return where mask_mod hides keys j, consecutive, from rows i; None if nowhere.

    Bool that broadcasts to (*slots, rows, keys).
    """
    modifier = problem.variant.mask_mod
    if modifier is None or _is_full(problem, at.kinds, i, j):
        return None
    return np.atleast_2d(~_run(problem, modifier, at, at.mask_aux, i, j))


def key_blocks(
    problem: Problem, at: Places | None, rows: slice, keys: slice, block_n: int
) -> Iterator[slice]:
    """Cut `keys` into blocks of at most `block_n`, without those that the block mask skips."""
    for run in [keys] if at is None else _visited_runs(problem, at.kinds, rows, keys):
        for n_start in range(run.start, run.stop, block_n):
            yield slice(n_start, min(n_start + block_n, run.stop))


def _run(
    problem: Problem,
    modifier: Modifier,
    at: Places,
    aux: tuple[np.ndarray, ...],
    i: np.ndarray,
    j: np.ndarray,
    score: np.ndarray | None = None,
) -> Any:
    b, h = at.b[..., None, None], at.h[..., None, None]
    dtype = np.dtype(problem.variant.dtype)
    return evaluate(modifier, dtype, aux, b, h, i[:, None], j + problem.first_key, score)


def _is_full(problem: Problem, kinds: np.ndarray | None, i: np.ndarray, j: np.ndarray) -> bool:
    if kinds is None:
        return False
    m_blocks = np.unique(i // problem.block_mask_m)
    first, last = (j[[0, -1]] + problem.first_key) // problem.block_mask_n
    return bool((kinds[..., m_blocks, first : last + 1] == FULL).all())


def _visited_runs(
    problem: Problem, kinds: np.ndarray | None, rows: slice, keys: slice
) -> Iterator[slice]:
    """Yield the parts of `keys` that are not skipped for all slots and rows."""
    if kinds is None or keys.start >= keys.stop:
        yield keys
        return
    size, first_key = problem.block_mask_n, problem.first_key
    m_blocks = slice(
        rows.start // problem.block_mask_m, (rows.stop - 1) // problem.block_mask_m + 1
    )
    first = (keys.start + first_key) // size
    last = (keys.stop - 1 + first_key) // size
    visited = kinds[..., m_blocks, first : last + 1] != SKIPPED
    visited = visited.any(axis=tuple(range(visited.ndim - 1)))
    edges = np.flatnonzero(np.diff(visited, prepend=False, append=False)) + first
    for start, stop in (edges.reshape(-1, 2) * size - first_key).tolist():
        yield slice(max(start, keys.start), min(stop, keys.stop))
