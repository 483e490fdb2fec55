"""Which arrays copies of whole tiles can read, and how they see them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from ..cpu.layout import address
from ..problem import Operands
from .job import TensorMap
from .tensor.tilings import Tiling

SETTING = "FASTATTN_WGMMA"
AXES = 4  # columns, rows, heads, batch entries
STRIDE_UNIT, STRIDE_LIMIT = 16, 1 << 40  # bytes
_wanted = os.environ.get(SETTING, "") not in ("", "0")


@contextmanager
def wgmma(wanted: bool) -> Iterator[None]:
    """Calls within may use the kernel that reads maps, or not, whatever the environment says."""
    global _wanted
    before, _wanted = _wanted, wanted
    try:
        yield
    finally:
        _wanted = before


def why_none(arrays: tuple[np.ndarray, ...], copied: bool) -> str:
    """Why there are no maps of arrays, whose rows are whole chunks of 16 aligned bytes; "" if there
    are. copied: it is copies in C order that are read.
    """
    if not _wanted:
        return f"no wgmma, which no GPU has tried yet: {SETTING}=1 allows it"
    if not all(_can_map(array, copied) for array in arrays):
        return "no wgmma: no tensor map has such axes or strides"
    return ""


def _can_map(array: np.ndarray, copied: bool) -> bool:
    *outer, rows = zip(array.shape[:-1], array.strides[:-1], strict=True)
    if array.ndim > AXES or not array.size or (rows[0] > 1 and not rows[1]):
        return False
    return copied or all(0 <= step < STRIDE_LIMIT for size, step in (*outer, rows) if size > 1)


def maps_of(operands: Operands, tiling: Tiling) -> tuple[TensorMap, TensorMap, TensorMap]:
    """Of q, k and v."""
    return (
        _map_of(operands.q, tiling.storage, tiling.block_m),
        _map_of(operands.k, tiling.storage, tiling.block_n),
        _map_of(operands.v, tiling.storage, tiling.block_n),
    )


def _map_of(array: np.ndarray, storage: str, rows: int) -> TensorMap:
    sizes, strides = [1] * AXES, [STRIDE_UNIT] * AXES
    for axis, (size, step) in enumerate(zip(array.shape[::-1], array.strides[::-1], strict=True)):
        if step and size > 1:  # else it has one place, whatever its stride
            sizes[axis], strides[axis] = size, step
    sizes[0] = array.shape[-1]
    place, columns, rest = address(array), sizes[0], sizes[1:]
    return TensorMap(place, storage, (columns, *rest), tuple(strides[1:]), rows)  # type: ignore
