"""exp, exp2, log, tanh, erfc of a register as LLVM values: no library call, no branch.

Error, in units of the last place: exp 1.1, log 0.8, tanh 2.6, erfc 3. Infinities, NaN, signed zeros
and subnormal numbers come out as in NumPy.
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba.core import cgutils

from ..normal import NORMAL_TAIL
from .job import LOG2_E
from .registers import FORMAT, INTEGER, call, constant, greater, less

# ln 2 in two parts: the sum has the digits that n * ln 2 needs.
LN_2 = {
    "float32": (0.693147182464599609375, -1.90465429995776787854e-9),
    "float64": (0.6931471805599452862268, 2.31904681384629961549e-17),
}
# 2**f on [-0.5, 0.5], c0 = 1 first: minimax for the relative error. float32: 1.9e-9, with all
# roundings 0.95 units in the last place (degree 5: 2.2). float64: 1.8e-17.
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
# Of registers with as many lanes as named, the instruction that picks a lane of another register by
# the low bits of an integer (Arm has none for 32 bits, AVX2 none for 64); and (2**f - 1) / f on
# [-1 / (2 * lanes), 1 / (2 * lanes)], minimax for the relative error of 2**f: 1.6e-9, 4.0e-9,
# 2.8e-18, with all roundings 0.99, 0.90, 1.0 units in the last place.
LOOK_UP = {
    ("float32", 16): "llvm.x86.avx512.permvar.sf.512",
    ("float32", 8): "llvm.x86.avx2.permps",
    ("float64", 8): "llvm.x86.avx512.permvar.df.512",
}
EXP2_NEAR = {
    ("float32", 16): (0.693147182667, 0.240234288014, 0.0555021365025),
    ("float32", 8): (0.693147181055, 0.240226525607, 0.0555007285745, 0.0094785663016),
    ("float64", 8): (
        0.69314718055994531811,
        0.24022650695911516046,
        0.055504108664802353859,
        0.0096181290851788023007,
        0.0013333558238948600045,
        0.00015404521944586772752,
        0.000015251844344770439555,
    ),
}
# (e**r - 1 - r) / r**2 on [-ln(2) / 2, ln(2) / 2], minimax for the relative error of e**r - 1.
# float32: 1.4e-8, float64: 1.9e-17.
EXPM1 = {
    "float32": (0.500000006021, 0.166665440636, 0.0416662857421, 0.00836648856269, 0.0013946265655),
    "float64": (
        0.50000000000000050441,
        0.16666666666666685117,
        0.041666666666577849408,
        0.0083333333333150953793,
        0.0013888888931308849849,
        0.00019841269902054130179,
        0.000024801505501427719351,
        2.7557228738667954444e-6,
        2.7625970039129785701e-7,
        2.5114248396887832154e-8,
    ),
}
# (2 atanh(s) / s - 2) / s**2 as a polynomial in s**2, |s| <= 3 - sqrt(8), minimax for the relative
# error of 2 atanh(s). float32: 8.2e-10, float64: 1.3e-18.
ATANH = {
    "float32": (0.666667752726, 0.399776482656, 0.298693364405),
    "float64": (
        0.66666666666667302623,
        0.39999999999436556433,
        0.28571428738251288329,
        0.22222198947752562682,
        0.18183546736577325497,
        0.15314463825771660018,
        0.14792107359716494982,
    ),
}
# exp(x) is inf above the first, 0 below the second; tanh(x) rounds to 1 from the third on.
LIMITS = {"float32": (89.0, -104.0, 10.0), "float64": (710.0, -746.0, 20.0)}


def exp2(builder, values: list, dtype: str) -> list:
    """LLVM values: 2**x for each x <= 0 (and a little above), 0 below -bias, NaN for NaN.

    x is split into n, a multiple of 1 / steps, and f in [-0.5 / steps, 0.5 / steps] by adding
    1.5 * 2**bits / steps: the sum's low bits hold n * steps. Shifted, they count powers of two as
    the exponent does, and 2**n is exactly 0 for n = -bias: a masked score of -inf weighs nothing.

    Where registers can look up a lane of another one, steps is their lanes and 2**n, n in [0, 1), a
    constant register, so that f takes a short polynomial (softmax of 256 keys 0.097 -> 0.083 ns a
    score on AVX-512, 0.184 -> 0.167 on AVX2, Zen 5). Elsewhere steps is 1.

    Each step is done for all values before the next: one after the other, chains of 35 to 43 cycles
    would wait for each other, as a processor looks ahead for only some three of them.
    """
    bits, bias = FORMAT[dtype]
    vector = values[0].type
    looks_up = (dtype, vector.count) in LOOK_UP
    steps = vector.count if looks_up else 1
    # The table's numbers have the exponent's bias; without one, the addition puts it there.
    magic = constant(vector, 1.5 * 2.0**bits / steps + (0 if looks_up else bias))
    low = constant(vector, -float(bias))
    values = [greater(builder, low, x) for x in values]  # this order keeps NaN
    shifted = [builder.fadd(x, magic) for x in values]
    whole = [builder.fsub(x, magic) for x in shifted]
    fractions = [builder.fsub(x, n) for x, n in zip(values, whole, strict=True)]
    integer = ir.VectorType(INTEGER[dtype], vector.count)
    places = [builder.bitcast(x, integer) for x in shifted]
    return (_exp2_near if looks_up else _exp2_wide)(builder, places, fractions, dtype)


def _exp2_wide(builder, places: list, fractions: list, dtype: str) -> list:
    """LLVM values: 2**(n + f) for n in the low bits of places."""
    vector, bits = fractions[0].type, constant(places[0].type, FORMAT[dtype][0])
    powers = _polynomials(builder, fractions, EXP2[dtype])
    scales = [builder.bitcast(builder.shl(n, bits), vector) for n in places]
    return [builder.fmul(p, n) for p, n in zip(powers, scales, strict=True)]


def _exp2_near(builder, places: list, fractions: list, dtype: str) -> list:
    """LLVM values: 2**(n + f) for n * lanes in the low bits of places."""
    vector, integer = fractions[0].type, places[0].type
    width = np.dtype(f"i{np.dtype(dtype).itemsize}")
    shift = FORMAT[dtype][0] - vector.count.bit_length() + 1
    # 2**(j / lanes), less what adding j shifted will add to its bits
    j = np.arange(vector.count, dtype=width)
    table = (np.exp2(j / vector.count).astype(dtype).view(width) - (j << shift)).view(dtype)
    table = ir.Constant(vector, table.tolist())
    kind = ir.FunctionType(vector, [vector, integer])
    name = LOOK_UP[dtype, vector.count]
    look_up = cgutils.get_or_insert_function(builder.module, kind, name)
    found = [builder.bitcast(builder.call(look_up, [table, n]), integer) for n in places]
    exponents = [builder.shl(n, constant(integer, shift)) for n in places]
    scales = [
        builder.bitcast(builder.add(t, n), vector) for t, n in zip(found, exponents, strict=True)
    ]
    slopes = _polynomials(builder, fractions, EXP2_NEAR[dtype, vector.count])
    grown = [builder.fmul(p, f) for p, f in zip(slopes, fractions, strict=True)]
    return [call(builder, "fma", [n, p, n]) for n, p in zip(scales, grown, strict=True)]


def _polynomials(builder, values: list, coefficients: tuple[float, ...]) -> list:
    """LLVM values: _polynomial() of each x, step by step."""
    terms = [constant(values[0].type, c) for c in coefficients]
    powers = [terms[-1]] * len(values)
    for c in terms[-2::-1]:
        powers = [call(builder, "fma", [p, x, c]) for p, x in zip(powers, values, strict=True)]
    return powers


def exp(builder, x, dtype: str):
    """LLVM value: e**x."""
    largest, smallest, _ = LIMITS[dtype]
    # Constant first: a comparison with NaN is false, and NaN is kept.
    x = less(builder, constant(x.type, largest), x)
    x = greater(builder, constant(x.type, smallest), x)
    n, power = _expm1_reduced(builder, x, dtype)
    power = builder.fadd(power, constant(x.type, 1.0))
    # In two steps: 2**n alone would leave the range before e**x does.
    half = builder.ashr(n, constant(n.type, 1))
    for part in (half, builder.sub(n, half)):
        power = builder.fmul(power, _two_to(builder, part, dtype))
    return power


def tanh(builder, values: list, dtype: str) -> list:
    """LLVM values: tanh(x) = e / (e + 2) with e = exp(2|x|) - 1, and the sign of x, for each x.

    Step by step as exp2().

    2|x| = n ln 2 + r with a plain ln 2: what its last digits miss shifts tanh by less than its own.
    """
    bits, bias = FORMAT[dtype]
    vector, integer = values[0].type, ir.VectorType(INTEGER[dtype], values[0].type.count)
    magic, one, two = (constant(vector, c) for c in (1.5 * 2.0**bits + bias, 1.0, 2.0))
    per_unit, unit = constant(vector, LOG2_E), constant(vector, -LN_2[dtype][0])
    largest = constant(vector, LIMITS[dtype][2])

    def each(step, *operands: list) -> list:
        return [step(*xs) for xs in zip(*operands, strict=True)]

    def fma(x, y, z):
        return call(builder, "fma", [x, y, z])

    sizes = each(lambda x: less(builder, largest, call(builder, "fabs", [x])), values)
    twice = each(builder.fadd, sizes, sizes)
    shifted = each(lambda x: fma(x, per_unit, magic), twice)
    whole = each(lambda x: builder.fsub(x, magic), shifted)
    rests = each(lambda n, x: fma(n, unit, x), whole, twice)
    powers = _polynomials(builder, rests, EXPM1[dtype])
    powers = each(lambda p, r: fma(builder.fmul(r, r), p, r), powers, rests)
    exponents = each(
        lambda x: builder.shl(builder.bitcast(x, integer), constant(integer, bits)), shifted
    )
    scales = each(lambda n: builder.bitcast(n, vector), exponents)
    # exp(2|x|) - 1 = scale * rest + (scale - 1): no digit is lost where |x| is small
    e = each(lambda scale, p: fma(scale, p, builder.fsub(scale, one)), scales, powers)
    sizes = each(lambda x: builder.fdiv(x, builder.fadd(x, two)), e)
    return each(lambda size, x: call(builder, "copysign", [size, x]), sizes, values)


def half_erfc(builder, a, dtype: str):
    """LLVM value: erfc(a / sqrt(2)) / 2 for a >= 0, the chance that a normal variable is above a.

    See NORMAL_TAIL for the formula. a must be finite.
    """
    pole, _, coefficients = NORMAL_TAIL[dtype]
    factor = builder.fdiv(constant(a.type, 1.0), builder.fadd(a, constant(a.type, pole)))
    u = builder.fmul(builder.fsub(a, constant(a.type, pole)), factor)
    smooth = builder.fmul(_polynomial(builder, u, coefficients), factor)
    # a * a / 2 in two parts: alone, its rounding would cost a * a / 2 units of the last place.
    half = builder.fmul(a, constant(a.type, -0.5))
    high = builder.fmul(half, a)
    low = call(builder, "fma", [half, a, builder.fneg(high)])
    power = exp(builder, high, dtype)
    power = call(builder, "fma", [power, low, power])
    return builder.fmul(smooth, power)


def log(builder, x, dtype: str):
    """LLVM value: ln x. x = 2**n * (1 + f) with 1 + f in [sqrt(1/2), sqrt(2)].

    With s = f / (2 + f): ln(1 + f) = 2 atanh(s) = f - (f**2 / 2 - s * (f**2 / 2 + R(s))).
    """
    bits, _ = FORMAT[dtype]
    vector, integer = x.type, ir.VectorType(INTEGER[dtype], x.type.count)
    tiny = builder.fcmp_ordered("<", x, constant(vector, float(np.finfo(dtype).tiny)))
    scaled = builder.select(tiny, builder.fmul(x, constant(vector, 2.0**bits)), x)
    root = int(np.array(0.5**0.5, dtype).view(f"i{np.dtype(dtype).itemsize}"))
    above = builder.sub(builder.bitcast(scaled, integer), constant(integer, root))
    fraction = builder.and_(above, constant(integer, (1 << bits) - 1))
    mantissa = builder.bitcast(builder.add(fraction, constant(integer, root)), vector)
    n = builder.ashr(above, constant(integer, bits))
    n = builder.sub(n, builder.select(tiny, constant(integer, bits), constant(integer, 0)))
    n = builder.sitofp(n, vector)
    f = builder.fsub(mantissa, constant(vector, 1.0))
    s = builder.fdiv(f, builder.fadd(f, constant(vector, 2.0)))
    z = builder.fmul(s, s)
    half_square = builder.fmul(builder.fmul(f, f), constant(vector, 0.5))
    rest = builder.fadd(half_square, builder.fmul(z, _polynomial(builder, z, ATANH[dtype])))
    high, low = LN_2[dtype]
    small = call(builder, "fma", [s, rest, builder.fmul(n, constant(vector, low))])
    small = builder.fsub(f, builder.fsub(half_square, small))
    result = call(builder, "fma", [n, constant(vector, high), small])
    return _log_edges(builder, x, result)


def _log_edges(builder, x, result):
    """LLVM value: `result`, but -inf at 0, NaN below, and x at inf and NaN."""
    zero, inf = constant(x.type, 0.0), constant(x.type, np.inf)
    result = builder.select(builder.fcmp_ordered("<", x, inf), result, x)
    result = builder.select(builder.fcmp_ordered("<", x, zero), constant(x.type, np.nan), result)
    return builder.select(builder.fcmp_ordered("==", x, zero), constant(x.type, -np.inf), result)


def _expm1_reduced(builder, x, dtype: str):
    """(n, e**r - 1) with x = n ln 2 + r, |r| at most ln(2) / 2, n an integer.

    Adding 1.5 * 2**bits leaves round(x / ln 2) in the low bits of the sum.
    """
    vector, integer = x.type, ir.VectorType(INTEGER[dtype], x.type.count)
    magic = 1.5 * 2.0 ** FORMAT[dtype][0]
    shifted = call(builder, "fma", [x, constant(vector, LOG2_E), constant(vector, magic)])
    whole = builder.fsub(shifted, constant(vector, magic))
    r = x
    for part in LN_2[dtype]:
        r = call(builder, "fma", [whole, constant(vector, -part), r])
    square = builder.fmul(r, r)
    power = call(builder, "fma", [square, _polynomial(builder, r, EXPM1[dtype]), r])
    low = int(np.array(magic, dtype).view(f"i{np.dtype(dtype).itemsize}"))
    return builder.sub(builder.bitcast(shifted, integer), constant(integer, low)), power


def _two_to(builder, n, dtype: str):
    """LLVM value: 2.0**n for integers n within the range of normal numbers."""
    bits, bias = FORMAT[dtype]
    biased = builder.shl(builder.add(n, constant(n.type, bias)), constant(n.type, bits))
    element = {"float32": ir.FloatType(), "float64": ir.DoubleType()}[dtype]
    return builder.bitcast(biased, ir.VectorType(element, n.type.count))


def _polynomial(builder, x, coefficients: tuple[float, ...]):
    """LLVM value: coefficients[0] + coefficients[1] * x + ..."""
    return _polynomials(builder, [x], coefficients)[0]
