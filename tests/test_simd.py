"""The SIMD register type alone: operators, reductions, conversions, selection and exp2."""

from __future__ import annotations

import operator

import numpy as np
import pytest
from kernels import Guarded, everywhere, lanes_of, run

OPERATORS = ("add", "sub", "mul", "truediv")
COMPARISONS = ("lt", "le", "gt", "ge", "eq", "ne")
# Units in the last place that exp2 may err; over all float32 values of [-37, 1] it is 0.992 on
# AVX-512, 0.903 on AVX2 and 0.949 elsewhere.
EXP2_ERROR = {"float32": 1.0, "float64": 1.1}
LOWEST = {"float32": -127.0, "float64": -1023.0}


def maps(dtype):
    """Kernel (which, x, y, z, count, scalar, to): one function on every register of the arrays."""

    def build(unit):
        from fastattn.cpu.memory import pointer_to
        from fastattn.cpu.registers import ITEMSIZE, jit
        from fastattn.cpu.simd import operations

        real = pointer_to(dtype)
        simd = operations(dtype, unit.lanes(ITEMSIZE[dtype]))
        load, store, lanes, where = simd.load, simd.store, simd.lanes, simd.where
        fma, vmax, vmin, exp2, splat = simd.fma, simd.vmax, simd.vmin, simd.exp2, simd.splat
        fabs = simd.fabs
        one, nil = getattr(np, dtype)(1), getattr(np, dtype)(0)

        @jit
        def arithmetic(which, x, y, c):
            if which == 0:
                return x + y
            if which == 1:
                return x - y
            if which == 2:
                return x * y
            if which == 3:
                return x / y
            if which == 4:
                return c + x
            if which == 5:
                return x - c
            if which == 6:
                return c - x
            if which == 7:
                return x * c
            return c / x

        @jit
        def comparison(which, x, y, c):
            if which == 10:
                return x < y
            if which == 11:
                return x <= y
            if which == 12:
                return x > y
            if which == 13:
                return x >= y
            if which == 14:
                return x == y
            if which == 15:
                return x != y
            if which == 16:
                return x < c
            if which == 17:
                return (x < c) & (y < c)
            return (x < c) | (y < c)

        @jit
        def body(job):
            which, to = job[0], real(job[6])
            c = real(job[5])[0]
            for n in range(0, job[4], lanes):
                x, y, z = load(real(job[1]), n), load(real(job[2]), n), load(real(job[3]), n)
                if which < 10:
                    value = arithmetic(which, x, y, c)
                elif which < 20:
                    value = where(comparison(which, x, y, c), one, nil)
                elif which == 20:
                    value = fma(x, y, z)
                elif which == 21:
                    value = vmax(x, y)
                elif which == 22:
                    value = vmin(x, y)
                elif which == 23:
                    value = exp2(x)
                elif which == 24:
                    value = where(x < y, y, c)
                elif which == 26:
                    value = fabs(x)
                else:
                    value = splat(c)
                store(to, n, value)

        return body

    return build


def evaluate(machine, which, x, y=None, z=None, c=0.0):
    """Apply one function to arrays of any length: padded with NaN to whole registers."""
    lanes = lanes_of(machine, x.dtype)
    padded = -(-x.size // lanes) * lanes
    to = Guarded((padded,), x.dtype)
    rooms = []
    for a in (x, x if y is None else y, x if z is None else z):
        rooms.append(np.full(padded, np.nan, x.dtype))
        rooms[-1][: x.size] = a
    scalar, name = np.array([c], x.dtype), x.dtype.name
    run(machine, ("maps", name), maps(name), which, *rooms, padded, scalar, to)
    to.check()
    return to.view[: x.size].copy()


def specials(dtype):
    """All pairs of values that tend to go wrong."""
    info = np.finfo(dtype)
    some = [0.0, -0.0, 1.0, -1.5, np.inf, -np.inf, np.nan, info.max, info.min, info.tiny, 3.0]
    x, y = np.meshgrid(np.array(some, dtype), np.array(some, dtype))
    return x.ravel(), y.ravel()


@everywhere
def test_operators_are_numpys(machine, dtype):
    x, y = specials(dtype)
    c = x.dtype.type(1.7)
    with np.errstate(all="ignore"):
        expected = [getattr(operator, name)(x, y) for name in OPERATORS]
        expected += [c + x, x - c, c - x, x * c, c / x]
    for which, exact in enumerate(expected):
        np.testing.assert_array_equal(evaluate(machine, which, x, y, c=c), exact)


@everywhere
def test_comparisons_are_numpys(machine, dtype):
    x, y = specials(dtype)
    expected = [getattr(operator, name)(x, y) for name in COMPARISONS]
    expected += [x < 1, (x < 1) & (y < 1), (x < 1) | (y < 1)]
    for which, exact in enumerate(expected):
        np.testing.assert_array_equal(evaluate(machine, 10 + which, x, y, c=1.0), exact)


@everywhere
def test_selection(machine, dtype):
    x, y = specials(dtype)
    np.testing.assert_array_equal(evaluate(machine, 21, x, y), np.where(x > y, x, y))
    np.testing.assert_array_equal(evaluate(machine, 22, x, y), np.where(x < y, x, y))
    np.testing.assert_array_equal(evaluate(machine, 24, x, y, c=-2), np.where(x < y, y, -2))
    np.testing.assert_array_equal(evaluate(machine, 25, x, c=7.5), np.full_like(x, 7.5))
    np.testing.assert_array_equal(evaluate(machine, 26, x), np.abs(x))
    assert not np.signbit(evaluate(machine, 26, x)[~np.isnan(x)]).any()


@everywhere
def test_fma_rounds_once(machine, dtype, rng):
    e = np.finfo(dtype).eps
    x = np.full(5, 1 + e, dtype)
    z = np.full(5, -1 - 2 * e, dtype)
    np.testing.assert_array_equal(evaluate(machine, 20, x, x, z), np.full(5, e * e, dtype))


# --- exp2 ---------------------------------------------------------------------------------------


def bits_between(low, high, count):
    """About `count` float32 values of [low, high], evenly spread over their bit patterns."""
    ends = np.array([low, high], np.float32).view(np.uint32).astype(np.int64)
    return np.arange(*sorted(ends), max(1, abs(int(ends[1] - ends[0])) // count))


def arguments(dtype, rng):
    """Values of [-127, 8] ([-1023, 8]): by their bits, evenly, and near whole and half numbers."""
    if dtype == "float32":
        tiny = np.finfo(dtype).tiny
        bits = [bits_between(a, b, 200_000) for a, b in ((-127, -tiny), (tiny, 8))]
        x = np.concatenate(bits).astype(np.uint32).view(np.float32)
    else:
        x = -(2.0 ** rng.uniform(-60, 9.99, 200_000))
    even = rng.uniform(LOWEST[dtype] + 1, 8, 200_000)
    halves = np.arange(2 * LOWEST[dtype] + 2, 17) / 2
    near = [np.nextafter(halves.astype(dtype), np.dtype(dtype).type(s)) for s in (-9e9, 9e9)]
    return np.concatenate([x, even, halves, *near]).astype(dtype)


@everywhere
def test_exp2_error_in_units_in_the_last_place(machine, dtype, rng):
    x = arguments(dtype, rng)
    x = x[x >= LOWEST[dtype] + 1]  # below, the result is subnormal, or 0
    exact = np.exp2(x.astype({"float32": np.float64, "float64": np.longdouble}[dtype]))
    unit = np.exp2(np.floor(x.astype(np.float64))) * np.finfo(dtype).eps
    error = np.abs(evaluate(machine, 23, x) - exact) / unit
    assert error.max() <= EXP2_ERROR[dtype], x[error.argmax()]


@everywhere
def test_exp2_at_the_ends(machine, dtype):
    low, kind = LOWEST[dtype], np.dtype(dtype).type
    x = np.array([-np.inf, low - 1, np.finfo(dtype).min, low, np.nextafter(kind(low), kind(-9e9))])
    np.testing.assert_array_equal(evaluate(machine, 23, x.astype(dtype)), np.zeros(5))
    whole = np.arange(low + 1, 9).astype(dtype)
    np.testing.assert_array_equal(evaluate(machine, 23, whole), np.exp2(whole))  # 2**n exactly
    np.testing.assert_array_equal(evaluate(machine, 23, np.array([0.0, -0.0], dtype)), [1, 1])
    between = np.linspace(low, low + 1, 1001).astype(dtype)  # never more than the smallest normal
    got = evaluate(machine, 23, between)
    assert (got >= 0).all()
    assert (got <= np.finfo(dtype).tiny).all()


@everywhere
def test_exp2_keeps_nan_whatever_its_payload(machine, dtype, rng):
    integer, bits, exponent = {
        "float32": (np.uint32, 23, 0xFF << 23),
        "float64": (np.uint64, 52, 0x7FF << 52),
    }[dtype]
    payloads = rng.integers(1, 1 << bits, 5000).astype(integer)
    payloads[:bits] = integer(1) << np.arange(bits, dtype=integer)
    sign = rng.integers(0, 2, 5000).astype(integer) << integer(8 * np.dtype(dtype).itemsize - 1)
    x = (payloads | integer(exponent) | sign).view(dtype)
    assert np.isnan(x).all()
    assert np.isnan(evaluate(machine, 23, x)).all()


# --- memory, lanes ------------------------------------------------------------------------------


def others(dtype):
    """Kernel (which, source, index, to): reductions, iota, and loads that convert."""

    def build(unit):
        from fastattn.cpu.memory import element_loader, fetch_add, pointer_to
        from fastattn.cpu.registers import ITEMSIZE, jit
        from fastattn.cpu.simd import operations

        real, integers = pointer_to(dtype), pointer_to("int64")
        simd = operations(dtype, unit.lanes(ITEMSIZE[dtype]))
        load, store, splat, where, iota = simd.load, simd.store, simd.splat, simd.where, simd.iota
        reduce_max, reduce_add, load_bytes = simd.reduce_max, simd.reduce_add, simd.load_bytes
        halves, singles, doubles = (pointer_to(f"float{bits}") for bits in (16, 32, 64))
        half, single, double = (simd.loader(f"float{bits}") for bits in (16, 32, 64))
        one_half, one_single, one_double = (
            element_loader(f"float{bits}", dtype) for bits in (16, 32, 64)
        )
        truths, zero = pointer_to("bool"), getattr(np, dtype)(0)

        @jit
        def body(job):
            which, source, n, to = job[0], job[1], job[2], real(job[3])
            if which == 0:
                to[0] = reduce_max(load(real(source), n))
            elif which == 1:
                to[0] = reduce_add(load(real(source), n))
            elif which == 2:
                store(to, 0, iota(n) + zero)
            elif which == 3:
                store(to, 0, where(load_bytes(truths(source), n), splat(real(job[4])[0]), zero))
            elif which == 4:
                store(to, 0, half(halves(source), n))
            elif which == 5:
                store(to, 0, single(singles(source), n))
            elif which == 6:
                store(to, 0, double(doubles(source), n))
            elif which == 7:
                to[0] = one_half(halves(source), n)
            elif which == 8:
                to[0] = one_single(singles(source), n)
            elif which == 9:
                to[0] = one_double(doubles(source), n)
            else:
                to[0] = fetch_add(integers(source), n)

        return body

    return build


def call(machine, dtype, which, source, index, size, extra=0):
    to = Guarded((size,), dtype)
    run(machine, ("others", dtype), others(dtype), which, source, index, to, extra)
    to.check()
    return to.view


@everywhere
def test_reductions(machine, dtype, rng):
    lanes = lanes_of(machine, dtype)
    for index in (0, 1, 5):
        x = rng.integers(-9, 9, lanes + 6).astype(dtype)
        part = x[index : index + lanes]
        assert call(machine, dtype, 0, x, index, 1)[0] == part.max()
        assert call(machine, dtype, 1, x, index, 1)[0] == part.sum()
    for place in range(lanes):  # NaN anywhere reaches the sum, and -inf is a maximum like any
        x = np.full(lanes, -np.inf, dtype)
        assert call(machine, dtype, 0, x, 0, 1)[0] == -np.inf
        x[place] = np.nan
        assert np.isnan(call(machine, dtype, 1, x, 0, 1)[0])


@everywhere
def test_iota_and_truth_bytes(machine, dtype, rng):
    lanes, kind = lanes_of(machine, dtype), np.dtype(dtype).type
    for start in (0, 3, 1 << 20, -7):
        np.testing.assert_array_equal(
            call(machine, dtype, 2, np.empty(1), start, lanes), np.arange(start, start + lanes)
        )
    truth = rng.integers(0, 2, lanes + 3).astype(np.uint8)
    truth[truth > 0] = [1, 2, 128, 255][:1] * int((truth > 0).sum())
    got = call(machine, dtype, 3, truth, 2, lanes, np.array([2.5], kind))
    np.testing.assert_array_equal(got, np.where(truth[2 : 2 + lanes], 2.5, 0))


@everywhere
@pytest.mark.parametrize("storage", ["float16", "float32", "float64"])
def test_loads_convert_and_keep_finite_what_is_finite(machine, dtype, storage, rng):
    lanes, which = lanes_of(machine, dtype), ("float16", "float32", "float64").index(storage)
    info = np.finfo(storage)
    some = [info.max, info.min, np.inf, -np.inf, np.nan, 0.0, -0.0, info.tiny, 1 / 3, -2 / 3]
    bound = np.finfo(dtype).max
    for _ in range(8):
        source = rng.choice(np.array(some, storage), lanes + 2)
        wide = source.astype(np.float64)
        finite = np.isfinite(wide)
        expected = np.where(finite, np.clip(wide, -float(bound), float(bound)), wide).astype(dtype)
        got = call(machine, dtype, 4 + which, source, 2, lanes)
        np.testing.assert_array_equal(got, expected[2:])
        for n in range(lanes):
            one = call(machine, dtype, 7 + which, source, n, 1)
            np.testing.assert_array_equal(one, expected[n : n + 1])


@everywhere
def test_fetch_add(machine, dtype):
    counter = np.array([5], np.int64)
    assert call(machine, dtype, 10, counter, 3, 1)[0] == 5
    assert call(machine, dtype, 10, counter, 3, 1)[0] == 8
    assert counter[0] == 11
