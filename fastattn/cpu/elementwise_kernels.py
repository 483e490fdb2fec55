"""Kernels over the rows of arrays: activations, normalisation, rotary positions.

A kernel draws work items, spans of rows, and does them row by row. See elementwise_job.py for what
it receives.
"""

from __future__ import annotations

import functools

import numpy as np

from ..machine import VectorUnit
from ..normal import NORMAL_TAIL
from .elementwise_job import (
    ADDRESSES,
    AXES,
    COUNTER,
    EPS,
    LAST,
    NUM_ITEMS,
    OPERANDS,
    PAIRS,
    ROWS,
    ROWS_PER_ITEM,
    STRIDES,
    WIDTH,
)
from .memory import address, at, fetch_add, pointer_to
from .registers import ITEMSIZE, jit
from .simd import operations

INTEGERS, DOUBLES = pointer_to("int64"), pointer_to("float64")
SQRT_8_PI = 1.5957691216057308  # 2 sqrt(2 / pi)


def elementwise_kernel(function: str, dtype: str, unit: VectorUnit):
    """Return the kernel of a function of elementwise_job.OPERANDS."""
    lanes = unit.lanes(ITEMSIZE[dtype])
    match OPERANDS[function]:
        case (*_, "up"):
            row = activation_row(function, dtype, lanes)
        case (*_, "shift"):
            row = norm_row(function == "layer_norm", dtype, lanes)
        case _:
            row = rotary_row(function == "rotary_interleaved", dtype, lanes)
    return drawing_rows(row)


def drawing_rows(do_row):
    """Return the kernel that draws spans of rows and does them, do_row(job, index, count), until
    none is left (0) or `quota` of them are done (1).

    index  of the row, a tuple of AXES numbers
    count  its elements: the last row may be short
    """

    @jit
    def do_rows(job, first, stop):
        i, k = first // job[AXES + 2], first % job[AXES + 2]
        i, j = i // job[AXES + 1], i % job[AXES + 1]
        for number in range(first, stop):
            last = number == job[ROWS] - 1
            do_row(job, (i, j, k), job[LAST] if last else job[WIDTH])
            k += 1  # counted along: dividing for each row would show where rows are short
            if k == job[AXES + 2]:
                k, j = 0, j + 1
                if j == job[AXES + 1]:
                    j, i = 0, i + 1

    def kernel(job, scratch, quota):
        job = INTEGERS(address(job))
        while quota > 0:
            number = fetch_add(at(job, COUNTER), 1)
            if number >= job[NUM_ITEMS]:
                return 0
            first = number * job[ROWS_PER_ITEM]
            do_rows(job, first, min(first + job[ROWS_PER_ITEM], job[ROWS]))
            quota -= 1
        return 1

    return kernel


@jit
def row_address(job, operand, index):
    """Address of an operand's row; 0 if the operand is absent, whose strides are 0."""
    first = STRIDES + 3 * operand
    i, j, k = index
    return job[ADDRESSES + operand] + i * job[first] + j * job[first + 1] + k * job[first + 2]


@functools.cache
def row_access(dtype: str, lanes: int):
    """Kernels take, put: a register at element n of the row at an address, of which `left` elements
    are left. An absent row, at address 0, gives `other`, and so do lanes past the end.
    """
    simd, real = operations(dtype, lanes), pointer_to(dtype)
    load, store, load_some, store_some = simd.load, simd.store, simd.load_some, simd.store_some
    splat = simd.splat

    @jit
    def take(row, n, left, other):
        if row == 0:
            return splat(other)
        if left < lanes:
            return load_some(real(row), n, left, splat(other))
        return load(real(row), n)

    @jit
    def put(row, n, left, value):
        if left < lanes:
            store_some(real(row), n, left, value)
        else:
            store(real(row), n, value)

    return take, put


def activation_row(function: str, dtype: str, lanes: int):
    """Kernel: out = f(x + bias) * up, where bias and up may be absent."""
    take, put = row_access(dtype, lanes)
    f, zero, one = activation(function, dtype, lanes), getattr(np, dtype)(0), getattr(np, dtype)(1)

    @jit
    def run(job, index, count):
        out, x = row_address(job, 0, index), row_address(job, 1, index)
        bias, up = row_address(job, 2, index), row_address(job, 3, index)
        for n in range(0, count, lanes):
            left = count - n
            value = f(take(x, n, left, zero) + take(bias, n, left, zero))
            put(out, n, left, value * take(up, n, left, one))

    return run


@functools.cache
def activation(function: str, dtype: str, lanes: int):
    """Kernel: f of a register."""
    simd, scalar = operations(dtype, lanes), getattr(np, dtype)
    splat, vmax, vmin, where = simd.splat, simd.vmax, simd.vmin, simd.where
    fabs, exp, half_erfc = simd.fabs, simd.exp, simd.half_erfc
    zero, one, lowest = scalar(0), scalar(1), np.finfo(dtype).min
    cubic, slope = scalar(0.044715), scalar(SQRT_8_PI)
    end = scalar(NORMAL_TAIL[dtype][1])

    @jit
    def weighted(x, t):
        """x / (1 + exp(-t)), t of the sign of x, by exp(-|t|): nothing overflows."""
        e = exp(zero - fabs(t))
        x = vmax(splat(lowest), x)  # else -inf * 0
        return where(x < zero, x * e, x) / (e + one)

    @jit
    def relu(x):
        return vmax(splat(zero), x)

    @jit
    def silu(x):
        return weighted(x, x)

    @jit
    def gelu_tanh(x):
        # (1 + tanh(t / 2)) / 2 = 1 / (1 + exp(-t)), which keeps its digits where tanh is near -1
        return weighted(x, slope * (x + cubic * x * x * x))

    @jit
    def gelu(x):
        # x Phi(x) = max(x, 0) - |x| Phi(-|x|): nothing cancels where x is negative
        a = vmin(splat(end), fabs(x))
        return vmax(splat(zero), x) - a * half_erfc(a)

    return {"relu": relu, "silu": silu, "gelu_tanh": gelu_tanh, "gelu": gelu}[function]


def norm_row(centred: bool, dtype: str, lanes: int):
    """Kernel: total = x + bias + residual; out = (total - mean) / sqrt(variance + eps) * weight +
    shift. Unless `centred`, mean is 0.

    bias, residual, total and shift may be absent.
    """
    simd, scalar = operations(dtype, lanes), getattr(np, dtype)
    splat, sqrt, zero, one = simd.splat, simd.sqrt, scalar(0), scalar(1)
    take, put = row_access(dtype, lanes)
    add, mean_of, variance_of = passes_before_norm(dtype, lanes)

    @jit
    def run(job, index, count):
        out, x = row_address(job, 0, index), row_address(job, 1, index)
        bias, residual = row_address(job, 2, index), row_address(job, 3, index)
        total = row_address(job, 4, index)
        weight, shift = row_address(job, 5, index), row_address(job, 6, index)
        if bias != 0 or residual != 0 or total != 0:
            total = out if total == 0 else total
            add(total, x, bias, residual, count)
            x = total
        mean = mean_of(x, count) if centred else zero
        variance = variance_of(x, mean, count)
        factor = splat(one) / sqrt(splat(variance + scalar(DOUBLES(address(job))[EPS])))
        for n in range(0, count, lanes):
            left = count - n
            value = (take(x, n, left, zero) - mean) * factor * take(weight, n, left, zero)
            put(out, n, left, value + take(shift, n, left, zero))

    return run


def passes_before_norm(dtype: str, lanes: int):
    """Kernels over one row: total = x + bias + residual; the mean; the variance, centred first."""
    simd, scalar = operations(dtype, lanes), getattr(np, dtype)
    splat, fma, reduce_add, zero = simd.splat, simd.fma, simd.reduce_add, scalar(0)
    take, put = row_access(dtype, lanes)

    @jit
    def add(total, x, bias, residual, count):
        for n in range(0, count, lanes):
            left = count - n
            value = take(x, n, left, zero) + take(bias, n, left, zero)
            put(total, n, left, value + take(residual, n, left, zero))

    @jit
    def mean_of(x, count):
        total = splat(zero)
        for n in range(0, count, lanes):
            total = total + take(x, n, count - n, zero)
        return reduce_add(total) / scalar(count)

    @jit
    def variance_of(x, mean, count):
        total = splat(zero)
        for n in range(0, count, lanes):
            value = take(x, n, count - n, mean) - mean
            total = fma(value, value, total)
        return reduce_add(total) / scalar(count)

    return add, mean_of, variance_of


def rotary_row(interleaved: bool, dtype: str, lanes: int):
    """Kernel: the first 2 * PAIRS elements of out are those of x, each pair turned by an angle:
    (a, b) -> (a cos - b sin, b cos + a sin). The others are copied.

    Pairs are elements n and n + PAIRS, or neighbours if `interleaved`. cos and sin: (PAIRS,)
    """
    take, put = row_access(dtype, lanes)
    zero, itemsize = getattr(np, dtype)(0), ITEMSIZE[dtype]
    turn = neighbours(dtype, lanes) if interleaved else halves(dtype, lanes)

    @jit
    def run(job, index, count):
        out, x = row_address(job, 0, index), row_address(job, 1, index)
        cos, sin = row_address(job, 2, index), row_address(job, 3, index)
        pairs = job[PAIRS]
        turn(out, x, cos, sin, pairs)
        if out != x:
            done = 2 * pairs * itemsize
            for n in range(0, count - 2 * pairs, lanes):
                left = count - 2 * pairs - n
                put(out + done, n, left, take(x + done, n, left, zero))

    return run


def halves(dtype: str, lanes: int):
    """Kernel: turn the pairs (n, n + pairs)."""
    take, put = row_access(dtype, lanes)
    zero, itemsize = getattr(np, dtype)(0), ITEMSIZE[dtype]

    @jit
    def turn(out, x, cos, sin, pairs):
        half = pairs * itemsize
        for n in range(0, pairs, lanes):
            left = pairs - n
            a, b = take(x, n, left, zero), take(x + half, n, left, zero)
            c, s = take(cos, n, left, zero), take(sin, n, left, zero)
            put(out, n, left, a * c - b * s)
            put(out + half, n, left, b * c + a * s)

    return turn


def neighbours(dtype: str, lanes: int):
    """Kernel: turn the pairs (2 n, 2 n + 1)."""
    simd, real, zero = operations(dtype, lanes), pointer_to(dtype), getattr(np, dtype)(0)
    splat, load_some = simd.splat, simd.load_some
    take, put = row_access(dtype, lanes)
    twice = simd.shuffle([n // 2 for n in range(lanes)])
    signed = simd.shuffle([n // 2 + lanes * (n % 2 == 0) for n in range(lanes)])
    swapped = simd.shuffle([n ^ 1 for n in range(lanes)])

    @jit
    def turn(out, x, cos, sin, pairs):
        for n in range(0, 2 * pairs, lanes):
            left = 2 * pairs - n
            some = min(left, lanes) // 2
            c = load_some(real(cos), n // 2, some, splat(zero))
            s = load_some(real(sin), n // 2, some, splat(zero))
            value = take(x, n, left, zero)
            value = value * twice(c, c) + swapped(value, value) * signed(s, zero - s)
            put(out, n, left, value)

    return turn
