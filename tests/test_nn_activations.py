"""The activations of fastattn.nn against math.erfc and their formulas, on both backends."""

from __future__ import annotations

import math
from fractions import Fraction
from functools import partial

import numpy as np
import pytest
from nn_cases import ACTIVATION_FORMULAS, DTYPES, check_budget, tokens_of, zeros

import fastattn
from fastattn import nn

NAMES = tuple(ACTIVATION_FORMULAS)
FUNCTIONS = {"relu": nn.relu, "gelu": nn.gelu, "gelu_tanh": nn.gelu_tanh, "silu": nn.silu}


def logistic(t):
    """1 / (1 + exp(-t)), without overflow."""
    return 1 / (1 + math.exp(-t)) if t > 0 else math.exp(t) / (1 + math.exp(t))


def tanh_argument(x):
    return math.sqrt(8 / math.pi) * (x + 0.044715 * x**3)


def upper_tail(a):
    """erfc(a / sqrt(2)) / 2, the argument's rounding made good."""
    z = a * math.sqrt(0.5)
    rest = float(Fraction(a) ** 2 / 2 - Fraction(z) ** 2) / (2 * z) if z else 0.0
    return (math.erfc(z) - 2 / math.sqrt(math.pi) * math.exp(-z * z) * rest) / 2


# x times these is the activation, and they keep their digits where they are almost 0.
EXACT = {
    "relu": lambda x: float(x > 0),
    "gelu": lambda x: upper_tail(-x),
    "gelu_tanh": lambda x: logistic(tanh_argument(x)),
    "silu": logistic,
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NAMES)
def test_digits_are_kept_where_the_value_is_almost_zero(name, dtype, backend):
    near_zero = np.geomspace(1e-30, 1e-2, 50)
    x = np.concatenate([np.linspace(-13, 9, 4000), near_zero, -near_zero]).astype(dtype)
    exact = np.array([value * EXACT[name](value) for value in x.astype(float).tolist()])
    normal = np.abs(exact) >= np.finfo(dtype).tiny
    roundings = name == "gelu_tanh" or (name == "gelu" and backend == "numpy")
    # "exact" is rounded as well, in float64
    digits = (4 + x * x * roundings) * (2 if dtype == np.float64 else 1)
    error = np.abs(FUNCTIONS[name](x, backend=backend) - exact)
    assert (error <= digits * np.finfo(dtype).eps * np.abs(exact))[normal].all()
    assert (error <= np.finfo(dtype).tiny)[~normal].all()


@pytest.mark.parametrize("name", NAMES)
def test_error_is_within_that_of_the_formula(name, backend, rng):
    x = 3 * tokens_of(rng, 7, 1000)
    check_budget(FUNCTIONS[name](x, backend=backend), ACTIVATION_FORMULAS[name], x)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NAMES)
def test_special_values(name, dtype, backend):
    largest = np.finfo(dtype).max
    x = np.array([0.0, np.inf, -np.inf, np.nan, 1e30, -1e30, -50.0, largest, -largest], dtype)
    with np.errstate(all="raise"):
        y = FUNCTIONS[name](x, backend=backend)
    expected = [0, np.inf, 0, np.nan, 1e30, 0, 0, largest, 0]
    np.testing.assert_allclose(y, expected, rtol=1e-6, atol=1e-19)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NAMES)
def test_bias_and_gate(name, dtype, backend, rng):
    x, up = tokens_of(rng, 2, 5, 3, 37, dtype=dtype)
    bias = tokens_of(rng, 37, dtype=dtype)
    f = partial(FUNCTIONS[name], backend=backend)
    ours = partial(nn.activate, name, x, backend=backend)
    np.testing.assert_array_equal(ours(bias=bias), f(x + bias))
    np.testing.assert_array_equal(ours(up=up), f(x) * up)
    np.testing.assert_array_equal(ours(bias=bias, up=up), f(x + bias) * up)
    expected = f(x + bias) * up
    assert ours(bias=bias, up=up, out=up) is up
    np.testing.assert_array_equal(up, expected)


@pytest.mark.parametrize("size", [0, 1, 4095, 4096, 4097, 16384 + 1, 300_000])
def test_an_element_does_not_depend_on_the_others(size, backend, rng):
    x = tokens_of(rng, size)
    whole = nn.gelu(x, backend=backend)
    parts = [nn.gelu(part, backend=backend) for part in np.array_split(x, 3)]
    np.testing.assert_array_equal(whole, np.concatenate(parts))
    with fastattn.num_threads(1):
        np.testing.assert_array_equal(nn.gelu(x, backend=backend), whole)


@pytest.mark.parametrize("name", NAMES)
def test_any_strides_and_in_place(name, backend, rng):
    f = partial(FUNCTIONS[name], backend=backend)
    x = tokens_of(rng, 30, 40, 20)
    expected = f(x)
    np.testing.assert_array_equal(f(x[::-2, :, ::3]), expected[::-2, :, ::3])
    np.testing.assert_array_equal(f(x.transpose(2, 0, 1)), expected.transpose(2, 0, 1))
    view = x[:, ::2]
    assert f(view, out=view) is view
    np.testing.assert_array_equal(x[:, ::2], expected[:, ::2])


def test_output_on_a_part_of_the_input(backend, rng):
    x = tokens_of(rng, 6000)
    expected = nn.silu(x[:-3], backend=backend)
    nn.silu(x[:-3], out=x[3:], backend=backend)
    np.testing.assert_array_equal(x[3:], expected)


def test_input_is_left_alone(backend, rng):
    x = tokens_of(rng, 5, 6)
    x.flags.writeable = False
    assert nn.gelu(x, backend=backend).flags.writeable
    np.testing.assert_array_equal(nn.relu(x, backend=backend), np.where(x > 0, x, 0))


def test_scalar_array(backend):
    assert nn.gelu(np.array(1.0), backend=backend).shape == ()


# --- errors -------------------------------------------------------------------------------------


ERRORS = {
    "name": (
        lambda: nn.activate("swish", zeros(3)),
        ValueError,
        "name must be one of ('relu', 'gelu', 'gelu_tanh', 'silu'), got 'swish'",
    ),
    "half": (
        lambda: nn.gelu(zeros(3, dtype=np.float16)),
        TypeError,
        "x must be float32 or float64, got float16",
    ),
    "bias": (
        lambda: nn.activate("silu", zeros(2, 3), bias=zeros(2)),
        ValueError,
        "bias must have shape (3,) to fit x, got (2,)",
    ),
    "up": (
        lambda: nn.activate("silu", zeros(2, 3), up=zeros(1, 3)),
        ValueError,
        "up must have the shape of x, (2, 3), got (1, 3)",
    ),
    "out-list": (
        lambda: nn.gelu(zeros(3), out=[0.0] * 3),
        TypeError,
        "out must be a NumPy array, got list",
    ),
    "out-shape": (
        lambda: nn.gelu(zeros(3), out=zeros(4)),
        ValueError,
        "out must have the shape of x, (3,), got (4,)",
    ),
    "out-dtype": (
        lambda: nn.gelu(zeros(3), out=zeros(3, dtype=np.float64)),
        TypeError,
        "out must have the dtype of x, float32, got float64",
    ),
    "backend": (
        lambda: nn.relu(zeros(3), backend="gpu"),
        ValueError,
        "backend must be one of ('auto', 'numpy', 'cpu'), got 'gpu'",
    ),
}


@pytest.mark.parametrize(("call", "error", "message"), ERRORS.values(), ids=ERRORS)
def test_errors(call, error, message):
    with pytest.raises(error) as raised:
        call()
    assert str(raised.value).startswith(message)
