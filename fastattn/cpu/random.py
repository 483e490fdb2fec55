"""Dropout's random numbers on registers: the same as dropout.py's, which says what they are."""

from __future__ import annotations

import functools

import numpy as np
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from ..dropout import GOLDEN
from .registers import I32, I64, Register, broadcast, constant, jit

STEP, MIX_1, MIX_2 = np.uint64(GOLDEN), np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
SHIFT_1, SHIFT_2, SHIFT_3 = np.uint64(30), np.uint64(27), np.uint64(31)


@jit
def row_key(head_key, i):
    """dropout.chained(head_key, i)."""
    z = np.uint64(head_key) + STEP * np.uint64(i + 1)
    z = (z ^ (z >> SHIFT_1)) * MIX_1
    z = (z ^ (z >> SHIFT_2)) * MIX_2
    return z ^ (z >> SHIFT_3)


@functools.cache
def kept(dtype: str, lanes: int):
    """Intrinsic: dropout.kept() for the keys j, j + 1, ...: register of truth values.

    key        uint64: the row's
    threshold  int64: numbers below it drop
    """
    register = Register("bool", dtype, lanes)

    def codegen(context, builder, sig, args):
        key, j, threshold = args
        vector = ir.VectorType(I32, lanes)

        def everywhere(value):
            return broadcast(builder, builder.trunc(value, I32), lanes)

        def fold(x, shift):
            return builder.xor(x, builder.lshr(x, constant(vector, shift)))

        def times(x, factor):
            return builder.mul(x, constant(vector, factor))

        steps = ir.Constant(vector, list(range(lanes)))
        x = builder.add(builder.add(everywhere(j), steps), everywhere(key))
        x = times(fold(x, 17), 0xED5AD4BB)
        x = builder.add(x, everywhere(builder.lshr(key, ir.Constant(I64, 32))))
        x = times(fold(x, 11), 0xAC4C1B51)
        x = times(fold(x, 15), 0x31848BAB)
        keep = builder.icmp_unsigned(">=", fold(x, 14), everywhere(threshold))
        return builder.sext(keep, register.vector)

    @intrinsic
    def run(typingctx, key, j, threshold):
        return register(types.uint64, types.int64, types.int64), codegen

    return run
