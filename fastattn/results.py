"""Memory for new results: that of a large one which nobody refers to any more serves the next.

The C library may hand such memory back to the system at once, and the next call then pays a page
fault for every 4 KiB that it writes (8 × 12 heads of 128 × 64: 3.05 ms for 2.35). Whether it does
depends on all that the process has ever freed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from math import prod
from typing import Any

import numpy as np

LEAST = 128 << 10  # bytes: smaller ones the C library keeps (M_TRIM_THRESHOLD)
KEPT = 32 << 20  # bytes kept at most, all threads together
LINE = 64  # bytes of a cache line, where results begin


class _Memory(np.ndarray):
    """Bytes. A class of their own, as NumPy would take plain ones for the base of a result."""


class _Block:
    """Memory of `nbytes` from the start of a line on."""

    __slots__ = ("memory", "nbytes", "start")

    def __init__(self, nbytes: int):
        self.memory = _Memory(nbytes + LINE, np.uint8)
        self.nbytes = nbytes
        self.start = -self.memory.__array_interface__["data"][0] % LINE


class _Loan(np.ndarray):
    """The base of a result: gone when no array, view or buffer refers to the result any more."""

    __slots__ = ("block",)  # no others, which might bring it back
    block: _Block
    base = None  # whoever goes from base to base to hold the last one must hold this

    def __del__(self, is_over: Callable[[], bool] = sys.is_finalizing) -> None:
        # A view of it has no block, and at the end of the process a module has no names.
        if hasattr(self, "block") and not is_over():
            _give_back(self.block)


_blocks: list[_Block] = []  # that serve no result, oldest first; each step on it is atomic


def maker(shape: tuple[int, ...], dtype: Any) -> Callable[[], np.ndarray]:
    """Return what makes one array after the other as empty() does, small ones in a third of the
    time.
    """
    nbytes = prod(shape) * np.dtype(dtype).itemsize
    return partial(empty if LEAST <= nbytes <= KEPT else np.empty, shape, dtype)


def empty(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Return an array without contents, in C order."""
    dtype = np.dtype(dtype)
    nbytes = prod(shape) * dtype.itemsize
    if not LEAST <= nbytes <= KEPT:
        return np.empty(shape, dtype)
    block = _take(nbytes) or _Block(nbytes)
    loan = _Loan(nbytes, np.uint8, buffer=block.memory, offset=block.start)
    loan.block = block
    return np.ndarray(shape, dtype, buffer=loan)


def _take(nbytes: int) -> _Block | None:
    """A block of this size that was given back, if there is one; the newest, which may be in a
    cache.
    """
    for block in reversed(_blocks.copy()):
        if block.nbytes == nbytes:
            try:
                _blocks.remove(block)
            except ValueError:  # another thread took it
                continue
            return block
    return None


def _give_back(block: _Block) -> None:
    """Keep it for the next result, and let go of the oldest where that is too much."""
    _blocks.append(block)
    while sum(b.nbytes for b in _blocks.copy()) > KEPT:
        try:
            del _blocks[0]
        except IndexError:  # another thread did
            return
