"""What arithmetic instructions compute, on arrays with one element for each thread.

Registers are arrays of unsigned integers as wide as they are; instructions say what the bits mean.
Floats are computed as NumPy does: fma in float64 and rounded, ex2, lg2 and rcp exactly, where a
device has about 22 bits.
"""

from __future__ import annotations

import numpy as np
from ptx_text import EmulationError

UNSIGNED = {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}
SIGNED = {8: np.int8, 16: np.int16, 32: np.int32, 64: np.int64}
FLOAT = {16: np.float16, 32: np.float32, 64: np.float64}
TF32_CUT = np.uint32((1 << 13) - 1)  # bits of float32 that tf32 has not


def bits_of(kind: str) -> int:
    """Of a PTX type."""
    return {"f16x2": 32, "bf16x2": 32, "bf16": 16, "pred": 1}.get(kind) or int(kind[1:])


def numpy_type(kind: str):
    """What a PTX type means: untyped bits are unsigned."""
    table = SIGNED if kind[0] == "s" else FLOAT if kind[0] == "f" else UNSIGNED
    return table[bits_of(kind)]


def bfloat16_bits(x):
    """float32 -> bits, to nearest even."""
    bits = x.astype(np.float32).view(np.uint32).astype(np.uint64)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(x), np.uint16(0x7FFF), rounded)


def tf32_bits(rounding, bits):
    """Bits of float32 -> of the nearest tf32, halves away from 0."""
    if rounding != "rna":
        raise EmulationError(f"rounding to tf32 not known: {rounding}")
    rounded = (bits + (TF32_CUT + 1) // 2) & ~TF32_CUT
    return np.where(np.isnan(bits.view(np.float32)), np.uint32(0x7FFFFFFF), rounded)


def halves(x, kind: str):
    """(low, high) float32 of registers of two elements, "f16" or "bf16"."""
    parts = (x & 0xFFFF).astype(np.uint16), (x >> 16).astype(np.uint16)
    if kind == "f16":
        return tuple(p.view(np.float16).astype(np.float32) for p in parts)
    return tuple((p.astype(np.uint32) << 16).view(np.float32) for p in parts)


def packed(low, high, kind: str):
    """The reverse of halves()."""
    if kind == "f16":
        low, high = (x.astype(np.float16).view(np.uint16) for x in (low, high))
    else:
        low, high = bfloat16_bits(low), bfloat16_bits(high)
    return low.astype(np.uint32) | (high.astype(np.uint32) << 16)


def _fused(x, y, z):
    wide = np.longdouble if x.dtype == np.float64 else np.float64
    return (x.astype(wide) * y + z).astype(x.dtype)


def _fused_down(x, y, z):
    """Of float32, rounded down."""
    exact = x.astype(np.float64) * y + z
    nearest = exact.astype(np.float32)
    return np.where(nearest > exact, np.nextafter(nearest, np.float32(-np.inf)), nearest)


def _exact(function):
    return lambda x: function(x.astype(np.float64)).astype(x.dtype)


def _divided(x, y):
    """Rounded towards 0; what a device returns for y = 0 is not defined, and here 0."""
    safe = np.where(y == 0, 1, y)
    quotient = np.abs(x) // np.abs(safe)
    return np.where((x < 0) != (safe < 0), -quotient, quotient).astype(x.dtype)


FLOAT_OPERATIONS = {
    "abs": np.abs,
    "add": np.add,
    "copysign": lambda x, y: np.copysign(y, x),
    "div": np.divide,
    "ex2": _exact(np.exp2),
    "fma": _fused,
    "lg2": _exact(np.log2),
    "max": np.fmax,
    "min": np.fmin,
    "mul": np.multiply,
    "neg": np.negative,
    "rcp": _exact(np.reciprocal),
    "rsqrt": _exact(lambda x: 1 / np.sqrt(x)),
    "sqrt": np.sqrt,
    "sub": np.subtract,
}
INTEGER_OPERATIONS = {
    "abs": np.abs,
    "add": np.add,
    "and": np.bitwise_and,
    "div": _divided,
    "mad": lambda x, y, z: x * y + z,
    "max": np.maximum,
    "min": np.minimum,
    "mul": np.multiply,
    "neg": np.negative,
    "not": np.invert,
    "or": np.bitwise_or,
    "rem": lambda x, y: (x - _divided(x, y) * y).astype(x.dtype),
    "sub": np.subtract,
    "xor": np.bitwise_xor,
}
COMPARISONS = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "lo": np.less,
    "ls": np.less_equal,
    "hi": np.greater,
    "hs": np.greater_equal,
}


def compute(parts: tuple[str, ...], operands: list):
    """The result of an instruction of plain arithmetic. operands: registers' bits."""
    name, kind = parts[0], parts[-1]
    if kind in ("f16x2", "bf16x2"):
        pairs = zip(*(halves(x, kind[:-2]) for x in operands), strict=True)
        low, high = (FLOAT_OPERATIONS[name](*half) for half in pairs)
        return packed(low, high, kind[:-2])
    if name in ("shl", "shr"):
        return _shifted(name, kind, *operands)
    if "wide" in parts or "hi" in parts:
        return _wide_product(parts, operands)
    table = FLOAT_OPERATIONS if kind[0] == "f" else INTEGER_OPERATIONS
    operation = _fused_down if parts == ("fma", "rm", "f32") else table.get(name)
    rounds = operation is not _fused_down and {"rm", "rp", "rz", "sat"} & set(parts)
    if operation is None or rounds:
        raise EmulationError(f"instruction not known: {'.'.join(parts)}")
    meaning = numpy_type(kind)
    result = operation(*(x.view(meaning) for x in operands))
    return np.ascontiguousarray(result.astype(meaning)).view(UNSIGNED[bits_of(kind)])


def _shifted(name, kind, x, count):
    bits = bits_of(kind)
    x = x.view(numpy_type(kind))
    by = np.minimum(count, bits - 1).astype(x.dtype)
    result = x << by if name == "shl" else x >> by
    beyond = np.where(x < 0, x.dtype.type(-1) if kind[0] == "s" else 0, 0).astype(x.dtype)
    if name == "shl":
        beyond = np.zeros_like(x)
    return np.where(count >= bits, beyond, result).view(UNSIGNED[bits])


def _wide_product(parts, operands):
    """mul.wide, mad.wide, mul.hi."""
    kind, bits = parts[-1], bits_of(parts[-1])
    wide = object if bits == 64 else (np.int64 if kind[0] == "s" else np.uint64)
    x, y = (a.view(numpy_type(kind)).astype(wide) for a in operands[:2])
    product = x * y
    if "hi" in parts:
        product = product >> bits if bits == 64 else product >> product.dtype.type(bits)
        mask = (1 << bits) - 1
        return np.array([int(p) & mask for p in product], UNSIGNED[bits])
    product = product.view(np.uint64)
    return product + operands[2] if parts[0] == "mad" else product


def compare(name: str, kind: str, x, y):
    """setp's comparison. Names ending in u, but lo, ls, hi, hs, are true where one is NaN."""
    x, y = x.view(numpy_type(kind)), y.view(numpy_type(kind))
    if name == "nan":
        return np.isnan(x) | np.isnan(y)
    if name == "num":
        return ~(np.isnan(x) | np.isnan(y))
    if kind[0] != "f":
        return COMPARISONS[name](x, y)
    unordered = np.isnan(x) | np.isnan(y)
    if name in ("equ", "neu", "ltu", "leu", "gtu", "geu"):
        return COMPARISONS[name[:2]](x, y) | unordered
    return COMPARISONS[name](x, y) & ~unordered


def convert(parts: tuple[str, ...], operands: list):
    """cvt: from the last type to the one before it."""
    to, source = parts[-2], parts[-1]
    if to in ("f16x2", "bf16x2"):
        high, low = (x.view(np.float32) for x in operands)
        return packed(low, high, to[:-2])
    if to == "tf32":
        return tf32_bits(parts[1], operands[0])
    if source == "bf16":
        return operands[0].astype(np.uint32) << 16
    x = operands[0].view(numpy_type(source))
    if to == "bf16":
        return bfloat16_bits(x)
    meaning = numpy_type(to)
    if source[0] == "f" and to[0] != "f":
        rounding = {"rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil, "rni": np.rint}[parts[1]]
        info = np.iinfo(meaning)
        x = np.clip(np.nan_to_num(rounding(x.astype(np.float64))), info.min, info.max)
    elif source[0] == "f" and to == source:
        rounding = {"rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil, "rni": np.rint}
        x = rounding[parts[1]](x) if parts[1] in rounding else x
        if "sat" in parts:
            x = np.clip(np.nan_to_num(x, nan=0.0), 0, 1)
    return np.ascontiguousarray(x.astype(meaning)).view(UNSIGNED[bits_of(to)])
