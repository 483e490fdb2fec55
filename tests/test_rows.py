"""What happens to one row of scores, alone against NumPy: softmax, merge, mask and bias."""

from __future__ import annotations

import ctypes
import os

import numpy as np
import pytest
from kernels import (
    Guarded,
    at_page_end,
    everywhere,
    lanes_of,
    run,
    survives,
    tile_of,
    whole_numbers,
)

from fastattn.problem import Variant

# --- softmax ------------------------------------------------------------------------------------


def softmaxes(dtype):
    """Kernel (which, then the arguments of row_update, merge or careful_product)."""

    def build(unit):
        from fastattn.cpu.products import careful_product
        from fastattn.cpu.simd import ITEMSIZE, jit, pointer_to
        from fastattn.cpu.softmax import merge, row_update

        real, lanes = pointer_to(dtype), unit.lanes(ITEMSIZE[dtype])
        update, fold = row_update(dtype, lanes), merge(dtype, lanes)
        careful = careful_product(dtype, unit)

        @jit
        def body(job):
            first, acc, state = real(job[1]), real(job[5]), real(job[7])
            if job[0] == 0:
                scale, exclude = real(job[4])[0], job[9] != 0
                row_sum = real(job[8])
                update(first, job[2], job[3], scale, acc, job[6], state, row_sum, exclude)
            elif job[0] == 1:
                part_max, part_sum = real(job[2])[0], real(job[3])[0]
                fold(acc, state, real(job[8]), first, part_max, part_sum, job[6])
            else:
                careful(first, real(job[4]), job[7], job[2], job[3], acc, job[6])

        return body

    return build


def softmax(machine, dtype, which, *arguments):
    run(machine, ("softmax", dtype), softmaxes(dtype), which, *(*arguments, 0, 0)[:9])


def update(machine, s, start, stop, scale, acc, row_max, row_sum, exclude=False):
    one, dtype = np.array([scale], s.dtype), s.dtype.name
    rest = (acc, acc.view.size, row_max, row_sum, int(exclude))
    softmax(machine, dtype, 0, s, start, stop, one, *rest)


def fresh_row(dtype, width):
    """acc, row_max, row_sum of a row that has seen no key."""
    acc = Guarded((width,), dtype, value=0)
    return acc, Guarded((1,), dtype, value=-np.inf), Guarded((1,), dtype, value=0)


def state(row):
    """(acc, row_max, row_sum) as they are now, in float64."""
    acc, row_max, row_sum = (part.view.astype(np.float64) for part in row)
    return acc, row_max[0], row_sum[0]


def check_update(kind, s, scale, before, after, p, exclude):
    """Hold the row's new state against the definition, in float64."""
    (old_acc, old_max, old_sum), (acc, row_max, row_sum) = before, after
    logits = s * kind(scale)  # rounded here, and once more below
    top = logits.max(initial=-np.inf)
    slack = 0 if old_max == -np.inf else 8
    assert row_max == (top if top > old_max + slack else old_max)
    reference = 0.0 if row_max == -np.inf else row_max
    tolerance = {"rtol": 4 * np.finfo(kind).eps, "atol": np.finfo(kind).tiny}
    exact = np.exp2((logits - kind(reference)).astype(np.float64))
    np.testing.assert_allclose(p, exact, **tolerance)
    excluded = (s == -np.inf) & exclude
    np.testing.assert_array_equal(np.signbit(p), excluded)
    np.testing.assert_array_equal(p[s == -np.inf], 0)
    alpha = 0.0 if old_max == -np.inf else np.exp2(old_max - reference)
    tolerance["rtol"] *= 4
    np.testing.assert_allclose(row_sum, old_sum * alpha + exact.sum(), **tolerance)
    np.testing.assert_allclose(acc, old_acc * alpha, **tolerance)


@everywhere
@pytest.mark.parametrize("exclude", [False, True])
def test_row_update(machine, dtype, exclude, rng):
    lanes, kind = lanes_of(machine, dtype), np.dtype(dtype).type
    for start in (0, 2 * lanes, 8 * lanes):
        for count in (1, 2, 3, 4, 5):
            for shift in (0.0, 3.0, 7.9, 8.1, 40.0, -300.0):
                stop = start + count * lanes
                row = fresh_row(dtype, 3 * lanes)
                if shift:  # a row that has seen keys before
                    for part, value in zip(row, (rng.random(3 * lanes), 1.5, 2.0), strict=True):
                        part.view[...] = value
                s = Guarded((stop,), dtype)
                s.view[start:] = rng.standard_normal(stop - start)
                s.view[start:] += 1.5 - s.view[start:].max() + shift
                s.view[start:][rng.random(stop - start) < 0.2] = -np.inf
                before, scores = state(row), s.view[start:].copy()
                update(machine, s, start, stop, 1.0, *row, exclude=exclude)
                check_update(kind, scores, 1.0, before, state(row), s.view[start:], exclude)
                assert np.isnan(s.view[:start]).all()
                for buffer in (s, *row):
                    buffer.check()


@everywhere
def test_row_update_scales_before_it_subtracts(machine, dtype, rng):
    """The largest score weighs exactly 1, whatever the scale."""
    lanes, kind = lanes_of(machine, dtype), np.dtype(dtype).type
    for scale in (0.1, 0.18033688, 1.0, 3.7):
        s = Guarded((2 * lanes,), dtype)
        s.view[...] = 10 * rng.standard_normal(2 * lanes)
        before, row = s.view.copy(), fresh_row(dtype, lanes)
        update(machine, s, 0, 2 * lanes, scale, *row)
        assert s.view[before.argmax()] == 1
        zero = np.zeros(lanes), -np.inf, 0.0
        check_update(kind, before, scale, zero, state(row), s.view, False)


@everywhere
def test_row_update_of_a_row_that_sees_nothing(machine, dtype):
    lanes = lanes_of(machine, dtype)
    row = fresh_row(dtype, lanes)
    s = Guarded((3 * lanes,), dtype, value=-np.inf)
    update(machine, s, 0, 3 * lanes, 0.5, *row, exclude=True)
    s.check(np.zeros(3 * lanes))
    for part, value in zip(row, (0, -np.inf, 0), strict=True):
        part.check(np.full_like(part.view, value))


@everywhere
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_row_update_lets_what_is_not_finite_through(machine, dtype, value):
    lanes = lanes_of(machine, dtype)
    for place in range(3 * lanes):
        row = fresh_row(dtype, lanes)
        s = Guarded((3 * lanes,), dtype, value=0.5)
        s.view[place] = value
        update(machine, s, 0, 3 * lanes, 1.0, *row)
        assert np.isnan(row[2].view[0])


@everywhere
def test_merge(machine, dtype, rng):
    lanes, kind = lanes_of(machine, dtype), np.dtype(dtype).type
    for width in (lanes, 2 * lanes, 5 * lanes):
        for old_max, new_max in ((0.5, 2.5), (2.5, 0.5), (3.0, 3.0), (-500.0, 400.0)):
            acc = Guarded((width,), dtype, value=rng.standard_normal(width))
            part = Guarded((width,), dtype, value=rng.standard_normal(width))
            row_max, row_sum = (Guarded((1,), dtype, value=x) for x in (old_max, 1.25))
            before, (maximum, total) = acc.view.copy(), (np.array([x], kind) for x in (new_max, 3))
            rest = (acc, width, row_max, row_sum)
            softmax(machine, dtype, 1, part, maximum, total, 0, *rest)
            top = max(old_max, new_max)
            alpha, beta = np.exp2(old_max - top), np.exp2(new_max - top)
            eps = np.finfo(dtype).eps
            expected = alpha * before.astype(float) + beta * part.view.astype(float)
            size = alpha * abs(before.astype(float)) + beta * abs(part.view.astype(float))
            assert (np.abs(acc.view - expected) <= 4 * eps * size).all()
            np.testing.assert_allclose(row_sum.view, alpha * 1.25 + beta * 3, rtol=4 * eps)
            row_max.check([top])
            for buffer in (acc, part, row_sum):
                buffer.check()


@everywhere
def test_merge_of_a_part_that_saw_nothing_changes_no_bit(machine, dtype, rng):
    lanes, kind = lanes_of(machine, dtype), np.dtype(dtype).type
    nothing = np.array([-np.inf], kind), np.array([0], kind)
    for old_max, old_sum in ((0.7, 1.3), (-np.inf, 0.0)):
        acc = Guarded((lanes,), dtype, value=rng.standard_normal(lanes) if old_sum else 0.0)
        part = Guarded((lanes,), dtype, value=0)
        row_max, row_sum = (Guarded((1,), dtype, value=x) for x in (old_max, old_sum))
        before = [x.view.copy() for x in (acc, row_max, row_sum)]
        softmax(machine, dtype, 1, part, *nothing, 0, acc, lanes, row_max, row_sum)
        for buffer, expected in zip((acc, row_max, row_sum), before, strict=True):
            buffer.check(expected)


@everywhere
def test_careful_product(machine, dtype, rng):
    _, _, nr = tile_of(machine, dtype)
    lanes = lanes_of(machine, dtype)
    count, block_n = 9, 11
    for width in (lanes, nr, nr + lanes, 2 * nr):
        p = Guarded((count,), dtype, value=whole_numbers(rng, count, dtype))
        p.view[[1, 4]], p.view[6] = -0.0, 0.0
        v = whole_numbers(rng, (count, width), dtype)
        v[1], v[4] = np.nan, np.inf
        panels = np.full(block_n * width, np.nan, dtype)
        for start in range(0, width, nr):
            columns = v[:, start : start + nr]
            panels[start * block_n :][: columns.size] = columns.ravel()
        for start, stop in ((0, count), (1, 2), (2, 7), (3, 3)):
            acc = Guarded((width,), dtype, value=whole_numbers(rng, width, dtype))
            keys = [n for n in range(start, stop) if n not in (1, 4)]
            expected = acc.view + p.view[keys] @ v[keys]
            softmax(machine, dtype, 2, p, start, stop, panels, acc, width, block_n)
            acc.check(expected)
            p.check()


@everywhere
def test_careful_product_reads_the_value_of_a_key_that_weighs_plus_zero(machine, dtype):
    """A visible key whose weight underflows to +0.0 still brings its NaN in, as 0 * NaN does."""
    lanes = lanes_of(machine, dtype)
    v = np.full((1, lanes), np.nan, dtype)
    for weight, seen in ((0.0, True), (-0.0, False)):
        acc, p = Guarded((lanes,), dtype, value=1), np.array([weight], dtype)
        softmax(machine, dtype, 2, p, 0, 1, v, acc, lanes, 1)
        acc.check(np.full(lanes, np.nan if seen else 1))


# --- mask and bias ------------------------------------------------------------------------------

VARIANTS = [(True, ""), (False, "float16"), (False, "float32"), (True, "float64"), (False, "")]


def masks(dtype):
    """Kernel (which, s, start, stop, low, high, width, scale, mask, its col, bias, col, spare)."""

    def build(unit):
        from fastattn.cpu.masking import mask_row
        from fastattn.cpu.simd import jit, pointer_to

        real, truths = pointer_to(dtype), pointer_to("bool")
        halves, singles, doubles = (pointer_to(f"float{bits}") for bits in (16, 32, 64))
        with_mask, half, single, both, window = (
            mask_row(Variant(dtype, *variant), unit) for variant in VARIANTS
        )

        @jit
        def body(job):
            s, start, stop, low, high, width = real(job[1]), job[2], job[3], job[4], job[5], job[6]
            scale, mask, m_col = real(job[7])[0], truths(job[8]), job[9]
            bias, b_col, spare = job[10], job[11], real(job[12])
            sizes = (start, stop, low, high, width, scale)
            start, stop, low, high, width, scale = sizes
            if job[0] == 0:
                none = real(bias)
                with_mask(s, start, stop, low, high, width, scale, mask, m_col, none, b_col, spare)
            elif job[0] == 1:
                to = halves(bias)
                half(s, start, stop, low, high, width, scale, mask, m_col, to, b_col, spare)
            elif job[0] == 2:
                to = singles(bias)
                single(s, start, stop, low, high, width, scale, mask, m_col, to, b_col, spare)
            elif job[0] == 3:
                to = doubles(bias)
                both(s, start, stop, low, high, width, scale, mask, m_col, to, b_col, spare)
            else:
                none = real(bias)
                window(s, start, stop, low, high, width, scale, mask, m_col, none, b_col, spare)

        return body

    return build


def spaced(a, col):
    """a with its elements `col` apart, and poison between and after them."""
    if col == 0:
        return a[:1].copy()
    poison = True if a.dtype == bool else np.nan
    room = np.full(len(a) * col + 64, poison, a.dtype)
    room[: len(a) * col : col] = a
    return room


@everywhere
@pytest.mark.parametrize("which", range(len(VARIANTS)), ids=str)
@pytest.mark.parametrize("col", [1, 3, 0])
def test_mask_row(machine, dtype, which, col, rng):
    has_mask, bias_dtype = VARIANTS[which]
    lanes, kind = lanes_of(machine, dtype), np.dtype(dtype).type
    spare, scale = Guarded((lanes,), dtype), np.array([0.75], kind)
    for width in (1, lanes - 1, lanes, lanes + 1, 3 * lanes - 1, 3 * lanes):
        stop = -(-width // lanes) * lanes
        for low, high in ((0, width), (1, width), (0, width - 1), (lanes, 2 * lanes), (2, 1)):
            s = Guarded((stop,), dtype, value=whole_numbers(rng, stop, dtype))
            s.view[rng.random(stop) < 0.2] = np.nan
            mask = rng.random(width) < 0.7
            bias = whole_numbers(rng, width, bias_dtype or dtype)
            bias[rng.random(width) < 0.3] = -np.inf
            if col == 0:
                mask[:], bias[:] = mask[0], bias[0]
            j = np.arange(stop)
            visible = (j >= low) & (j < min(high, width))
            x = s.view.astype(np.float64)
            if has_mask:
                visible[:width] &= mask
            if bias_dtype:
                visible[:width] &= bias > -np.inf
                x[:width] = x[:width] * 0.75 + bias.astype(float) * 1.4426950408889634
            expected = np.where(visible, np.where(np.isnan(x), np.inf, x), -np.inf)
            arrays = spaced(mask, col), col, spaced(bias, col), col, spare
            window = (0, stop, low, min(high, width), width)
            run(machine, ("masks", dtype), masks(dtype), which, s, *window, scale, *arrays)
            s.check()
            spare.check()
            seen = np.isfinite(expected)
            np.testing.assert_array_equal(s.view[~seen], expected[~seen])
            error = np.abs(s.view[seen] - expected[seen])
            roundings = 4 * np.finfo(dtype).eps if bias_dtype else 0
            assert (error <= roundings * np.maximum(abs(expected[seen]), 12)).all()


@everywhere
def test_mask_row_leaves_the_keys_outside_its_range_alone(machine, dtype):
    lanes = lanes_of(machine, dtype)
    s, one = Guarded((4 * lanes,), dtype, value=1), np.ones(4 * lanes, dtype)
    truth, spare = np.zeros(4 * lanes, bool), Guarded((lanes,), dtype)
    window = (lanes, 3 * lanes, 0, 4 * lanes, 4 * lanes)
    run(machine, ("masks", dtype), masks(dtype), 0, s, *window, one, truth, 1, one, 1, spare)
    s.check(np.repeat([1, -np.inf, -np.inf, 1], lanes))


@everywhere
def test_mask_row_with_a_bias_that_is_not_finite(machine, dtype):
    """+inf is kept, NaN becomes +inf where visible, and the largest finite bias stays finite."""
    lanes, kind = lanes_of(machine, dtype), np.dtype(dtype).type
    spare, scale = Guarded((lanes,), dtype), np.ones(1, kind)
    big = np.finfo(dtype).max
    bias = np.resize(np.array([np.inf, np.nan, -np.inf, big, -big], kind), lanes).astype("float64")
    s, mask = Guarded((lanes,), dtype, value=1), np.ones(lanes, bool)
    window = (0, lanes, 0, lanes, lanes)
    arrays = (mask, 1, bias, 1, spare)
    run(machine, ("masks", dtype), masks(dtype), 3, s, *window, scale, *arrays)
    s.check(np.resize(np.array([np.inf, np.inf, -np.inf, big, -big], kind), lanes))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@everywhere
@pytest.mark.parametrize("col", [1, 2])
def test_mask_row_reads_nothing_past_the_last_key(machine, dtype, col):
    lanes = lanes_of(machine, dtype)
    width, stop = lanes + 1, 2 * lanes
    s, one = np.ones(stop, dtype), np.ones(1, dtype)
    spare, size = np.empty(lanes, dtype), (width - 1) * col + 1
    window = (0, stop, 0, width, width)

    def call(which):
        run(machine, ("masks", dtype), masks(dtype), which, s, *window, one, *arrays, spare)

    with at_page_end(np.ones(size, bool)) as mask, at_page_end(np.zeros(size, "float64")) as bias:
        arrays = mask, col, bias, col
        assert survives(lambda: call(3))
        assert not survives(lambda: _read_past(mask))


def _read_past(a):
    """Read the byte behind an array: so the guard is seen to work."""
    return ctypes.c_char.from_address(a.ctypes.data + a.nbytes).value
