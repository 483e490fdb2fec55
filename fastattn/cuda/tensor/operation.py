"""From a function that emits instructions to one that Numba kernels call."""

from __future__ import annotations

import inspect

from numba.cuda import cgutils, types
from numba.cuda.extending import intrinsic

from ..job import FIELDS, FLOATS, Job
from .mma import Emitter

f32, u32, i32, i64 = types.float32, types.uint32, types.int32, types.int64
boolean, void = types.boolean, types.void
JOB = types.NamedTuple([types.float64 if name in FLOATS else i64 for name in FIELDS], Job)


def floats(count: int):
    """A fragment: so many float32 registers of a thread."""
    return types.UniTuple(f32, count)


def words(count: int):
    """A fragment of 32-bit registers, each two storage elements."""
    return types.UniTuple(u32, count)


def operation(storage: str, returns, *arguments):
    """Decorator: body(emitter, *values) becomes a function for kernels.

    Tuples are lists of values to the body, also in what it returns; a tuple of tuples is a list of
    lists.
    """

    def decorate(body):
        def generate(context, builder, signature, args):
            values = [
                cgutils.unpack_tuple(builder, value) if isinstance(kind, types.BaseTuple) else value
                for kind, value in zip(signature.args, args, strict=True)
            ]
            result = body(Emitter(builder, storage, context), *values)
            if signature.return_type == void:
                return context.get_dummy_value()
            return _assemble(context, builder, signature.return_type, result)

        def typed(context, *given):
            return returns(*arguments), generate

        # Numba wants to see how many there are.
        names = ["context", *(f"argument_{i}" for i in range(len(arguments)))]
        positional = inspect.Parameter.POSITIONAL_OR_KEYWORD
        parameters = [inspect.Parameter(name, positional) for name in names]
        typed.__signature__ = inspect.Signature(parameters)
        typed.__name__ = body.__name__
        return intrinsic(typed)

    return decorate


def _assemble(context, builder, kind, result):
    """Lists of LLVM values -> Numba's tuples."""
    if not isinstance(kind, types.BaseTuple):
        return result
    parts = [_assemble(context, builder, k, r) for k, r in zip(kind, result, strict=True)]
    return context.make_tuple(builder, kind, parts)
