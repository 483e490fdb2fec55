"""A Modifier as instructions on registers: what the forward kernel calls for each register of
scores.

j is a run, consecutive key indices known by their first: adding a scalar keeps it one, and aux[j],
or aux[j - i + 3], is a vector load. Other integers computed from it are registers of 32-bit
integers, whatever the scores are (products, and what comes from int64 aux arrays, of 64 bits); so
sums and differences of indices must stay below 2**31. b, h, i and what is computed from them alone
are 64-bit scalars.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from ..modifier import AuxTypes, Modifier
from . import elementary
from .auxiliary import AuxReader, Value, as_register, same
from .registers import FLOAT, I32, I64, Register, call, convert

BIT = ir.IntType(1)
SIGNS = {"lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!="}
ELEMENTARY = {
    "exp": lambda builder, xs, dtype: [elementary.exp(builder, x, dtype) for x in xs],
    "log": lambda builder, xs, dtype: [elementary.log(builder, x, dtype) for x in xs],
    "tanh": elementary.tanh,
}


def score_mod(modifier: Modifier, dtype: str, lanes: int):
    """Intrinsic: score_mod(scores, b, h, i, j, aux) -> as many registers of floats.

    scores  tuple of registers of floats, scaled, that lie side by side
    b, h, i  int64
    j      int64: the keys are j, j + 1, ..., one for each lane
    aux    int64: address of job.aux_table()
    """

    @intrinsic
    def run(typingctx, scores, b, h, i, j, aux):
        def codegen(context, builder, sig, args):
            some = cgutils.unpack_tuple(builder, args[0])
            return context.make_tuple(
                builder, scores, _emit(builder, modifier, dtype, lanes, some, *args[1:])
            )

        integer = types.int64
        return scores(scores, integer, integer, integer, integer, integer), codegen

    return run


def mask_mod(modifier: Modifier, dtype: str, lanes: int):
    """Intrinsic: mask_mod(b, h, i, j, aux) -> register of truth values. See score_mod()."""
    register = Register("bool", dtype, lanes)

    @intrinsic
    def run(typingctx, b, h, i, j, aux):
        def codegen(context, builder, sig, args):
            (truth,) = _emit(builder, modifier, dtype, lanes, [None], *args)
            return builder.sext(truth, register.vector)

        integer = types.int64
        return register(integer, integer, integer, integer, integer), codegen

    return run


def _emit(builder, modifier: Modifier, dtype: str, lanes: int, scores, b, h, i, j, aux) -> list:
    """Emit each step for all registers before the next; return the results, registers of floats or
    of single bits.
    """
    emitter = _Emitter(builder, dtype, lanes, aux, modifier.aux)
    count = len(scores)
    inputs = {
        "score": [Value("register", score) for score in scores],
        "b": [Value("scalar", b)] * count,
        "h": [Value("scalar", h)] * count,
        "i": [Value("scalar", i)] * count,
        "j": [Value("run", builder.add(j, same(j, n * lanes)), 1) for n in range(count)],
    }
    values: list[list[Value]] = []  # of each step, for each register
    for operation, kind, *operands in modifier.steps:
        if operation in inputs:
            value = inputs[operation]
        elif operation == "const":
            value = [emitter.constant(kind, operands[0])] * count
        elif operation == "aux":
            slot, *places = operands
            indices = [[values[n][m] for n in places] for m in range(count)]
            value = _each(indices, functools.partial(emitter.element, slot))
        else:
            given = [[values[n][m] for n in operands] for m in range(count)]
            value = emitter.apply(operation, kind, given)
        values.append(value)
    return [as_register(builder, value, lanes) for value in values[-1]]


def _each(operands: list[list[Value]], one: Callable[[list[Value]], Value]) -> list[Value]:
    """one() of the operands of each register; once if that is a scalar, which all share."""
    first = one(operands[0])
    return [first] * len(operands) if first.form == "scalar" else [first, *map(one, operands[1:])]


class _Emitter:
    """Turns steps into LLVM instructions."""

    def __init__(self, builder, dtype: str, lanes: int, aux, aux_types: AuxTypes):
        self.builder, self.dtype, self.lanes = builder, dtype, lanes
        self.float = FLOAT[dtype]
        self.aux = AuxReader(builder, aux, aux_types, lanes)

    def constant(self, kind: str, text: str) -> Value:
        if kind == "bool":
            return Value("scalar", ir.Constant(BIT, int(text == "True")))
        if kind == "int":
            return Value("scalar", ir.Constant(I64, int(text)))
        number, limit = float(text), float(np.finfo(self.dtype).max)
        if np.isfinite(number):
            number = min(max(number, -limit), limit)
        return Value("scalar", ir.Constant(self.float, number))

    def vector(self, element) -> ir.VectorType:
        return ir.VectorType(element, self.lanes)

    def apply(self, operation: str, kind: str, operands: list[list[Value]]) -> list[Value]:
        """One operation of the vocabulary on the operands of each register."""
        if operation in ELEMENTARY:
            xs = [as_register(self.builder, x, self.lanes) for (x,) in operands]
            results = ELEMENTARY[operation](self.builder, xs, self.dtype)
            return [Value("register", x) for x in results]
        return _each(operands, functools.partial(self.one, operation, kind))

    def one(self, operation: str, kind: str, operands: list[Value]) -> Value:
        """An operation that is not a chain of many instructions, on one register."""
        run = _run_arithmetic(self.builder, operation, operands) if kind == "int" else None
        if run is not None:
            return run
        form, values = self.uniform(operation, operands)
        if operation == "convert":
            return Value(form, self.convert(values[0], kind))
        if operation in SIGNS:
            return Value(form, _compare(self.builder, SIGNS[operation], *values))
        return Value(form, EMIT[operation](self.builder, *values))

    def uniform(self, operation: str, operands: list[Value]) -> tuple[str, list]:
        """(form, LLVM values) of the operands: all scalars, or all registers, integers of one
        width: 64 bits for a product, or if an operand has them; else 32.
        """
        if all(operand.form == "scalar" for operand in operands):
            return "scalar", [operand.ir for operand in operands]
        wide = operation == "mul" or any(o.ir.type == self.vector(I64) for o in operands)
        values = [as_register(self.builder, o, self.lanes, wide) for o in operands]
        return "register", values

    def convert(self, value, kind: str):
        """A value of another kind; truth counts as 1."""
        builder = self.builder
        vector = isinstance(value.type, ir.VectorType)
        truth = getattr(value.type, "element", value.type) == BIT
        if kind == "bool":
            return _compare(builder, "!=", value, same(value, 0))
        if kind == "int":
            return builder.zext(value, self.vector(I32) if vector else I64)
        to = self.vector(self.float) if vector else self.float
        return builder.uitofp(value, to) if truth else builder.sitofp(value, to)

    def element(self, slot: int, indices: list[Value]) -> Value:
        """aux[slot][indices] as the modifier sees it."""
        stored = self.aux.element(slot, indices)
        return Value(stored.form, self.loaded(stored.ir))

    def loaded(self, value):
        """A stored number as the modifier sees it."""
        element = getattr(value.type, "element", value.type)
        if element == ir.IntType(8):  # bool
            return self.builder.icmp_unsigned("!=", value, same(value, 0))
        if isinstance(element, ir.IntType):
            return self.builder.sext(value, I64) if value.type == I32 else value
        to = self.vector(self.float) if isinstance(value.type, ir.VectorType) else self.float
        return convert(self.builder, value, to)


def _is_float(value) -> bool:
    """Whether an LLVM value is a float or a register of floats."""
    kind = getattr(value.type, "element", value.type)
    return isinstance(kind, (ir.FloatType, ir.DoubleType))


def _run_arithmetic(builder, operation: str, operands: list[Value]) -> Value | None:
    """A sum or difference of a run and a scalar, which is a run; else None."""
    forms = [operand.form for operand in operands]
    if operation == "neg" and forms == ["run"]:
        (x,) = operands
        return Value("run", builder.sub(same(x.ir, 0), x.ir), -x.step)
    if operation not in ("add", "sub") or sorted(forms) != ["run", "scalar"]:
        return None
    x, y = operands
    if operation == "add":
        return Value("run", builder.add(x.ir, y.ir), x.step + y.step)
    return Value("run", builder.sub(x.ir, y.ir), x.step - y.step)


def _compare(builder, sign: str, x, y):
    if not _is_float(x):
        return (builder.icmp_unsigned if sign in ("==", "!=") else builder.icmp_signed)(sign, x, y)
    # NaN differs from everything, itself included
    return (builder.fcmp_unordered if sign == "!=" else builder.fcmp_ordered)(sign, x, y)


def _arithmetic(float_name: str, int_name: str):
    return lambda builder, x, y: getattr(builder, float_name if _is_float(x) else int_name)(x, y)


def _negative(builder, x):
    return builder.fneg(x) if _is_float(x) else builder.sub(same(x, 0), x)


def _absolute(builder, x):
    if _is_float(x):
        return call(builder, "fabs", [x])
    return builder.select(builder.icmp_signed("<", x, same(x, 0)), _negative(builder, x), x)


def _extreme(sign: str):
    """minimum (sign "<") and maximum: NaN where either is NaN."""

    def emit(builder, x, y):
        if not _is_float(x):
            return builder.select(builder.icmp_signed(sign, x, y), x, y)
        # y < x ? y : x is x where either is NaN; then only y's NaN is missing
        chosen = builder.select(builder.fcmp_ordered(sign, y, x), y, x)
        return builder.select(builder.fcmp_unordered("uno", y, y), y, chosen)

    return emit


def _quotient(wanted: str):
    """x // y and x % y of integers, rounded down; both 0 where y is 0, as in NumPy."""

    def emit(builder, x, y):
        zero, one = same(x, 0), same(x, 1)
        # What the division instruction traps on, y = 0 and the least integer over -1, is replaced.
        is_zero = builder.icmp_signed("==", y, zero)
        is_minus_one = builder.icmp_signed("==", y, same(x, -1))
        safe = builder.select(builder.or_(is_zero, is_minus_one), one, y)
        quotient, rest = builder.sdiv(x, safe), builder.srem(x, safe)
        inexact = builder.icmp_signed("!=", rest, zero)
        signs_differ = builder.icmp_signed("<", builder.xor(rest, safe), zero)
        low = builder.and_(inexact, signs_differ)
        if wanted == "mod":
            rest = builder.add(rest, builder.select(low, safe, zero))
            return rest  # of division by 1 where y is 0 or -1: 0
        quotient = builder.sub(quotient, builder.select(low, one, zero))
        quotient = builder.select(is_minus_one, _negative(builder, x), quotient)
        return builder.select(is_zero, zero, quotient)

    return emit


EMIT = {
    "abs": _absolute,
    "add": _arithmetic("fadd", "add"),
    "and": lambda builder, x, y: builder.and_(x, y),
    "div": lambda builder, x, y: builder.fdiv(x, y),
    "floor": lambda builder, x: call(builder, "floor", [x]),
    "floordiv": _quotient("floordiv"),
    "invert": lambda builder, x: builder.xor(x, same(x, -1)),
    "logical_not": lambda builder, x: builder.xor(x, same(x, -1)),
    "maximum": _extreme(">"),
    "minimum": _extreme("<"),
    "mod": _quotient("mod"),
    "mul": _arithmetic("fmul", "mul"),
    "neg": _negative,
    "or": lambda builder, x, y: builder.or_(x, y),
    "sqrt": lambda builder, x: call(builder, "sqrt", [x]),
    "sub": _arithmetic("fsub", "sub"),
    "where": lambda builder, truth, x, y: builder.select(truth, x, y),
    "xor": lambda builder, x, y: builder.xor(x, y),
}
