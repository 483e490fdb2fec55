"""The same call again: what check() and plan() find out is kept by the layout of the arrays.

A model makes the same call thousands of times, layer after layer, and a small one spends more time
on its arguments than on its numbers. Kept are calls of plain arrays on the cpu backend without
options that are arrays; all others take the long way each time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from . import guards
from .cpu.threads import get_num_threads
from .problem import Operands, Plan

if TYPE_CHECKING:
    from .cpu.run import Repeat

Key = tuple[Any, ...]
SCALARS = {type(None), bool, int, float, str}
MOST = 512  # calls to keep
_known: dict[Key, Repeat] = {}


def key_of(arrays: tuple[Any, ...], options: tuple[Any, ...], window: Any) -> Key | None:
    """What a call depends on besides addresses; None if it is not to be kept.

    options: its other arguments, which must be scalars. Equal ones of other types (1 and True) are
    not the same argument, so their types are part of the key.
    """
    if type(window) is not tuple or guards.ON:
        return None
    options += window
    kinds = tuple(map(type, options))
    if not SCALARS.issuperset(kinds):
        return None
    key: Key = (get_num_threads(), options, kinds)
    for a in arrays:
        if type(a) is not np.ndarray:
            return None
        key += (a.dtype, a.shape, a.strides)
    return key


def find(key: Key | None) -> Repeat | None:
    """The call of this key, if it has been made before."""
    return _known.get(key) if key is not None else None


def keep(
    key: Key, arrays: tuple[np.ndarray, ...], plan: Plan, operands: Operands, shape: tuple[int, ...]
) -> None:
    """Keep a call that has been answered by a result of `shape`, unless check() copied an array."""
    if plan.backend != "cpu" or operands.ranges is not None or operands.out.ndim > 4:
        return
    from .cpu.layout import address
    from .cpu.run import Repeat

    views = (operands.q, operands.k, operands.v)
    if any(address(view) != address(a) for view, a in zip(views, arrays, strict=True)):
        return
    if len(_known) >= MOST:
        forget()
    _known[key] = Repeat(plan, operands, shape)


def forget() -> None:
    """Keep no calls."""
    _known.clear()
