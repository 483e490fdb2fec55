"""Where arrays lie, as a job has it: addresses, and strides in elements."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from ctypes import c_size_t
from functools import lru_cache
from typing import Any

import numpy as np

from .job import PARTS

_ABSENT = (0,) * len(PARTS)


def _reads_the_array() -> bool:
    """Whether an array's address stands behind the head of its object, as NumPy's C interface has
    it for compiled extensions, and as objects lie in CPython.
    """
    if sys.implementation.name != "cpython":
        return False
    arrays = (np.zeros(3), np.zeros((2, 3), np.int8)[1:, ::-1])
    return all(_word_at(id(a) + _HEAD).value == a.__array_interface__["data"][0] for a in arrays)


_HEAD = object.__basicsize__
_word_at = c_size_t.from_address
_QUICK = _reads_the_array()


def address(array: np.ndarray | None) -> int:
    """Where the first element lies; 0 for no array. The dictionary of the array interface costs
    1.05 us, five times a call; reading the object 0.18.
    """
    if array is None:
        return 0
    if _QUICK:
        return _word_at(id(array) + _HEAD).value
    return array.__array_interface__["data"][0]


def layout(array: np.ndarray | None, kept: list[np.ndarray]) -> tuple[int, ...]:
    """The job's fields of one operand, in the order of PARTS; a table of offsets, if it needs one,
    goes to `kept`.
    """
    if array is None:
        return _ABSENT
    if array.ndim < 5:
        return address(array), *_strides(array.strides, array.itemsize)
    table = _offsets(array.shape[:-3], [stride // array.itemsize for stride in array.strides[:-3]])
    kept.append(table)
    return address(array), address(table), 0, *_strides(array.strides[-3:], array.itemsize)[2:]


def layouts(arrays: Iterable[np.ndarray | None], packed: bool, kept: list[Any]) -> Iterator[int]:
    """The job's fields of operands. Packed ones have one batch entry, in which Operands.starts says
    where each member begins.
    """
    for array in arrays:
        place, table, batch, *rest = layout(array, kept)
        yield from (place, 0, 0, *rest) if packed else (place, table, batch, *rest)


@lru_cache(maxsize=1024)
def _strides(strides: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """(no table, batch, head, row, col) of up to four axes, in elements."""
    return 0, *[0] * (4 - len(strides)), *[stride // itemsize for stride in strides]


def _offsets(shape: tuple[int, ...], strides: list[int]) -> np.ndarray:
    """(batch,) int64: offset of each leading index, in C order."""
    offsets = np.zeros(1, np.int64)
    for length, stride in zip(shape, strides, strict=True):
        offsets = (offsets[:, None] + np.arange(length, dtype=np.int64) * stride).ravel()
    return offsets
