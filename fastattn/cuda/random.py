"""Dropout's random numbers for one thread: the same as dropout.py's, which says what they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import types

from ..dropout import GOLDEN

U8 = np.uint64
STEP, MIX_1, MIX_2 = U8(GOLDEN), U8(0xBF58476D1CE4E5B9), U8(0x94D049BB133111EB)
SHIFT_1, SHIFT_2, SHIFT_3, HALF = U8(30), U8(27), U8(31), U8(32)
# Of 32-bit numbers: in 64 bits, no product overflows.
LOW = U8(0xFFFFFFFF)
FOLD_1, FOLD_2, FOLD_3, FOLD_4 = U8(17), U8(11), U8(15), U8(14)
TIMES_1, TIMES_2, TIMES_3 = U8(0xED5AD4BB), U8(0xAC4C1B51), U8(0x31848BAB)


def chained(words: Any) -> Callable:
    """Device function: dropout.chained(key, index)."""

    @words.device(types.uint64)
    def chained_key(key, index):
        z = key + STEP * np.uint64(index + 1)
        z = (z ^ (z >> SHIFT_1)) * MIX_1
        z = (z ^ (z >> SHIFT_2)) * MIX_2
        return z ^ (z >> SHIFT_3)

    return chained_key


def kept(words: Any) -> Callable:
    """Device function: whether dropout.kept() of a row's key, key index j and threshold."""

    @words.device(types.boolean)
    def is_kept(key, j, threshold):
        x = (np.uint64(j) + key) & LOW
        x = ((x ^ (x >> FOLD_1)) * TIMES_1) & LOW
        x = (x + (key >> HALF)) & LOW
        x = ((x ^ (x >> FOLD_2)) * TIMES_2) & LOW
        x = ((x ^ (x >> FOLD_3)) * TIMES_3) & LOW
        return x ^ (x >> FOLD_4) >= np.uint64(threshold)

    return is_kept
