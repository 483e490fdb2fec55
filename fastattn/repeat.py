"""The same call again: what check() and plan() find out is kept by the layout of the arrays.

A model makes the same call thousands of times, layer after layer, and a small one spends more time
on its arguments than on its numbers. Kept are calls of plain arrays on the cpu backend whose other
arrays are mask and bias, and slopes, sinks, lengths and pages of each batch entry, which are looked
at each time; all others take the long way.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from . import guards
from .arguments import Lengths, lengths_of
from .arrays import sinks_of, slopes_of
from .cpu.threads import get_num_threads
from .paging import places_of, table_of
from .problem import Operands, Others, Plan

if TYPE_CHECKING:
    from .cpu.run import Repeat

Key = tuple[Any, ...]
SCALARS = {type(None), bool, int, float, str}
MOST = 512  # calls to keep
NO_LENGTHS = Lengths()  # of calls without lengths and pages, whatever their align
_known: dict[Key | None, Repeat] = {}


def key_of(
    arrays: tuple[Any, ...], options: tuple[Any, ...], window: Any, lengths: Lengths = NO_LENGTHS
) -> Key | None:
    """What a call depends on besides addresses and lengths; None if it is not to be kept.

    arrays: q, k and v in the memory of the CPU, or these with mask and bias, or with mask, bias,
    out, alibi and sinks; all but the first three may be None.
    options: its other arguments, which must be scalars.
    """
    if type(window) is not tuple or guards.ON:
        return None
    try:
        token = token_of(*options, *window)
    except Exception:  # no scalar: it may have no hash, or one that raises
        return None
    kind = None if lengths is NO_LENGTHS else lengths.block_table is not None
    key = [kind, get_num_threads(), token]
    for a in arrays:
        if type(a) is np.ndarray:
            key += (a.dtype, a.shape, a.strides)
        elif a is None:
            key.append(None)
        else:
            return None
    return tuple(key)


@lru_cache(MOST, typed=True)
def token_of(*options: Any) -> object:
    """The same object for the same options, at a third of what hashing their types as well takes.
    Equal ones of other types (1 and True) are not the same.

    Raises
    ------
    TypeError  they are not all scalars
    """
    if not SCALARS.issuperset(map(type, options)):
        raise TypeError("options must be scalars")
    return object()


def find(key: Key | None) -> Repeat | None:
    """The call of this key, if it has been made before."""
    return _known.get(key)  # None is no key


def others_of(
    known: Repeat,
    k: np.ndarray,
    lengths: Lengths,
    alibi: Any = None,
    sinks: Any = None,
) -> Others | None:
    """What a call like one that was made before has of them; None if it wants another plan. Errors
    are those of check().
    """
    problem, ranges, table = known.problem, None, None
    if lengths.block_table is not None:
        table = table_of(lengths.block_table)
        if table.shape[:-1] != known.lead:
            return None
        ranges, table, keys = places_of(table, k.shape[::2], known.lead, problem.seqlen_q, lengths)
        if keys != problem.seqlen_k:
            return None
    elif lengths is not NO_LENGTHS:
        ranges, *_ = lengths_of(known.lead, problem.seqlen_q, k.shape[-2], lengths, True)
        if ranges is None:
            return None
    if alibi is not None:
        slopes = slopes_of(alibi, known.lead, problem.heads_q, problem.variant.dtype)
        alibi = np.ascontiguousarray(slopes)
    if sinks is not None:
        sinks = sinks_of(sinks, problem.heads_q, problem.variant.dtype)
    return Others(ranges, table, alibi, sinks)


def answer(
    key: Key | None,
    arrays: tuple[Any, ...],
    lengths: Lengths = NO_LENGTHS,
    out: np.ndarray | None = None,
    alibi: Any = None,
    sinks: Any = None,
) -> tuple[np.ndarray, np.ndarray | None] | None:
    """(out, lse or None) of a call, if one like it has been made before and `out`, if given, may be
    written to. Errors are those of check().
    """
    known = _known.get(key)
    if known is None:
        return None
    if out is not None and not (out.flags.writeable and _is_apart(out, arrays)):
        return None
    if lengths is NO_LENGTHS and alibi is sinks is None:
        return known.run(arrays, out)
    others = others_of(known, arrays[1], lengths, alibi, sinks)
    return None if others is None else known.run(arrays, out, others)


def _is_apart(out: np.ndarray, arrays: tuple[np.ndarray | None, ...]) -> bool:
    """Whether the memory of `out` surely is that of no other: check() looks closer."""
    return not any(a is not None and np.may_share_memory(out, a) for a in arrays)


def keep(
    key: Key | None,
    arrays: tuple[Any, ...],
    plan: Plan | None,
    operands: Operands,
    shape: tuple[int, ...],
) -> None:
    """Keep a call that has been answered by a result of `shape`, if it is to be kept and needed a
    plan, unless check() copied an array or made views of the keys that its lengths name.
    """
    if key is None or plan is None or plan.backend != "cpu" or operands.out.ndim > 4:
        return
    if (key[0] is None) != (operands.ranges is None):
        return
    from .cpu.layout import address
    from .cpu.run import Repeat

    views = (operands.q, operands.k, operands.v, operands.mask, operands.bias)
    if any(address(view) != address(a) for view, a in zip(views, arrays, strict=False)):
        return
    if len(_known) >= MOST:
        forget()
    _known[key] = Repeat(plan, operands, shape)


def forget() -> None:
    """Keep no calls."""
    _known.clear()
