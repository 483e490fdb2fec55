"""Half precision in memory: every half as a float, and floats rounded to the nearest half."""

from __future__ import annotations

import numpy as np
import pytest
from kernels import Guarded, everywhere, lanes_of, machines, numpy_dtype, run

halves = pytest.mark.parametrize("storage", ["float16", "bfloat16"])
# ml_dtypes raises the flag for NaN, whatever is asked.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
by_registers = pytest.mark.parametrize("wide", [True, False], ids=["register", "element"])


def conversions(dtype, storage):
    """Kernel (which, source, to, count): load or store, a register or an element at a time."""

    def build(unit):
        from fastattn.cpu.memory import element_loader, element_storer, pointer_to
        from fastattn.cpu.registers import ITEMSIZE, jit
        from fastattn.cpu.simd import operations

        lanes = unit.lanes(ITEMSIZE[dtype])
        simd, real, stored = operations(dtype, lanes), pointer_to(dtype), pointer_to(storage)
        loader, store, one_loader = simd.loader(storage), simd.store, element_loader(storage, dtype)

        @jit
        def load_all(job):
            source, to = stored(job[1]), real(job[2])
            if job[0] == 0:
                for n in range(0, job[3], lanes):
                    store(to, n, loader(source, n))
            else:
                for n in range(job[3]):
                    to[n] = one_loader(source, n)

        if dtype == "float64":  # a bias may be half precision, an output may not
            return load_all
        load, storer, one_storer = simd.load, simd.storer(storage), element_storer(storage, dtype)

        @jit
        def body(job):
            if job[0] < 2:
                load_all(job)
                return
            source, to = real(job[1]), stored(job[2])
            if job[0] == 2:
                for n in range(0, job[3], lanes):
                    storer(to, n, load(source, n))
            else:
                for n in range(job[3]):
                    one_storer(to, n, source[n])

        return body

    return build


def converted(machine, source, to, wide):
    """The array `source` as dtype `to`; its length is padded to whole registers."""
    loads = source.dtype.itemsize < to.itemsize
    dtype, storage = (to.name, source.dtype.name) if loads else (source.dtype.name, to.name)
    lanes = lanes_of(machine, dtype)
    padded = np.append(source, np.zeros(-source.size % lanes, source.dtype))
    result = Guarded(padded.shape, to)
    which = (0 if loads else 2) + (0 if wide else 1)
    name = ("conversions", dtype, storage)
    run(machine, name, conversions(dtype, storage), which, padded, result, padded.size)
    result.check()
    return result.view[: source.size]


def every_half(storage):
    return np.arange(1 << 16, dtype=np.uint16).view(numpy_dtype(storage))


def assert_same(found, expected):
    """Equal in value and sign; NaN is NaN, whatever its payload."""
    nan = np.isnan(expected)
    np.testing.assert_array_equal(np.isnan(found), nan)
    bits = f"u{found.dtype.itemsize}"
    np.testing.assert_array_equal(found[~nan].view(bits), expected[~nan].view(bits))


@everywhere
@halves
@by_registers
def test_every_half_is_loaded_exactly(machine, dtype, storage, wide):
    source = every_half(storage)
    assert_same(converted(machine, source, np.dtype(dtype), wide), source.astype(dtype))


# What is computed in float64 is stored as float64.
on_each_machine = pytest.mark.parametrize("machine", machines(), ids=str)


def around_every_half(storage):
    """float32: each finite half, the middle between it and the next, and the floats around that."""
    halves = every_half(storage)
    halves = halves[np.isfinite(halves)]
    exact = halves.astype(np.float32)
    bits = halves.view(np.uint16)
    last = (bits & 0x7FFF) == (bits & 0x7FFF).max()
    after = np.where(last, bits, bits + 1).view(halves.dtype).astype(np.float32)
    # Past the largest, as if there were one more: from the middle on, it rounds to infinity.
    before = (bits - 1).view(halves.dtype).astype(np.float32)
    half_step = np.where(last, exact / 2 - before / 2, after / 2 - exact / 2)
    middle = exact + half_step
    inf = np.float32(np.inf)
    return np.concatenate([exact, middle, np.nextafter(middle, inf), np.nextafter(middle, -inf)])


@on_each_machine
@halves
@by_registers
def test_stores_round_to_the_nearest_half_and_ties_to_even(machine, storage, wide):
    source = around_every_half(storage)
    with np.errstate(over="ignore"):
        expected = source.astype(numpy_dtype(storage))
    assert np.isinf(expected).any()
    assert_same(converted(machine, source, expected.dtype, wide), expected)


@on_each_machine
@halves
@by_registers
def test_stores_of_any_bits(machine, storage, wide, rng):
    """NaN with any payload stays NaN: rounding must not carry into its exponent."""
    some = [0x7F800001, 0x7FFFFFFF, 0x7F80FFFF, 0xFFFFFFFF, 0x7FC00000, 0x7F800000, 0xFF800000]
    some += [0, 1 << 31, 1, 0x80000001, 0x7F7FFFFF, 0xFF7FFFFF, 0x33000000, 0x33000001]
    bits = np.concatenate([some, rng.integers(0, 1 << 32, 100_000)]).astype(np.uint32)
    source = bits.view(np.float32)
    with np.errstate(over="ignore"):
        expected = source.astype(numpy_dtype(storage))
    assert np.isnan(expected[:5]).all()
    assert_same(converted(machine, source, expected.dtype, wide), expected)


@on_each_machine
@halves
@by_registers
def test_a_half_survives_the_way_there_and_back(machine, storage, wide):
    source = every_half(storage)
    there = converted(machine, source, np.dtype("float32"), wide)
    assert_same(converted(machine, there.copy(), source.dtype, wide), source)
