"""What changes one row of scores and hides keys from it, alone against NumPy."""

from __future__ import annotations

import ctypes
import os
from functools import partial

import numpy as np
import pytest
from kernels import (
    Guarded,
    address,
    at_page_end,
    everywhere,
    lanes_of,
    largest,
    numpy_dtype,
    run,
    survives,
    whole_numbers,
)

LOG2_E = 1.4426950408889634
KINDS = ["", "float32", "float64", "float16", "bfloat16"]  # how a bias is stored, by its number

kinds = pytest.mark.parametrize("kind", KINDS[1:])
columns = pytest.mark.parametrize("col", [1, 3, 0])


def maskings(dtype):
    """Kernel (which, s, start, stop, width, ...): mask_row(), scores_row() or, its own arguments
    in this order, hide_padding().
    """

    def build(unit):
        from fastattn.cpu.masking import hide_padding, mask_row, scores_row
        from fastattn.cpu.memory import pointer_to
        from fastattn.cpu.registers import ITEMSIZE, jit

        real, lanes = pointer_to(dtype), unit.lanes(ITEMSIZE[dtype])
        hide, change = mask_row(dtype, lanes, None), scores_row(dtype, lanes, None)
        hide_past = hide_padding(dtype, lanes)
        # What a modifier would be given.
        zero = np.int64(0)

        @jit
        def body(job):
            if job[0] == 2:
                hide_past(real(job[1]), job[2], job[3], job[4], job[5])
                return
            s, start, stop, width, spare = real(job[1]), job[2], job[3], job[4], real(job[5])
            if job[0] == 0:
                hide(
                    s,
                    start,
                    stop,
                    job[6],
                    job[7],
                    width,
                    job[8],
                    job[9],
                    job[10],
                    spare,
                    False,
                    zero,
                    zero,
                    zero,
                    zero,
                    zero,
                )
            else:
                numbers = real(job[6])
                scale, softcap, slope = numbers[0], numbers[1], numbers[2]
                bias, place, col, kind = job[8], job[9], job[10], job[11]
                distance = job[7]
                change(
                    s,
                    start,
                    stop,
                    width,
                    scale,
                    softcap,
                    distance,
                    slope,
                    bias,
                    place,
                    col,
                    kind,
                    spare,
                    zero,
                    zero,
                    zero,
                    zero,
                    zero,
                )

        return body

    return build


def call(machine, dtype, which, *arguments):
    run(machine, ("maskings", dtype), maskings(dtype), which, *arguments)


def hide(machine, s, keys, window, mask=0, place=0, col=1, spare=None):
    """mask_row() on s[start:stop]; keys is (start, stop, width), window (low, high)."""
    spare = Guarded((lanes_of(machine, s.dtype),), s.dtype) if spare is None else spare
    call(machine, s.dtype.name, 0, s, *keys, spare, *window, mask, place, col)


def change(machine, s, keys, numbers, distance=0, bias=0, place=0, col=1, kind=0, spare=None):
    """scores_row() on s[start:stop]; keys is (start, stop, width), numbers (scale, softcap,
    slope).
    """
    spare = Guarded((lanes_of(machine, s.dtype),), s.dtype) if spare is None else spare
    numbers = np.array(numbers, s.dtype)
    call(machine, s.dtype.name, 1, s, *keys, spare, numbers, distance, bias, place, col, kind)
    if isinstance(spare, Guarded):
        spare.check()


def spaced(a, col, before=0):
    """a with its elements `col` apart, after `before` others; poison all around."""
    poison = True if a.dtype == bool else np.nan
    room = np.full(before + len(a) * col + 64, poison).astype(a.dtype)
    if col == 0:
        room[before] = a[0]
    else:
        room[before : before + len(a) * col : col] = a
    return room


def widths(lanes):
    return 1, lanes - 1, lanes, lanes + 1, 3 * lanes - 1, 3 * lanes


# --- hiding -------------------------------------------------------------------------------------


@everywhere
@pytest.mark.parametrize("has_mask", [True, False])
@columns
def test_mask_row(machine, dtype, has_mask, col, rng):
    lanes = lanes_of(machine, dtype)
    for width in widths(lanes):
        stop = -(-width // lanes) * lanes
        for low, high in ((0, width), (1, width), (0, width - 1), (lanes, 2 * lanes), (2, 1)):
            s = Guarded((stop,), dtype, value=whole_numbers(rng, stop, dtype))
            s.view[rng.random(stop) < 0.2] = np.nan
            s.view[rng.random(stop) < 0.1] = -np.inf
            seen = rng.random(width) < 0.7
            if col == 0:
                seen[:] = seen[0]
            j = np.arange(stop)
            visible = (j >= low) & (j < min(high, width))
            if has_mask:
                visible[:width] &= seen
            expected = np.where(visible, np.where(np.isnan(s.view), np.inf, s.view), -np.inf)
            for before in (0, 5):
                mask = spaced(seen, col, before) if has_mask else 0
                t = Guarded((stop,), dtype, value=s.view)
                hide(machine, t, (0, stop, width), (low, min(high, width)), mask, before, col)
                t.check(expected)


@everywhere
def test_mask_row_leaves_the_keys_outside_its_range_alone(machine, dtype):
    lanes = lanes_of(machine, dtype)
    s, mask = Guarded((4 * lanes,), dtype, value=1), np.zeros(4 * lanes, bool)
    hide(machine, s, (lanes, 3 * lanes, 4 * lanes), (0, 4 * lanes), mask)
    s.check(np.repeat([1, -np.inf, -np.inf, 1], lanes))


@everywhere
def test_hide_padding_is_mask_row_where_only_the_last_keys_are_hidden(machine, dtype, rng):
    lanes = lanes_of(machine, dtype)
    n = 2 * lanes
    for stop in range(n + 1, n + lanes):
        s = Guarded((3, 4 * lanes), dtype, gap=5, value=whole_numbers(rng, 4 * lanes, dtype))
        s.view[rng.random(s.view.shape) < 0.3] = np.nan
        expected = s.view.copy()
        for row in expected:
            hide(machine, row, (n, n + lanes, stop), (0, stop))
        call(machine, dtype, 2, s, s.stride, 3, n, stop)
        s.check(expected)


# --- changing -----------------------------------------------------------------------------------


def logits(s, scale, softcap, bias, slope, distance):
    """(base-2 logits, a bound of what was added) in float64, in the order that is promised."""
    x = s.astype(float) * scale
    size = np.abs(x)
    if softcap:
        x = softcap * np.tanh(x / LOG2_E / softcap) * LOG2_E
        size = size + np.abs(x)
    if bias is not None:
        x = np.where(bias == -np.inf, -np.inf, x + bias.astype(float) * LOG2_E)
        size = size + np.where(np.isinf(bias), 0, np.abs(bias.astype(float))) * LOG2_E
    far = np.abs(np.arange(s.size) - distance) * slope
    return x - far, size + far


def assert_logits(found, exact, size):
    """Up to a few roundings of all that was added."""
    finite = np.isfinite(exact)
    np.testing.assert_array_equal(found[~finite], exact[~finite])
    error = np.abs(found[finite] - exact[finite])
    assert (error <= 6 * np.finfo(found.dtype).eps * size[finite]).all()


@everywhere
@pytest.mark.parametrize("softcap", [0.0, 2.5])
@pytest.mark.parametrize("slope", [0.0, 0.375])
@pytest.mark.parametrize("kind", KINDS)
def test_scores_row_scales_caps_adds_and_takes_away_in_this_order(
    machine, dtype, softcap, slope, kind, rng
):
    lanes = lanes_of(machine, dtype)
    count, scale = 11 * lanes, 0.75  # four registers at a time, and three
    for distance, hidden in ((-3, 0), (0, count - 3 * lanes), (lanes + 1, 5 * lanes), (5, 1)):
        s = Guarded((count,), dtype, value=whole_numbers(rng, count, dtype))
        bias, address_of = None, 0
        if kind:
            bias = whole_numbers(rng, count, numpy_dtype(kind))
            bias[count - hidden :] = -np.inf
            address_of = bias
        exact = logits(s.view, scale, softcap, bias, slope, distance)
        rest = {"bias": address_of, "kind": KINDS.index(kind)}
        change(machine, s, (0, count, count), (scale, softcap, slope), distance, **rest)
        s.check()
        assert_logits(s.view, *exact)


@everywhere
@kinds
@columns
def test_bias_of_any_width_and_stride(machine, dtype, kind, col, rng):
    """A key that does not exist is excluded; nothing of its bias is read."""
    lanes = lanes_of(machine, dtype)
    for width in widths(lanes):
        stop = -(-width // lanes) * lanes
        for before in (0, 5):
            s = Guarded((stop,), dtype, value=whole_numbers(rng, stop, dtype))
            bias = whole_numbers(rng, width, numpy_dtype(kind))
            bias[rng.random(width) < 0.3] = -np.inf
            if col == 0:
                bias[:] = bias[0]
            whole = np.full(stop, -np.inf)
            whole[:width] = bias
            exact = logits(s.view, 0.75, 0, whole, 0, 0)
            rest = {"place": before, "col": col, "kind": KINDS.index(kind)}
            numbers = (0.75, 0, 0)
            change(machine, s, (0, stop, width), numbers, 0, spaced(bias, col, before), **rest)
            s.check()
            assert_logits(s.view, *exact)


@everywhere
def test_scores_row_leaves_the_keys_outside_its_range_alone(machine, dtype):
    lanes = lanes_of(machine, dtype)
    s, bias = Guarded((4 * lanes,), dtype, value=1), np.full(4 * lanes, -np.inf, "float32")
    change(machine, s, (lanes, 3 * lanes, 4 * lanes), (1, 0, 0), bias=bias, kind=1)
    s.check(np.repeat([1, -np.inf, -np.inf, 1], lanes))


@everywhere
@kinds
def test_bias_that_is_not_finite(machine, dtype, kind):
    """+inf and NaN are kept, and the largest finite bias stays finite. A score of NaN, too, is
    excluded by -inf.
    """
    lanes, real = lanes_of(machine, dtype), np.dtype(dtype).type
    stored = numpy_dtype(kind)
    top = largest(stored)
    bias = np.resize(np.array([np.inf, np.nan, -np.inf, top, -top], stored), lanes)
    with np.errstate(over="ignore"):
        bound = float(np.finfo(dtype).max)
        base_2 = real(np.clip(float(top) * LOG2_E, -bound, bound))
    for score in (1, np.nan):
        s = Guarded((lanes,), dtype, value=score)
        change(machine, s, (0, lanes, lanes), (1, 0, 0), bias=bias, kind=KINDS.index(kind))
        expected = np.resize(np.array([np.inf, np.nan, -np.inf, base_2, -base_2], real), lanes)
        visible = expected != -np.inf
        expected[visible] += real(score)
        s.check()
        np.testing.assert_allclose(s.view, expected, rtol=4 * np.finfo(dtype).eps)


@everywhere
def test_a_score_that_is_not_finite(machine, dtype):
    """Softcap takes an infinite score to its bound, and keeps NaN."""
    lanes = lanes_of(machine, dtype)
    some = np.resize(np.array([np.inf, -np.inf, np.nan], dtype), lanes)
    for softcap, bound in ((0, np.inf), (2, 2 * LOG2_E)):
        s = Guarded((lanes,), dtype, value=some)
        change(machine, s, (0, lanes, lanes), (0.5, softcap, 0))
        s.check()
        expected = np.resize([bound, -bound, np.nan], lanes)
        np.testing.assert_allclose(s.view, expected, rtol=4 * np.finfo(dtype).eps)


# --- what is not read ---------------------------------------------------------------------------


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@everywhere
@pytest.mark.parametrize("col", [1, 2])
def test_nothing_is_read_past_the_last_key(machine, dtype, col):
    lanes = lanes_of(machine, dtype)
    width, stop = lanes + 1, 2 * lanes
    s, spare = np.ones(stop, dtype), np.empty(lanes, dtype)
    size, keys = (width - 1) * col + 1, (0, stop, width)
    with at_page_end(np.ones(size, bool)) as mask:
        assert survives(lambda: hide(machine, s, keys, (0, width), mask, 0, col, spare))
        assert not survives(lambda: _read_past(mask))
    for kind in KINDS[1:]:
        with at_page_end(np.zeros(size, numpy_dtype(kind))) as bias:
            rest = {"col": col, "kind": KINDS.index(kind), "spare": spare}
            numbers = (1, 0, 0)
            read = partial(change, machine, s, keys, numbers, 0, bias, **rest)
            assert survives(read)
            assert not survives(partial(_read_past, bias))


def _read_past(a):
    """Read the byte behind an array: so the guard is seen to work."""
    return ctypes.c_char.from_address(address(a) + a.nbytes).value
