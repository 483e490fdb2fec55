"""What attention looks at, for those who inspect or evict: probabilities of chosen rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from .api import attention
from .arrays import integers
from .check import check
from .kinds import like, numpy_view
from .problem import Operands, Problem
from .signatures import passing_keywords_to

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

BLOCK_M = 256  # rows whose probabilities exist at once in attention_key_sums()
# Keywords of attention() that make no sense here.
FOREIGN = ("block_table", "return_lse", "out", "dropout_p", "dropout_seed", "precision", "backend")


@passing_keywords_to(attention, *FOREIGN)
def attention_weights(
    q: ArrayLike, k: ArrayLike, *, rows: Any = slice(None), **arguments: Any
) -> Any:
    """Return the probabilities of chosen query rows, softmax(scale * q[rows] @ k.T + bias).

    Parameters
    ----------
    q, k : as in attention()
    rows : slice, or ints (num_rows,); negative ones count from the end
    arguments : scale, causal, align, window, chunk, softcap, bias, mask, alibi, sinks, q_len,
        kv_len, kv_start, score_mod, mask_mod, aux and block_mask, as in attention(), with the
        shapes of all rows

    Returns
    -------
    weights : (..., heads_q, num_rows, seqlen_k), float64 for float64, else float32
        0 for keys that a row does not see. A row sums to 1, with sinks to less, or to 0 if it sees
        no key.

    Raises
    ------
    As attention().

    Notes
    -----
    Memory beyond the result is that of num_rows * seqlen_k scores.
    """

    def write(target: np.ndarray, inside: np.ndarray, weights: np.ndarray) -> None:
        target[..., inside, :] = weights

    # Here, and not at the top: importing fastattn loads no backend.
    from .probabilities import visit

    problem, operands = _checked(q, k, arguments)
    i = _indices(rows, problem.seqlen_q)
    result = _empty(problem, operands, len(i))
    visit(problem, operands, i, result, write)
    return _in_rank_of(q, k, result)


@passing_keywords_to(attention, *FOREIGN)
def attention_key_sums(
    q: ArrayLike, k: ArrayLike, *, rows: Any = slice(None), **arguments: Any
) -> Any:
    """Return attention_weights() summed over the rows: what each key gets from all of them.

    Parameters are those of attention_weights().

    Returns
    -------
    sums : (..., heads_q, seqlen_k), float64 for float64, else float32

    Notes
    -----
    Memory beyond the result is that of 256 * seqlen_k scores.
    """

    def write(target: np.ndarray, inside: np.ndarray, weights: np.ndarray) -> None:
        target[..., 0, :] += weights.sum(axis=-2)

    from .probabilities import visit

    problem, operands = _checked(q, k, arguments)
    i = _indices(rows, problem.seqlen_q)
    result = _empty(problem, operands, 1)
    for start in range(0, len(i), BLOCK_M):
        visit(problem, operands, i[start : start + BLOCK_M], result, write)
    return _in_rank_of(q, k, result[..., 0, :])


def _checked(q: Any, k: Any, arguments: dict[str, Any]) -> tuple[Problem, Operands]:
    k = numpy_view("k", k)
    return check(q, k, k[..., :0] if k.ndim else k, **arguments, fold=False)


def _indices(rows: Any, seqlen_q: int) -> np.ndarray:
    """Return the chosen rows as int64 from 0 to seqlen_q - 1."""
    if isinstance(rows, slice):
        return np.arange(seqlen_q)[rows]
    rule = "a slice or ints with one axis"
    i = integers("rows", rule, rows)
    if i.ndim != 1:
        raise ValueError(f"rows must be {rule}, got shape {i.shape}")
    if i.size and not -seqlen_q <= int(i.min()) <= int(i.max()) < seqlen_q:
        raise ValueError(f"rows must lie within the {seqlen_q} of q, got {i.min()} to {i.max()}")
    return np.arange(seqlen_q)[i]


def _empty(problem: Problem, operands: Operands, num_rows: int) -> np.ndarray:
    lead, seqlen_k = operands.q.shape[:-3], operands.k.shape[-2]
    return np.zeros((*lead, problem.heads_q, num_rows, seqlen_k), problem.variant.dtype)


def _in_rank_of(q: Any, k: Any, result: np.ndarray) -> Any:
    return like(q, result[0] if np.ndim(q) == np.ndim(k) == 2 else result)
