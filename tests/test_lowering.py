"""Operators on two numbers, of one type or of two, as the lowering of kernels has them."""

from __future__ import annotations

import itertools
import operator

import numpy as np
import pytest
from kernels import machines, run

pytest.importorskip("numba")
TYPES = ("int32", "int64", "float32", "float64")
OF_ALL = ("add", "sub", "mul", "truediv", "lt", "le", "gt", "ge", "eq", "ne")
OF_INTS = ("floordiv", "mod", "and_", "or_", "xor", "lshift", "rshift")


def all_results(left, right):
    """Kernel: what operators make of two numbers, of one and a literal, and of one in a loop that
    changes its type.
    """
    from fastattn.cpu.memory import pointer_to

    a, b, real = pointer_to(left), pointer_to(right), pointer_to("float64")
    of_ints = left.startswith("int") and right.startswith("int")

    def build(unit):
        from fastattn.cpu.registers import jit

        @jit
        def body(job):
            x, y, out = a(job[0])[0], b(job[1])[0], real(job[2])
            out[0], out[1], out[2], out[3] = x + y, x - y, x * y, x / y
            out[4], out[5], out[6], out[7] = x < y, x <= y, x > y, x >= y
            out[8], out[9] = x == y, x != y
            out[10], out[11], out[12], out[13] = x - 3, 3 - y, x - 0.5, 0.5 - y
            total = x
            for _ in range(job[3]):
                total = total * 2 - y
            out[14] = total
            if of_ints:
                out[15], out[16] = x // y, x % y
                out[17], out[18], out[19], out[20], out[21] = x & y, x | y, x ^ y, x << y, x >> y

        return body

    return build


@pytest.mark.parametrize("machine", machines()[:1], ids=str)
@pytest.mark.parametrize(("left", "right"), list(itertools.product(TYPES, TYPES)))
def test_operators_on_numbers_of_any_types(machine, left, right):
    """All results are exact, so that Python's are theirs."""
    for x, y in ((7, 2), (-7, 2), (3, 3)):
        out = np.full(22, np.nan)
        arrays = np.array([x], left), np.array([y], right), out
        run(machine, f"operators {left} {right}", all_results(left, right), *arrays, 2)
        expected = [getattr(operator, name)(x, y) for name in OF_ALL]
        expected += [x - 3, 3 - y, x - 0.5, 0.5 - y, 4 * x - 3 * y]
        if "float" not in left + right:
            expected += [getattr(operator, name)(x, y) for name in OF_INTS]
        np.testing.assert_array_equal(out[: len(expected)], expected)
