"""Functions on SIMD registers, for use in kernels: load, store, splat, fma, exp2, ..."""

from __future__ import annotations

import functools
from types import SimpleNamespace

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from .elementary import exp, exp2, half_erfc, tanh
from .registers import (
    I32,
    NUMBA,
    STORED,
    Register,
    as_register,
    broadcast,
    call,
    constant,
    from_storage,
    greater,
    less,
    load_some,
    load_vector,
    store_some,
    store_vector,
    to_storage,
)


@functools.cache
def operations(dtype: str, lanes: int) -> SimpleNamespace:
    """Functions on registers of `lanes` elements of dtype ("float32" or "float64"), for use in
    kernels.
    """
    made = SimpleNamespace(dtype=dtype, lanes=lanes, register=Register("float", dtype, lanes))
    for define in (_memory, _lanes, _arithmetic_operations, _selection):
        define(made)
    return made


def _memory(made) -> None:
    """load, store: unaligned. loader, storer (storage): with conversion to and from others.
    load_some, store_some: of the first lanes only, other lanes given or left alone.
    """
    register = made.register

    def loader(storage: str):
        stored = ir.VectorType(STORED[storage], register.lanes)

        @intrinsic
        def load(typingctx, pointer, index):
            def codegen(context, builder, sig, args):
                value = load_vector(builder, args[0], args[1], stored)
                return from_storage(builder, value, storage, register.dtype)

            return register(pointer, types.int64), codegen

        return load

    def storer(storage: str):
        @intrinsic
        def store(typingctx, pointer, index, value):
            def codegen(context, builder, sig, args):
                store_vector(builder, *args[:2], to_storage(builder, args[2], storage))
                return context.get_dummy_value()

            return types.void(pointer, types.int64, register), codegen

        return store

    @intrinsic
    def load_bytes(typingctx, pointer, index):
        """`lanes` truth values from as many bytes, non-zero is true."""

        def codegen(context, builder, sig, args):
            stored = ir.VectorType(ir.IntType(8), register.lanes)
            value = load_vector(builder, args[0], args[1], stored)
            return builder.sext(
                builder.icmp_unsigned("!=", value, constant(stored, 0)), register.of("bool").vector
            )

        return register.of("bool")(pointer, types.int64), codegen

    @intrinsic
    def load_first(typingctx, pointer, index, count, other):
        def codegen(context, builder, sig, args):
            return load_some(builder, *args)

        return register(pointer, types.int64, types.int64, register), codegen

    @intrinsic
    def store_first(typingctx, pointer, index, count, value):
        def codegen(context, builder, sig, args):
            store_some(builder, *args)
            return context.get_dummy_value()

        return types.void(pointer, types.int64, types.int64, register), codegen

    made.load_some, made.store_some = load_first, store_first
    made.loader, made.storer, made.load_bytes = loader, storer, load_bytes
    made.load, made.store = loader(register.dtype), storer(register.dtype)


def _lanes(made) -> None:
    """splat: a scalar in every lane. iota: start, start + 1, ... shuffle (places): those
    lanes of x and, behind them, y.    reduce_max, reduce_add: over the lanes.
    """
    register, integer = made.register, made.register.of("int")
    scalar = NUMBA[register.dtype]

    @intrinsic
    def splat(typingctx, value):
        return register(scalar), lambda c, b, s, args: broadcast(b, args[0], register.lanes)

    @intrinsic
    def iota(typingctx, start):
        def codegen(context, builder, sig, args):
            first = (
                builder.trunc(args[0], integer.vector.element)
                if made.dtype == "float32"
                else args[0]
            )
            steps = ir.Constant(integer.vector, list(range(register.lanes)))
            return builder.add(broadcast(builder, first, register.lanes), steps)

        return integer(types.int64), codegen

    def shuffle(places: list[int]):
        @intrinsic
        def pick(typingctx, x, y):
            def codegen(context, builder, sig, args):
                index = ir.Constant(ir.VectorType(I32, register.lanes), places)
                return builder.shuffle_vector(*args, index)

            return register(register, register), codegen

        return pick

    def reduction(combine):
        """Halve the register until one lane is left: a fixed order, so the same bits everywhere."""

        @intrinsic
        def reduce(typingctx, value):
            def codegen(context, builder, sig, args):
                value, width = args[0], register.lanes
                while width > 1:
                    width //= 2
                    index = ir.VectorType(I32, width)
                    low, high = (
                        builder.shuffle_vector(
                            value, value, ir.Constant(index, list(range(o, o + width)))
                        )
                        for o in (0, width)
                    )
                    value = combine(builder, low, high)
                return builder.extract_element(value, ir.Constant(I32, 0))

            return scalar(register), codegen

        return reduce

    made.splat, made.iota, made.shuffle = splat, iota, shuffle
    made.reduce_max, made.reduce_add = reduction(greater), reduction(lambda b, x, y: b.fadd(x, y))


def _arithmetic_operations(made) -> None:
    """fma(x, y, z) = x * y + z with one rounding; vmax, vmin (y where either is NaN); number_min
    (the other where one is NaN);
    fabs, sqrt, exp, exp2, tanh; half_erfc of a >= 0.
    """
    register = made.register

    def elementwise(count: int, emit):
        def codegen(context, builder, sig, args):
            return emit(builder, *args)

        types_ = [register] * count
        if count == 1:
            return intrinsic(lambda typingctx, x: (register(*types_), codegen))
        if count == 2:
            return intrinsic(lambda typingctx, x, y: (register(*types_), codegen))
        return intrinsic(lambda typingctx, x, y, z: (register(*types_), codegen))

    def of_some(emit):
        """On a tuple of registers, each step of `emit` for all of them before the next."""

        @intrinsic
        def run(typingctx, values):
            def codegen(context, builder, sig, args):
                some = cgutils.unpack_tuple(builder, args[0])
                return context.make_tuple(builder, values, emit(builder, some, made.dtype))

            return values(values), codegen

        return run

    made.fma = elementwise(3, lambda b, x, y, z: call(b, "fma", [x, y, z]))
    made.vmax, made.vmin = elementwise(2, greater), elementwise(2, less)
    made.number_min = elementwise(2, lambda b, x, y: call(b, "minnum", [x, y]))
    made.fabs = elementwise(1, lambda b, x: call(b, "fabs", [x]))
    made.sqrt = elementwise(1, lambda b, x: call(b, "sqrt", [x]))
    made.exp = elementwise(1, lambda b, x: exp(b, x, made.dtype))
    made.half_erfc = elementwise(1, lambda b, a: half_erfc(b, a, made.dtype))
    made.exp2 = elementwise(1, lambda b, x: exp2(b, [x], made.dtype)[0])
    made.tanh = elementwise(1, lambda b, x: tanh(b, [x], made.dtype)[0])
    made.exp2_of_some, made.tanh_of_some = of_some(exp2), of_some(tanh)


def _selection(made) -> None:
    """where(truth, x, y) on registers; some(truth): whether any lane is true."""
    register = made.register

    @intrinsic
    def some(typingctx, truth):
        def codegen(context, builder, sig, args):
            bits = builder.icmp_signed("<", args[0], constant(args[0].type, 0))
            number = ir.IntType(register.lanes)
            return builder.icmp_unsigned(
                "!=", builder.bitcast(bits, number), ir.Constant(number, 0)
            )

        return types.boolean(register.of("bool")), codegen

    @intrinsic
    def where(typingctx, truth, x, y):
        def codegen(context, builder, sig, args):
            truth = args[0]
            x, y = (
                as_register(context, builder, a, t, register)
                for a, t in zip(args[1:], sig.args[1:], strict=True)
            )
            return builder.select(builder.icmp_signed("<", truth, constant(truth.type, 0)), x, y)

        return register(truth, x, y), codegen

    made.where, made.some = where, some
