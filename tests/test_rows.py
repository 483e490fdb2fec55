"""The softmax of one row, alone against NumPy: update, dropout, sink, merge and careful product."""

from __future__ import annotations

import numpy as np
import pytest
from kernels import Guarded, everywhere, lanes_of, run, tile_of, whole_numbers

import fastattn
from fastattn import dropout

LOG2_E = 1.4426950408889634


def softmaxes(dtype):
    """Kernel (which, then what row_update, merge, careful_product, drop_row or add_sink takes)."""

    def build(unit):
        from fastattn.cpu.memory import pointer_to
        from fastattn.cpu.products import careful_product
        from fastattn.cpu.registers import ITEMSIZE, jit
        from fastattn.cpu.rows import add_sink
        from fastattn.cpu.softmax import drop_row, merge, row_top, row_update

        real, lanes = pointer_to(dtype), unit.lanes(ITEMSIZE[dtype])
        largest, update, fold = row_top(dtype, lanes), row_update(dtype, lanes), merge(dtype, lanes)
        careful, drop = careful_product(dtype, unit), drop_row(dtype, lanes)
        sink, integers = add_sink(dtype, lanes), pointer_to("int64")

        @jit
        def body(job):
            first, acc, state = real(job[1]), real(job[5]), real(job[7])
            if job[0] == 0:
                numbers, exclude, ahead = real(job[4]), job[9] != 0, real(job[10])
                start, stop, width, row_sum = job[2], job[3], job[6], real(job[8])
                top, scale = largest(first, start, stop), numbers[0]
                numbers[1] = update(
                    first, ahead, start, stop, top, scale, acc, width, state, row_sum, exclude
                )
            elif job[0] == 1:
                part_max, part_sum = real(job[2])[0], real(job[3])[0]
                fold(acc, state, real(job[8]), first, part_max, part_sum, job[6])
            elif job[0] == 2:
                careful(first, real(job[4]), job[7], job[2], job[3], acc, job[6])
            elif job[0] == 3:
                key = np.uint64(integers(job[5])[0])
                drop(first, job[2], job[3], job[4], key, job[6])
            else:
                sink(first[0], acc, state, real(job[8]), job[6])

        return body

    return build


def softmax(machine, dtype, which, *arguments):
    run(machine, ("softmax", dtype), softmaxes(dtype), which, *(*arguments, 0, 0)[:10])


def update(machine, s, start, stop, scale, acc, row_max, row_sum, exclude=False, ahead=None):
    """Run row_update(); return the largest of `ahead`."""
    numbers, dtype = np.array([scale, np.nan], s.dtype), s.dtype.name
    rest = (acc, acc.view.size, row_max, row_sum, int(exclude), s if ahead is None else ahead)
    softmax(machine, dtype, 0, s, start, stop, numbers, *rest)
    return numbers[1]


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
@pytest.mark.parametrize("exclude", [False, True])
def test_row_update_finds_the_largest_of_another_row(machine, dtype, exclude, rng):
    lanes = lanes_of(machine, dtype)
    for start, count in ((0, 1), (2 * lanes, 2), (0, 5), (2 * lanes, 8), (0, 11)):
        stop = start + count * lanes
        for place in range(start, stop):
            s = Guarded((stop,), dtype, value=1.5)
            ahead = Guarded((stop + lanes,), dtype, value=9.0)
            ahead.view[start:stop] = -1 - rng.random(stop - start)
            ahead.view[place] = -0.5
            row = fresh_row(dtype, lanes)
            assert update(machine, s, start, stop, 1.0, *row, exclude, ahead) == -0.5


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


# --- dropout ------------------------------------------------------------------------------------


@everywhere
def test_drop_row(machine, dtype, rng):
    """What is dropped becomes 0; an excluded key stays marked, and NaN stays NaN."""
    lanes = lanes_of(machine, dtype)
    keys = dropout.head_keys(11, 1, 4)[0]
    for dropout_p, key in zip((0.0, 0.3, 0.8, 1.0), keys, strict=True):
        threshold = dropout.threshold(dropout_p)
        for start, stop, first_j in ((0, lanes, 0), (0, 4 * lanes, 7), (2 * lanes, 3 * lanes, 999)):
            p = Guarded((4 * lanes,), dtype, value=rng.random(4 * lanes))
            p.view[rng.random(4 * lanes) < 0.2] = -0.0
            p.view[rng.random(4 * lanes) < 0.1] = np.nan
            before, j = p.view.copy(), np.arange(start, stop)
            softmax(machine, dtype, 3, p, start, stop, first_j, key.reshape(1), threshold)
            keep = dropout.kept(np.array([key]), first_j + j, dropout_p)[0]
            expected = before.copy()
            expected[start:stop] = np.where(keep, before[start:stop], before[start:stop] * 0)
            p.check(expected)
            np.testing.assert_array_equal(np.signbit(p.view), np.signbit(before))
    assert not keep.any()


# --- sinks --------------------------------------------------------------------------------------


def with_sink(machine, dtype, value, row):
    """Add a sink to a row, and return the row's state."""
    score, acc = np.array([value], dtype), row[0]
    softmax(machine, dtype, 4, score, 0, 0, 0, acc, acc.view.size, row[1], row[2])
    for buffer in row:
        buffer.check()
    return state(row)


@everywhere
def test_add_sink(machine, dtype, rng):
    """As one more key with a value of 0."""
    lanes, eps = lanes_of(machine, dtype), np.finfo(dtype).eps
    for value in (-2.0, 0.0, 0.7, 3.0, 60.0, -60.0, 1e4, -1e4, 1e30):
        for reference in (-3.5, 0.0, 4.25):
            row = fresh_row(dtype, 3 * lanes)
            for part, start in zip(row, (rng.random(3 * lanes), reference, 2.5), strict=True):
                part.view[...] = start
            old_acc, old_max, old_sum = state(row)
            acc, row_max, row_sum = with_sink(machine, dtype, value, row)
            assert row_max == max(
                old_max, np.dtype(dtype).type(value) * np.dtype(dtype).type(LOG2_E)
            )
            alpha = np.exp2(old_max - row_max)
            # the sink's own weight, of its score as rounded to base 2
            weight = np.exp2(max(value * LOG2_E, -2000) - row_max) if row_max == old_max else 1.0
            error = 4 * eps * (1 + abs(value))
            tolerance = {"rtol": error, "atol": np.finfo(dtype).tiny}
            np.testing.assert_allclose(row_sum, old_sum * alpha + weight, **tolerance)
            np.testing.assert_allclose(acc, old_acc * alpha, **tolerance)


@everywhere
def test_add_sink_to_a_row_that_saw_nothing(machine, dtype):
    """All weight is the sink's: the result is 0 and lse the sink, unless that is -inf too."""
    lanes, kind = lanes_of(machine, dtype), np.dtype(dtype).type
    for value, total in ((1.5, 1), (-1e4, 1), (0.0, 1), (-np.inf, 0)):
        acc, row_max, row_sum = with_sink(machine, dtype, value, fresh_row(dtype, lanes))
        assert (acc == 0).all()
        assert (row_max, row_sum) == (kind(value) * kind(LOG2_E), total)


@everywhere
def test_a_sink_of_minus_infinity_changes_no_bit(machine, dtype, rng):
    lanes = lanes_of(machine, dtype)
    row = fresh_row(dtype, 2 * lanes)
    for part, start in zip(row, (rng.random(2 * lanes), 0.7, 1.3), strict=True):
        part.view[...] = start
    before = [part.view.copy() for part in row]
    with_sink(machine, dtype, -np.inf, row)
    for part, expected in zip(row, before, strict=True):
        part.check(expected)


@everywhere
def test_add_sink_keeps_nan(machine, dtype):
    for value, total in ((np.nan, 1.0), (0.5, np.nan)):
        row = fresh_row(dtype, lanes_of(machine, dtype))
        row[1].view[...], row[2].view[...] = 0.25, total
        assert np.isnan(with_sink(machine, dtype, value, row)[2])


@pytest.mark.parametrize("rows", [1, 2, 4])
def test_scores_of_no_dims_are_written_where_keys_have_no_distance(rows, backend):
    """In scratch that other scores are left in; a key of no dims, and the next, begin at once."""
    rng = np.random.default_rng(rows)
    wide, v = (rng.standard_normal((1, 2, 40, 8), dtype=np.float32) for _ in "kv")
    fastattn.attention(9 * wide[:, :, :rows], wide, v, backend=backend)
    k = np.broadcast_to(wide[:, :, :1], wide.shape)[..., :0]
    out = fastattn.attention(wide[:, :, :rows, :0], k, v, backend=backend)
    expected = np.broadcast_to(v.mean(2, keepdims=True), out.shape)
    np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-5)
