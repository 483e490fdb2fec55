"""Dropout's random numbers in registers: the same as dropout.py's, which says what they are."""

from __future__ import annotations

from ...dropout import GOLDEN
from ..random import (
    FOLD_1,
    FOLD_2,
    FOLD_3,
    FOLD_4,
    MIX_1,
    MIX_2,
    SHIFT_1,
    SHIFT_2,
    SHIFT_3,
    TIMES_1,
    TIMES_2,
    TIMES_3,
)
from .mma import Emitter


def chained_key(e: Emitter, key, index):
    """dropout.chained() of 64-bit registers."""
    z = e.add(key, e.mul(e.add(index, 1), GOLDEN))
    for shift, factor in ((SHIFT_1, MIX_1), (SHIFT_2, MIX_2)):
        z = e.mul(e.xor(z, e.shr(z, int(shift))), int(factor))
    return e.xor(z, e.shr(z, int(SHIFT_3)))


def row_number(e: Emitter, key, low, high):
    """The number that dropout.kept() holds against its threshold; 32 bits. low, high: of the key of
    the row. key: index of the key, 32 bits.
    """
    x = e.add(key, low)
    x = e.add(e.mul(e.xor(x, e.shr(x, int(FOLD_1))), int(TIMES_1)), high)
    x = e.mul(e.xor(x, e.shr(x, int(FOLD_2))), int(TIMES_2))
    x = e.mul(e.xor(x, e.shr(x, int(FOLD_3))), int(TIMES_3))
    return e.xor(x, e.shr(x, int(FOLD_4)))
