"""nn.relu and nn.gelu against math.erf; any shape and strides."""

from __future__ import annotations

import math

import numpy as np
import pytest
from nn_cases import DTYPES, check_budget, gelu_formula, tokens_of, zeros

from fastattn import nn
from fastattn.nn import activations


def exact_gelu(x):
    """x Phi(x) through erfc, which keeps its digits in the negative tail."""
    return np.array([v * math.erfc(-v * math.sqrt(0.5)) / 2 for v in x.astype(float).tolist()])


@pytest.mark.parametrize(("dtype", "digits"), [(np.float32, 2), (np.float64, 24)])
def test_gelu_matches_math_erf(dtype, digits):
    near_zero = np.geomspace(1e-30, 1e-2, 50)
    x = np.concatenate([np.linspace(-9, 9, 20000), near_zero, -near_zero]).astype(dtype)
    exact = exact_gelu(x)
    error = np.abs(nn.gelu(x) - exact) / np.abs(exact) / np.finfo(dtype).eps
    assert error[x > -1].max() <= digits
    assert (error / (digits + 2 + x * x)).max() <= 1  # no digits lost in the tail but to exp(x²/2)


def test_gelu_is_within_the_error_of_the_erf_formula(rng):
    x = 3 * tokens_of(rng, 7, 1000)
    check_budget(nn.gelu(x), gelu_formula, x)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gelu_of_special_values(dtype):
    x = np.array([0.0, np.inf, -np.inf, np.nan, 1e30, -1e30, -50.0], dtype)
    with np.errstate(all="raise"):
        y = nn.gelu(x)
    np.testing.assert_allclose(y, [0, np.inf, 0, np.nan, 1e30, 0, 0], atol=1e-300)


@pytest.mark.parametrize("size", [0, 1, *(activations.BLOCK + d for d in (-1, 0, 1, 4097))])
def test_gelu_does_not_depend_on_the_block(size, rng):
    x = tokens_of(rng, size)
    parts = [nn.gelu(part) for part in np.array_split(x, 3)]
    np.testing.assert_array_equal(nn.gelu(x), np.concatenate(parts))


@pytest.mark.parametrize("activation", [nn.gelu, nn.relu])
def test_activation_takes_any_strides_and_works_in_place(activation, rng):
    x = tokens_of(rng, 30, 40, 20)
    expected = activation(x)
    np.testing.assert_array_equal(activation(x[::-2, :, ::3]), expected[::-2, :, ::3])
    np.testing.assert_array_equal(activation(x.transpose(2, 0, 1)), expected.transpose(2, 0, 1))
    view = x[:, ::2]
    assert activation(view, out=view) is view
    np.testing.assert_array_equal(x[:, ::2], expected[:, ::2])


def test_activation_leaves_its_input_alone(rng):
    x = tokens_of(rng, 5, 6)
    x.flags.writeable = False
    assert nn.gelu(x).flags.writeable
    np.testing.assert_array_equal(nn.relu(x), np.where(x > 0, x, 0))


def test_gelu_of_a_scalar_array():
    assert nn.gelu(np.array(1.0)).shape == ()


# --- errors -------------------------------------------------------------------------------------


ERRORS = {
    "gelu-half": (
        lambda: nn.gelu(zeros(3, dtype=np.float16)),
        TypeError,
        "x must be float32 or float64, got float16",
    ),
    "gelu-out-shape": (
        lambda: nn.gelu(zeros(3), out=zeros(4)),
        ValueError,
        "out must have the shape of x, (3,), got (4,)",
    ),
    "gelu-out-dtype": (
        lambda: nn.gelu(zeros(3), out=zeros(3, dtype=np.float64)),
        TypeError,
        "out must have the dtype of x, float32, got float64",
    ),
}


@pytest.mark.parametrize(("call", "error", "message"), ERRORS.values(), ids=ERRORS)
def test_errors(call, error, message):
    with pytest.raises(error) as raised:
        call()
    assert str(raised.value).startswith(message)
