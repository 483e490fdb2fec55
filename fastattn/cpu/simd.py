"""SIMD registers as Numba types: one value is `lanes` floats, integers or truth values of one
width.

Operators (+ - * / < <= > >= == != & |) work lane by lane and take a scalar on either side.
`operations(dtype, lanes)` gives the functions that need to know the width: load, store, splat, fma,
exp2, ... Nothing here is compiled with fast-math flags: every rounding is written down, so that
results do not depend on the optimiser (exp2 needs that to be right at all).
"""

from __future__ import annotations

import functools
import operator
from types import SimpleNamespace

import numpy as np
from llvmlite import ir
from numba import njit
from numba.core import cgutils, types
from numba.core.datamodel import PrimitiveModel, register_default
from numba.core.typing.templates import AbstractTemplate, infer_global, signature
from numba.extending import intrinsic, lower_builtin

# Serial helpers of a kernel: no exceptions, no reference counts, no wrapper for Python.
jit = njit(error_model="numpy", _nrt=False, no_cpython_wrapper=True, no_cfunc_wrapper=True)

I32 = ir.IntType(32)
I64 = ir.IntType(64)
FLOAT = {"float16": ir.HalfType(), "float32": ir.FloatType(), "float64": ir.DoubleType()}
# A truth value is an integer lane, 0 or -1, as wide as the floats beside it: <n x i1> variables
# would be packed to bits.
INTEGER = {"float32": I32, "float64": I64}
SUFFIX = {"float32": "f32", "float64": "f64"}
NUMBA = {name: getattr(types, name) for name in ("float16", "float32", "float64")}
ITEMSIZE = {"float16": 2, "float32": 4, "float64": 8}

# 2**f on [-0.5, 0.5], c0 = 1 first: minimax for the relative error. float32: 1.9e-9, with all
# roundings 0.78 units in the last place (degree 5: 2.2). float64: 1.8e-17.
EXP2 = {
    "float32": (
        1.0,
        0.693147205353,
        0.240226468773,
        0.0555032877392,
        0.00961848895119,
        0.0013399931202,
        0.000153458121502,
    ),
    "float64": (
        1.0,
        0.69314718055994569674,
        0.24022650695910098005,
        0.055504108664790394416,
        0.0096181291076070031424,
        0.0013333558153440146583,
        0.00015403530441570921656,
        0.000015252727384904345291,
        1.3215442676018958221e-6,
        1.0180647819097343259e-7,
        7.0725702852034320582e-9,
        4.0780431016122749145e-10,
    ),
}
# (mantissa bits, exponent bias): adding 1.5 * 2**bits + bias to x leaves round(x) + bias in the low
# bits of the sum.
FORMAT = {"float32": (23, 127), "float64": (52, 1023)}


class Register(types.Type):
    """A SIMD register: kind "float" (of dtype), "int" or "bool" (integers as wide as dtype)."""

    def __init__(self, kind: str, dtype: str, lanes: int):
        self.kind, self.dtype, self.lanes = kind, dtype, lanes
        super().__init__(f"Register({kind}, {dtype} x {lanes})")

    def of(self, kind: str) -> Register:
        """The register type of another kind that lies beside this one."""
        return Register(kind, self.dtype, self.lanes)

    @property
    def vector(self) -> ir.VectorType:
        element = FLOAT[self.dtype] if self.kind == "float" else INTEGER[self.dtype]
        return ir.VectorType(element, self.lanes)


@register_default(Register)
class RegisterModel(PrimitiveModel):
    def __init__(self, manager, register):
        super().__init__(manager, register, register.vector)


def constant(vector: ir.VectorType, value) -> ir.Constant:
    """The same value in every lane."""
    return ir.Constant(vector, [value] * vector.count)


def broadcast(builder, scalar, lanes: int):
    """LLVM value: a scalar in every lane."""
    undefined = ir.Constant(ir.VectorType(scalar.type, lanes), ir.Undefined)
    first = builder.insert_element(undefined, scalar, ir.Constant(I32, 0))
    return builder.shuffle_vector(first, undefined, constant(ir.VectorType(I32, lanes), 0))


def call(builder, name: str, args: list):
    """Call an LLVM intrinsic whose arguments and result have one type, e.g. llvm.fma.v8f32."""
    kind = args[0].type
    element = kind.element if isinstance(kind, ir.VectorType) else kind
    suffix = {ir.FloatType(): "f32", ir.DoubleType(): "f64"}[element]
    if isinstance(kind, ir.VectorType):
        suffix = f"v{kind.count}{suffix}"
    function = ir.FunctionType(kind, [kind] * len(args))
    return builder.call(
        cgutils.get_or_insert_function(builder.module, function, f"llvm.{name}.{suffix}"), args
    )


def load_vector(builder, pointer, index, vector: ir.VectorType):
    """LLVM value: `vector.count` elements at pointer[index:], aligned as an element is."""
    place = builder.bitcast(builder.gep(pointer, [index]), vector.as_pointer())
    return builder.load(place, align=element_bytes(vector))


def store_vector(builder, pointer, index, value) -> None:
    """pointer[index:index + lanes] = value."""
    place = builder.bitcast(builder.gep(pointer, [index]), value.type.as_pointer())
    builder.store(value, place, align=element_bytes(value.type))


def element_bytes(vector: ir.VectorType) -> int:
    """Size of one lane."""
    sizes = {ir.FloatType(): 4, ir.DoubleType(): 8, ir.HalfType(): 2}
    element = vector.element
    return element.width // 8 if isinstance(element, ir.IntType) else sizes[element]


# Operators. The result's kind follows from the operands' kinds, as in NumPy: float with int is
# float.


def _kind(ty) -> str | None:
    if isinstance(ty, Register):
        return ty.kind
    if isinstance(ty, types.Boolean):
        return "bool"
    if isinstance(ty, types.Float):
        return "float"
    return "int" if isinstance(ty, types.Integer) else None


def _as_register(context, builder, value, ty, register: Register):
    """LLVM value of a register or scalar, converted to this register type."""
    if isinstance(ty, Register):
        same = ty.kind == register.kind
        return value if same else builder.sitofp(value, register.vector)
    if register.kind == "float":
        value = context.cast(builder, value, ty, NUMBA[register.dtype])
    elif register.kind == "int":
        value = context.cast(
            builder, value, ty, getattr(types, f"int{register.vector.element.width}")
        )
    else:
        value = builder.sext(builder.trunc(value, ir.IntType(1)), register.vector.element)
    return broadcast(builder, value, register.lanes)


def _number(kinds):
    return None if "bool" in kinds else ("float" if "float" in kinds else "int",) * 2


def _comparison(kinds):
    number = _number(kinds)
    return number and (number[0], "bool")


def _logic(kinds):
    return ("bool", "bool") if set(kinds) == {"bool"} else None


def _binary(op, rule, emit) -> None:
    """Define op on registers. rule(kinds) -> (kind to compute in, kind of the result);
    emit(builder, x, y, kind).
    """

    def resolve(args):
        registers = [a for a in args if isinstance(a, Register)]
        kinds = [_kind(a) for a in args]
        if not registers or None in kinds or rule(kinds) is None:
            return None
        operand, result = rule(kinds)
        return registers[0].of(operand), registers[0].of(result)

    @infer_global(op)
    class Template(AbstractTemplate):
        def generic(self, args, kws):
            found = resolve(args) if len(args) == 2 else None
            return found and signature(found[1], *args)

    def lower(context, builder, sig, args):
        operand, _ = resolve(sig.args)
        x, y = (
            _as_register(context, builder, a, t, operand)
            for a, t in zip(args, sig.args, strict=True)
        )
        return emit(builder, x, y, operand.kind)

    for left, right in ((Register, Register), (Register, types.Any), (types.Any, Register)):
        lower_builtin(op, left, right)(lower)


def _arithmetic(float_name, int_name):
    return lambda builder, x, y, kind: getattr(
        builder, float_name if kind == "float" else int_name
    )(x, y)


def _compare(sign):
    def emit(builder, x, y, kind):
        if kind == "int":
            bits = builder.icmp_signed(sign, x, y)
        else:  # NaN differs from everything, itself included, as in NumPy
            bits = (builder.fcmp_unordered if sign == "!=" else builder.fcmp_ordered)(sign, x, y)
        wide = INTEGER[{4: "float32", 8: "float64"}[element_bytes(x.type)]]
        return builder.sext(bits, ir.VectorType(wide, x.type.count))

    return emit


for _op, _names in (
    (operator.add, ("fadd", "add")),
    (operator.sub, ("fsub", "sub")),
    (operator.mul, ("fmul", "mul")),
):
    _binary(_op, _number, _arithmetic(*_names))
for _op, _sign in (
    (operator.lt, "<"),
    (operator.le, "<="),
    (operator.gt, ">"),
    (operator.ge, ">="),
    (operator.eq, "=="),
    (operator.ne, "!="),
):
    _binary(_op, _comparison, _compare(_sign))
_binary(
    operator.truediv,
    lambda kinds: _number(kinds) and ("float", "float"),
    _arithmetic("fdiv", "fdiv"),
)
_binary(operator.and_, _logic, lambda builder, x, y, kind: builder.and_(x, y))
_binary(operator.or_, _logic, lambda builder, x, y, kind: builder.or_(x, y))


# Pointers. Kernels see memory as typed pointers and offsets in elements.


@intrinsic
def at(typingctx, pointer, index):
    """pointer + index elements."""
    return pointer(pointer, types.int64), lambda c, b, s, args: b.gep(args[0], [args[1]])


@intrinsic
def address(typingctx, pointer):
    """A pointer as an address (int64)."""
    return types.int64(pointer), lambda c, b, s, args: b.ptrtoint(args[0], I64)


class Storage(types.Opaque):
    """A float type that memory may hold but Numba's CPU target cannot compute with."""


@register_default(Storage)
class StorageModel(PrimitiveModel):
    def __init__(self, manager, storage):
        super().__init__(manager, storage, FLOAT[storage.name])


@functools.cache
def pointer_to(dtype: str):
    """Intrinsic: an address (int64) as a pointer to dtype."""
    special = {"bool": types.uint8, "float16": Storage("float16")}
    pointer = types.CPointer(special.get(dtype) or getattr(types, dtype))

    @intrinsic
    def cast(typingctx, address):
        return pointer(types.int64), lambda c, b, s, args: b.inttoptr(
            args[0], c.get_value_type(pointer)
        )

    return cast


@intrinsic
def prefetch(typingctx, pointer, index):
    """Ask for the line of pointer[index], to be in the level-2 cache soon. Any address will do.

    Asking for it in level 1 holds up the loads that follow: 0.45 of the read bandwidth, not 0.65.
    """

    def codegen(context, builder, sig, args):
        byte = ir.IntType(8).as_pointer()
        place = builder.bitcast(builder.gep(args[0], [args[1]]), byte)
        kind = ir.FunctionType(ir.VoidType(), [byte, I32, I32, I32])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        to_read, level_2, data = (ir.Constant(I32, n) for n in (0, 2, 1))
        builder.call(function, [place, to_read, level_2, data])
        return context.get_dummy_value()

    return types.void(pointer, types.int64), codegen


@intrinsic
def fetch_add(typingctx, pointer, value):
    """Add to *pointer atomically; return what it held before."""

    def codegen(context, builder, sig, args):
        return builder.atomic_rmw("add", args[0], args[1], "monotonic")

    return types.int64(types.CPointer(types.int64), types.int64), codegen


def convert(builder, value, to):
    """LLVM value: floats (scalar or register) of another width. What is finite stays so, as the
    nearest finite number.
    """
    rank = {ir.HalfType(): 0, ir.FloatType(): 1, ir.DoubleType(): 2}
    old, new = (rank[getattr(kind, "element", kind)] for kind in (value.type, to))
    if old == new:
        return value
    if old < new:
        return builder.fpext(value, to)
    limit = {ir.FloatType(): np.finfo(np.float32).max}[getattr(to, "element", to)]

    def same(number):
        vector = isinstance(value.type, ir.VectorType)
        return constant(value.type, number) if vector else ir.Constant(value.type, number)

    bounded = _less(builder, same(float(limit)), _greater(builder, same(-float(limit)), value))
    infinite = builder.fcmp_ordered("==", call(builder, "fabs", [value]), same(np.inf))
    return builder.fptrunc(builder.select(infinite, value, bounded), to)


@functools.cache
def element_loader(storage: str, dtype: str):
    """Intrinsic: pointer[index], stored as one float type, as another."""

    @intrinsic
    def load(typingctx, pointer, index):
        def codegen(context, builder, sig, args):
            return convert(builder, builder.load(builder.gep(args[0], [args[1]])), FLOAT[dtype])

        return NUMBA[dtype](pointer, types.int64), codegen

    return load


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
    """load, store: unaligned. loader(storage): load with conversion from another float type."""
    register = made.register

    def loader(storage: str):
        stored = ir.VectorType(FLOAT[storage], register.lanes)

        @intrinsic
        def load(typingctx, pointer, index):
            def codegen(context, builder, sig, args):
                return convert(
                    builder, load_vector(builder, args[0], args[1], stored), register.vector
                )

            return register(pointer, types.int64), codegen

        return load

    @intrinsic
    def store(typingctx, pointer, index, value):
        def codegen(context, builder, sig, args):
            store_vector(builder, *args)
            return context.get_dummy_value()

        return types.void(pointer, types.int64, register), codegen

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

    made.loader, made.load, made.store, made.load_bytes = (
        loader,
        loader(register.dtype),
        store,
        load_bytes,
    )


def _lanes(made) -> None:
    """splat: a scalar in every lane. iota: start, start + 1, ... reduce_max, reduce_add: over the
    lanes.
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

    made.splat, made.iota = splat, iota
    made.reduce_max, made.reduce_add = reduction(_greater), reduction(lambda b, x, y: b.fadd(x, y))


def _greater(builder, x, y):
    """x > y ? x : y, one instruction: y where either is NaN."""
    return builder.select(builder.fcmp_ordered(">", x, y), x, y)


def _less(builder, x, y):
    """x < y ? x : y, one instruction: y where either is NaN."""
    return builder.select(builder.fcmp_ordered("<", x, y), x, y)


def _arithmetic_operations(made) -> None:
    """fma(x, y, z) = x * y + z with one rounding; vmax, vmin (y where either is NaN); exp2."""
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

    made.fma = elementwise(3, lambda b, x, y, z: call(b, "fma", [x, y, z]))
    made.vmax, made.vmin = elementwise(2, _greater), elementwise(2, _less)
    made.exp2 = elementwise(1, lambda b, x: exp2(b, x, made.dtype))


def exp2(builder, x, dtype: str):
    """LLVM value: 2**x for x <= 0 (and a little above), 0 below 2**(1 - bias), NaN for NaN.

    x is split into an integer n and a fraction f in [-0.5, 0.5] by adding 1.5 * 2**bits: the sum's
    low bits hold n. The same addition puts the exponent's bias there, so that a shift makes the
    float 2**n, and exactly 0 for n = -bias: a masked score of -inf weighs nothing.
    """
    bits, bias = FORMAT[dtype]
    vector, integer = x.type, ir.VectorType(INTEGER[dtype], x.type.count)
    magic = constant(vector, 1.5 * 2.0**bits + bias)
    x = _greater(builder, constant(vector, -float(bias)), x)  # this order keeps NaN
    shifted = builder.fadd(x, magic)
    fraction = builder.fsub(x, builder.fsub(shifted, magic))
    coefficients = [constant(vector, c) for c in EXP2[dtype]]
    power = coefficients[-1]
    for c in coefficients[-2::-1]:
        power = call(builder, "fma", [power, fraction, c])
    exponent = builder.shl(builder.bitcast(shifted, integer), constant(integer, bits))
    return builder.fmul(power, builder.bitcast(exponent, vector))


def _selection(made) -> None:
    """where(truth, x, y) on registers."""
    register = made.register

    @intrinsic
    def where(typingctx, truth, x, y):
        def codegen(context, builder, sig, args):
            truth = args[0]
            x, y = (
                _as_register(context, builder, a, t, register)
                for a, t in zip(args[1:], sig.args[1:], strict=True)
            )
            return builder.select(builder.icmp_signed("<", truth, constant(truth.type, 0)), x, y)

        return register(truth, x, y), codegen

    made.where = where


NEG_INF = -np.inf
