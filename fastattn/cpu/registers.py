"""SIMD registers as Numba types: one value is `lanes` floats, integers or truth values of one
width; and the LLVM values behind them.

Operators (+ - * / < <= > >= == != & |) work lane by lane and take a scalar on either side. Nothing
here is compiled with fast-math flags: every rounding is written down, so that results do not depend
on the optimiser (exp2 needs that to be right at all).
"""

from __future__ import annotations

import operator

import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.core.datamodel import PrimitiveModel, register_default
from numba.core.typing.templates import AbstractTemplate, infer_global, signature
from numba.extending import lower_builtin

from .translation import jit as jit  # what makes a helper of a function

I32 = ir.IntType(32)
I64 = ir.IntType(64)
FLOAT = {"float16": ir.HalfType(), "float32": ir.FloatType(), "float64": ir.DoubleType()}
# A truth value is an integer lane, 0 or -1, as wide as the floats beside it: <n x i1> variables
# would be packed to bits.
INTEGER = {"float32": I32, "float64": I64}
# What memory may hold. bfloat16 is a float32 without its low 16 bits.
STORED = {**FLOAT, "bfloat16": ir.IntType(16)}
NUMBA = {name: getattr(types, name) for name in ("float32", "float64")}
ITEMSIZE = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
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


def halves(builder, value) -> list:
    """LLVM values: the lower and the upper half of a register."""
    half = value.type.count // 2
    lanes = ir.VectorType(I32, half)
    parts = (list(range(first, first + half)) for first in (0, half))
    return [builder.shuffle_vector(value, value, ir.Constant(lanes, part)) for part in parts]


def twice(builder, half):
    """LLVM value: a register both halves of which are this one."""
    lanes = ir.VectorType(I32, 2 * half.type.count)
    return builder.shuffle_vector(half, half, ir.Constant(lanes, [*range(half.type.count)] * 2))


def lower_lanes(builder, lanes: int):
    """LLVM value: which lanes are in the lower half of a register, as bits that LLVM takes for
    unknown: where it knows them, it joins two halves by a permutation, and these share a unit with
    multiplies (Zen 5: 94 % of the peak for 100).
    """
    kind = ir.FunctionType(I64, [I64])
    count = builder.asm(kind, "", "=r,0", [ir.Constant(I64, lanes // 2)], side_effect=False)
    return _first(builder, count, lanes)


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


def prefetch_line(builder, pointer, index, level: int = 2) -> None:
    """Ask for the line of pointer[index], to be in the cache of this level soon. Any address will
    do.

    Into level 1 where memory is read in order and used at once: on Zen 4, a burst for each 16 keys
    held up the loads that followed (0.45 of the read bandwidth, 0.65 into level 2).
    """
    byte = ir.IntType(8).as_pointer()
    place = builder.bitcast(builder.gep(pointer, [index]), byte)
    kind = ir.FunctionType(ir.VoidType(), [byte, I32, I32, I32])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    to_read, locality, data = (ir.Constant(I32, n) for n in (0, 4 - level, 1))
    builder.call(function, [place, to_read, locality, data])


def row_offset(builder, rows, n):
    """LLVM value: elements from row 0 to row n, which lie `rows` elements apart, or where a table
    at this address says.
    """
    if isinstance(rows.type, ir.PointerType):
        return builder.load(builder.gep(rows, [n]))
    return builder.mul(n, rows)


def load_some(builder, pointer, index, count, other):
    """LLVM value: the first `count` (int64) elements at pointer[index:], then the lanes of other.
    Memory past them is not read.
    """
    vector = other.type
    mask = _first(builder, count, vector.count)
    place = builder.bitcast(builder.gep(pointer, [index]), vector.as_pointer())
    kind = ir.FunctionType(vector, [place.type, I32, mask.type, vector])
    function = _masked(builder, "load", kind, vector)
    return builder.call(function, [place, _alignment(vector), mask, other])


def store_some(builder, pointer, index, count, value) -> None:
    """Write the first `count` (int64) lanes to pointer[index:]."""
    mask = _first(builder, count, value.type.count)
    place = builder.bitcast(builder.gep(pointer, [index]), value.type.as_pointer())
    kind = ir.FunctionType(ir.VoidType(), [value.type, place.type, I32, mask.type])
    function = _masked(builder, "store", kind, value.type)
    builder.call(function, [value, place, _alignment(value.type), mask])


def _first(builder, count, lanes: int):
    """LLVM value: lane < count, as the bits that masked accesses want."""
    steps = ir.Constant(ir.VectorType(I32, lanes), list(range(lanes)))
    return builder.icmp_signed("<", steps, broadcast(builder, builder.trunc(count, I32), lanes))


def _masked(builder, access: str, kind: ir.FunctionType, vector: ir.VectorType):
    suffix = {4: "f32", 8: "f64"}[element_bytes(vector)]
    name = f"llvm.masked.{access}.v{vector.count}{suffix}.p0"
    return cgutils.get_or_insert_function(builder.module, kind, name)


def _alignment(vector: ir.VectorType) -> ir.Constant:
    return ir.Constant(I32, element_bytes(vector))


def element_bytes(vector: ir.VectorType) -> int:
    """Size of one lane."""
    sizes = {ir.FloatType(): 4, ir.DoubleType(): 8, ir.HalfType(): 2}
    element = vector.element
    return element.width // 8 if isinstance(element, ir.IntType) else sizes[element]


def greater(builder, x, y):
    """x > y ? x : y, one instruction: y where either is NaN."""
    return builder.select(builder.fcmp_ordered(">", x, y), x, y)


def less(builder, x, y):
    """x < y ? x : y, one instruction: y where either is NaN."""
    return builder.select(builder.fcmp_ordered("<", x, y), x, y)


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

    top, bottom = (_number(value.type, sign * float(limit)) for sign in (1, -1))
    bounded = less(builder, top, greater(builder, bottom, value))
    size = call(builder, "fabs", [value])
    infinite = builder.fcmp_ordered("==", size, _number(value.type, np.inf))
    return builder.fptrunc(builder.select(infinite, value, bounded), to)


def _like(kind, element):
    """The type of `element`, alone or in as many lanes as `kind` has."""
    return ir.VectorType(element, kind.count) if isinstance(kind, ir.VectorType) else element


def _number(kind, value):
    """The same value in every lane of `kind`, or alone."""
    return constant(kind, value) if isinstance(kind, ir.VectorType) else ir.Constant(kind, value)


def from_storage(builder, value, storage: str, dtype: str):
    """LLVM value: what memory holds as `storage`, as dtype; scalar or register."""
    if storage == "bfloat16":
        wide = _like(value.type, I32)
        bits = builder.shl(builder.zext(value, wide), _number(wide, 16))
        value = builder.bitcast(bits, _like(value.type, ir.FloatType()))
    return convert(builder, value, _like(value.type, FLOAT[dtype]))


def to_storage(builder, value, storage: str):
    """LLVM value: float32 or float64 as memory holds it, rounded to nearest even."""
    if storage == "float16":
        return builder.fptrunc(value, _like(value.type, ir.HalfType()))
    if storage != "bfloat16":
        return value
    wide, short = _like(value.type, I32), _like(value.type, STORED["bfloat16"])
    bits = builder.bitcast(value, wide)
    high = builder.lshr(bits, _number(wide, 16))
    odd = builder.and_(high, _number(wide, 1))
    rounded = builder.lshr(
        builder.add(bits, builder.add(odd, _number(wide, 0x7FFF))), _number(wide, 16)
    )
    # The carry would turn some NaNs into infinities.
    quiet = builder.or_(high, _number(wide, 0x40))
    nan = builder.fcmp_unordered("uno", value, value)
    return builder.trunc(builder.select(nan, quiet, rounded), short)


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


def as_register(context, builder, value, ty, register: Register):
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


def _arithmetic_kinds(kinds):
    return None if "bool" in kinds else ("float" if "float" in kinds else "int",) * 2


def _comparison(kinds):
    number = _arithmetic_kinds(kinds)
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
            as_register(context, builder, a, t, operand)
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
    _binary(_op, _arithmetic_kinds, _arithmetic(*_names))
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
    lambda kinds: _arithmetic_kinds(kinds) and ("float", "float"),
    _arithmetic("fdiv", "fdiv"),
)
_binary(operator.and_, _logic, lambda builder, x, y, kind: builder.and_(x, y))
_binary(operator.or_, _logic, lambda builder, x, y, kind: builder.or_(x, y))
