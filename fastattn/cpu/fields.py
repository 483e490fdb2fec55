"""What kernels read of their Job (cpu/job.py)."""

from __future__ import annotations

from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from .job import FLOATS, OFFSET
from .simd import FLOAT, I64, jit, pointer_to


@intrinsic(prefer_literal=True)
def field(typingctx, job, name):
    """One field of the Job at this address, by name: float64 or int64."""
    is_float = name.literal_value in FLOATS
    kind, element = (types.float64, FLOAT["float64"]) if is_float else (types.int64, I64)

    def codegen(context, builder, sig, args):
        byte = ir.IntType(8).as_pointer()
        offset = ir.Constant(I64, OFFSET[name.literal_value])
        place = builder.gep(builder.bitcast(args[0], byte), [offset])
        return builder.load(builder.bitcast(place, element.as_pointer()))

    return kind(job, name), codegen


INTEGERS = pointer_to("int64")


@jit
def batch_offset(table, stride, b):
    """Elements from the start of an operand to batch b."""
    return INTEGERS(table)[b] if table != 0 else b * stride


@jit
def next_row(i, r, group):
    """(query, head in group) of the next row. Dividing for each costs 7 % at 128 keys."""
    last = r + 1 == group
    return (i + 1, 0) if last else (i, r + 1)
