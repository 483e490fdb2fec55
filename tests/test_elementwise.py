"""The kernels over rows alone: every width up to three registers, canaries, layouts, threads."""

from __future__ import annotations

from ctypes import addressof
from unittest import mock

import numpy as np
import pytest
from kernels import Guarded, address, at_page_end, everywhere, lanes_of, survives

import fastattn
from fastattn.cpu import compile, elementwise
from fastattn.cpu.elementwise_job import layout_of, pack


def call(machine, function, out, *inputs, eps=0.0, pairs=0):
    """Run a kernel compiled for the machine; operands are arrays, Guarded ones, or None."""
    from fastattn.cpu.elementwise_kernels import elementwise_kernel

    dtype = out.dtype.name
    key = ("test elementwise", machine, function, dtype)
    with mock.patch.object(compile, "host_target", return_value=machine.target):
        kernel = compile.kernel(key, lambda unit: elementwise_kernel(function, dtype, unit))
    operands = (out, *inputs)
    views = [a.view if isinstance(a, Guarded) else a for a in operands]
    forms = [None if a is None else (a.shape, a.strides) for a in views]
    layout = layout_of(function, out.dtype.itemsize, *forms)
    job = pack(eps, pairs, [0 if a is None else address(a) for a in views], layout)
    assert kernel(addressof(job), 0, 1 << 20) == 0


def random(rng, dtype, *shape):
    return rng.standard_normal(shape).astype(dtype)


@everywhere
def test_activation_at_every_width(machine, dtype, rng):
    for width in range(1, 3 * lanes_of(machine, dtype) + 2):
        x, up = random(rng, dtype, 2, 3, width)
        bias = random(rng, dtype, width)
        out = Guarded((3, width), dtype, gap=3)
        call(machine, "relu", out, x, bias, up)
        out.check(np.maximum(x + bias, 0) * up)
        out = Guarded((3, width), dtype, gap=3)
        call(machine, "relu", out, x, None, None)
        out.check(np.maximum(x, 0))


@everywhere
@pytest.mark.parametrize("function", ["gelu", "gelu_tanh", "silu"])
def test_all_registers_give_the_same_bits(function, machine, dtype, rng):
    x = 4 * random(rng, dtype, 1001)
    out, expected = Guarded((1001,), dtype), np.empty_like(x)
    elementwise.run(function, expected, x, None, None)
    call(machine, function, out, x, None, None)
    out.check(expected)


@everywhere
@pytest.mark.parametrize("function", ["layer_norm", "rms_norm"])
def test_norm_at_every_width(function, machine, dtype, rng):
    for width in range(1, 3 * lanes_of(machine, dtype) + 2):
        x, residual = random(rng, dtype, 2, 3, width)
        bias, weight, shift = random(rng, dtype, 3, width)
        out, total = (Guarded((3, width), dtype, gap=gap) for gap in (3, 1))
        call(machine, function, out, x, bias, residual, total, weight, shift, eps=0.25)
        exact = (x + bias + residual).astype(np.float64)
        total.check(exact)
        exact -= exact.mean(-1, keepdims=True) if function == "layer_norm" else 0
        exact *= 1 / np.sqrt((exact**2).mean(-1, keepdims=True) + 0.25)
        out.check()
        floor = 32 * np.finfo(dtype).eps
        np.testing.assert_allclose(out.view, exact * weight + shift, rtol=floor, atol=floor)


@everywhere
@pytest.mark.parametrize("function", ["rotary_halves", "rotary_interleaved"])
def test_rotation_at_every_width(function, machine, dtype, rng):
    for width in range(2, 3 * lanes_of(machine, dtype) + 2):
        for pairs in {1, width // 4, width // 2} - {0}:
            x = random(rng, dtype, 3, width)
            cos, sin = random(rng, dtype, 2, 3, pairs)
            first, second = slice(0, pairs), slice(pairs, 2 * pairs)
            if function == "rotary_interleaved":
                first, second = slice(0, 2 * pairs, 2), slice(1, 2 * pairs, 2)
            expected = x.copy()
            expected[:, first] = x[:, first] * cos - x[:, second] * sin
            expected[:, second] = x[:, second] * cos + x[:, first] * sin
            out = Guarded((3, width), dtype, gap=3)
            call(machine, function, out, x, cos, sin, pairs=pairs)
            out.check(expected)
            call(machine, function, x, x, cos, sin, pairs=pairs)
            np.testing.assert_array_equal(x, expected)


@everywhere
def test_nothing_is_read_past_the_end(machine, dtype, rng):
    x = random(rng, dtype, 5, lanes_of(machine, dtype) + 3)
    pairs = x.shape[1] // 2
    with (
        at_page_end(x) as edge,
        at_page_end(x[0, :]) as weight,
        at_page_end(x[:, :pairs]) as angles,
    ):
        out = np.empty_like(x)

        def attempt():
            call(machine, "silu", out, edge, weight, edge)
            call(machine, "layer_norm", out, edge, weight, edge, None, weight, weight)
            for function in ("rotary_halves", "rotary_interleaved"):
                call(machine, function, edge, edge, angles, angles, pairs=pairs)

        attempt()  # compiles, which a child had better not
        assert survives(attempt)


@pytest.mark.parametrize("num_threads", [1, 3])
def test_layouts_and_threads_change_no_bit(num_threads, rng):
    pytest.importorskip("numba")
    x, up = rng.standard_normal((2, 6, 7, 5, 2000)).astype(np.float32)
    expected = np.empty_like(x)
    for index in np.ndindex(6, 7, 5):
        elementwise.run("silu", expected[index], x[index], None, up[index])
    with fastattn.num_threads(num_threads):
        for order in ((0, 1, 2, 3), (2, 0, 1, 3), (1, 2, 0, 3)):
            out = np.full_like(x, np.nan).transpose(order)
            elementwise.run("silu", out, x.transpose(order), None, up.transpose(order))
            np.testing.assert_array_equal(out, expected.transpose(order))
        whole = np.full_like(x, np.nan)
        elementwise.run("silu", whole, x, None, up)
        np.testing.assert_array_equal(whole, expected)
        elementwise.run("silu", whole[:, ::2, ::-1], x[:, ::2, ::-1], None, up[:, ::2, ::-1])
        np.testing.assert_array_equal(whole, expected)


def test_rows_along_more_axes_than_a_kernel_has(rng):
    pytest.importorskip("numba")
    x = rng.standard_normal((6, 6, 6, 6, 10)).astype(np.float32)
    view = x[::2, ::-2, 1::2, ::3]
    assert layout_of("relu", 4, (view.shape, view.strides), (view.shape, view.strides)) is None
    expected = x.copy()
    expected[::2, ::-2, 1::2, ::3] = np.maximum(view, 0)
    elementwise.run("relu", view, view, None, None)
    np.testing.assert_array_equal(x, expected)


def test_neighbouring_axes_are_one():
    shape, strides = (4, 3, 1, 8, 10), (960, 320, 4, 40, 4)
    layout = layout_of("silu", 4, (shape, strides), (shape, strides), None, None)
    assert layout.sizes[2:] == (1, 960, 960)  # one row
    layout = layout_of("silu", 4, (shape, strides), (shape, strides), ((10,), (4,)), None)
    assert layout.sizes[2:] == (96, 10, 10)
    assert layout.rest[-24:-21] == (1, 1, 96)


def test_an_interrupt_stops_the_other_threads(rng, monkeypatch):
    pytest.importorskip("numba")
    x = rng.standard_normal(10**6).astype(np.float32)
    jobs = []

    def kept(*arguments):
        jobs.append(pack(*arguments))
        return jobs[-1]

    def interrupted(job, scratch, quota):
        raise KeyboardInterrupt

    monkeypatch.setattr(elementwise, "pack", kept)
    monkeypatch.setattr(elementwise, "kernel", lambda function, dtype: interrupted)
    with pytest.raises(KeyboardInterrupt):
        elementwise.run("relu", x, x, None, None)
    monkeypatch.undo()
    before = x.copy()
    kernel = elementwise.kernel("relu", "float32")
    assert kernel(addressof(jobs[0]), 0, 1 << 20) == 0
    np.testing.assert_array_equal(x, before)
