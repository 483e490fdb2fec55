"""The few words that plain Numba lacks on a GPU: memory by its address, and functions of a kernel.

Kernels take this module as an argument: the tests give them another one that does the same in
Python, so that Numba's simulator can run them.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from llvmlite import ir
from numba import cuda, types
from numba.cuda import libdevice
from numba.cuda.extending import intrinsic

I16, I32, I64 = ir.IntType(16), ir.IntType(32), ir.IntType(64)
ALL_LANES = 0xFFFFFFFF
GLOBAL = 1  # address space: ld.global, which is faster than a load from who knows where
# How a value is stored, and as what a kernel sees it.
MEMORY: dict[str, tuple[Any, Any]] = {
    "bool": (ir.IntType(8), types.boolean),
    "uint8": (ir.IntType(8), types.int64),
    "int32": (I32, types.int64),
    "int64": (I64, types.int64),
    "uint64": (I64, types.uint64),
    "float16": (ir.HalfType(), types.float32),
    "bfloat16": (I16, types.float32),
    "float32": (ir.FloatType(), types.float32),
    "float64": (ir.DoubleType(), types.float64),
}


def device(result: Any) -> Callable[[Callable], Callable]:
    """Decorator: a function that kernels call, of positional arguments, whose `result` is a type.

    Numba's own kind asks the present GPU what to compile it for; this one is compiled with its
    caller.
    """

    def decorate(function: Callable) -> Callable:
        def typing(context, *arguments):
            signature = result(*map(types.unliteral, arguments))

            def generate(target, builder, signature, values):
                return target.compile_internal(builder, function, signature, values)

            return signature, generate

        # Numba reads an intrinsic's signature; it must be as long as that of the function.
        given = list(inspect.signature(function).parameters.values())
        context = inspect.Parameter("typingctx", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        typing.__signature__ = inspect.Signature([context, *given])  # type: ignore[attr-defined]
        typing.__name__ = function.__name__
        return intrinsic(typing)

    return decorate


@functools.cache
def functions(dtype: str) -> SimpleNamespace:
    """exp, log, tanh, sqrt, floor and copysign of this dtype: NaN and infinities as in NumPy."""
    names = ("exp", "log", "tanh", "sqrt", "floor", "copysign")
    end = "f" if dtype == "float32" else ""
    return SimpleNamespace(**{name: getattr(libdevice, name + end) for name in names})


@functools.cache
def lane_xor(dtype: str) -> Callable:
    """Device function: lane_xor(x, mask) is x of the lane whose number differs in these bits. All
    lanes of a warp must come here.
    """

    @device(getattr(types, dtype))
    def of_lane(x, mask):
        return cuda.shfl_xor_sync(ALL_LANES, x, mask)

    return of_lane


@functools.cache
def load(name: str) -> Callable:
    """Intrinsic: load(address, index) is element `index` of an array of this dtype: a float for
    half types, an int64 for integers.
    """
    stored, seen = MEMORY[name]

    def generate(context, builder, signature, values):
        value = builder.load(_place(builder, stored, *values), align=_bytes(stored))
        return _seen(builder, name, value)

    @intrinsic
    def load_element(typingctx, address, index):
        return seen(types.int64, types.int64), generate

    return load_element


@functools.cache
def store(name: str) -> Callable:
    """Intrinsic: store(address, index, value), rounded to nearest even."""
    stored, seen = MEMORY[name]

    def generate(context, builder, signature, values):
        value = values[2]
        if name == "float16":
            value = builder.fptrunc(value, stored)
        elif name == "bfloat16":
            value = _as_bfloat16(builder, value)
        builder.store(value, _place(builder, stored, *values[:2]), align=_bytes(stored))
        return context.get_dummy_value()

    @intrinsic
    def store_element(typingctx, address, index, value):
        return types.void(types.int64, types.int64, seen), generate

    return store_element


def _place(builder, stored, address, index):
    pointer = builder.inttoptr(address, ir.PointerType(stored, addrspace=GLOBAL))
    return builder.gep(pointer, [index])


def _bytes(stored) -> int:
    sizes = {ir.HalfType(): 2, ir.FloatType(): 4, ir.DoubleType(): 8}
    return sizes[stored] if stored in sizes else stored.width // 8


def _seen(builder, name: str, value):
    """A stored value as kernels see it."""
    match name:
        case "bool":
            return builder.icmp_unsigned("!=", value, ir.Constant(value.type, 0))
        case "uint8":
            return builder.zext(value, I64)
        case "int32":
            return builder.sext(value, I64)
        case "float16":
            return builder.fpext(value, ir.FloatType())
        case "bfloat16":
            bits = builder.shl(builder.zext(value, I32), ir.Constant(I32, 16))
            return builder.bitcast(bits, ir.FloatType())
    return value


def _as_bfloat16(builder, value):
    """The upper half of a float32, rounded to nearest even; NaN stays NaN."""
    bits = builder.bitcast(value, I32)
    upper = builder.lshr(bits, ir.Constant(I32, 16))
    half = builder.add(ir.Constant(I32, 0x7FFF), builder.and_(upper, ir.Constant(I32, 1)))
    rounded = builder.lshr(builder.add(bits, half), ir.Constant(I32, 16))
    quiet = builder.or_(upper, ir.Constant(I32, 0x40))
    is_nan = builder.fcmp_unordered("uno", value, value)
    return builder.trunc(builder.select(is_nan, quiet, rounded), I16)
