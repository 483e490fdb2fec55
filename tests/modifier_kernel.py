"""A kernel that runs one modifier on registers, for tests: what the forward kernel does with it."""

from __future__ import annotations

import numpy as np
import pytest

from fastattn.cpu import compile
from fastattn.cpu.job import aux_table
from fastattn.modifier import aux_arrays, aux_types
from fastattn.trace import trace

needs_kernels = pytest.mark.skipif(
    bool(compile.unavailable(("none",))), reason="no compiled kernels here"
)


def traced(function, argument, aux):
    """Return (modifier, arrays)."""
    arrays = aux_arrays(aux)
    return trace(function, argument, aux_types(arrays)), arrays


def builder(modifier, dtype):
    """Kernel builder; job is (scores, out, count, b, h, i, first j, aux table)."""

    def build(unit):
        from fastattn.cpu.memory import address, pointer_to
        from fastattn.cpu.modifiers import mask_mod, score_mod
        from fastattn.cpu.registers import ITEMSIZE
        from fastattn.cpu.simd import operations

        simd = operations(dtype, unit.lanes(ITEMSIZE[dtype]))
        load, store, where, lanes = simd.load, simd.store, simd.where, simd.lanes
        real, integers = pointer_to(dtype), pointer_to("int64")
        scores = modifier.argument == "score_mod"
        run = (score_mod if scores else mask_mod)(modifier, dtype, lanes)
        one, zero, scale = (getattr(np, dtype)(number) for number in (1, 0, 2))

        def apply(job, scratch, quota):
            f = integers(address(job))
            s, out = real(f[0]), real(f[1])
            for n in range(0, f[2], lanes):
                if scores:
                    # scaled first, as in the forward kernel
                    (x,) = run((load(s, n) * scale,), f[3], f[4], f[5], f[6] + n, f[7])
                    store(out, n, x)
                else:
                    store(out, n, where(run(f[3], f[4], f[5], f[6] + n, f[7]), one, zero))
            return 0

        return apply

    return build


def run_on_registers(modifier, dtype, aux, b, h, i, first_j, score):
    """Return the modifier's result for keys first_j, first_j + 1, ..., one for each score."""
    lanes = compile.host_target().unit.lanes(np.dtype(dtype).itemsize)
    count = -(-len(score) // lanes) * lanes
    s = np.zeros(count, dtype)
    s[: len(score)] = np.asarray(score, dtype) / 2
    out = np.full(count, np.nan, dtype)
    table = aux_table(aux)
    numbers = (s.ctypes.data, out.ctypes.data, count, b, h, i, first_j, table.ctypes.data)
    job = np.array(numbers, np.int64)
    kernel = compile.kernel(("test.modifier", modifier, dtype), builder(modifier, dtype))
    kernel(job.ctypes.data, 0, 1)
    result = out[: len(score)]
    return result if modifier.argument == "score_mod" else result == 1
