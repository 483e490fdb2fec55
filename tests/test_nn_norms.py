"""nn.layer_norm, nn.rms_norm and nn.add_norm against their formulas, on both backends."""

from __future__ import annotations

import numpy as np
import pytest
from nn_cases import DTYPES, check_budget, make_norm, norm_formula, tokens_of, zeros

import fastattn
from fastattn import nn

KINDS = pytest.mark.parametrize("rms", [False, True], ids=["layer", "rms"])


def norm(x, weights, backend, **options):
    if isinstance(weights, nn.RMSNormWeights):
        return nn.rms_norm(x, weights, backend=backend, **options)
    return nn.layer_norm(x, weights, backend=backend, **options)


@KINDS
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(48,), (7, 48), (2, 3, 7, 37), (0, 48), (5, 1)], ids=str)
def test_norm(shape, bias, dtype, rms, backend, rng):
    weights = make_norm(rng, shape[-1], dtype, bias, rms=rms)
    x = tokens_of(rng, *shape, dtype=dtype)
    expected = norm(x, weights, backend)
    check_budget(expected, norm_formula, x, weights)
    assert norm(x, weights, backend, out=x) is x
    np.testing.assert_array_equal(x, expected)


@KINDS
@pytest.mark.parametrize("dtype", DTYPES)
def test_sum_before_the_norm(dtype, rms, backend, rng):
    weights, bias = make_norm(rng, 37, dtype, rms=rms), tokens_of(rng, 37, dtype=dtype)
    x, residual = tokens_of(rng, 2, 4, 5, 37, dtype=dtype)
    total = np.full_like(x, np.nan)
    ours = nn.add_norm(x, weights, bias=bias, residual=residual, total=total, backend=backend)
    np.testing.assert_array_equal(total, x + bias + residual)
    np.testing.assert_array_equal(ours, norm(total, weights, backend))
    for options in ({"bias": bias}, {"residual": residual}):
        alone = nn.add_norm(x, weights, backend=backend, **options)
        np.testing.assert_array_equal(
            alone, norm(x + next(iter(options.values())), weights, backend)
        )


@pytest.mark.parametrize("to", ["x", "residual"])
def test_sum_and_norm_in_place(to, backend, rng):
    weights = make_norm(rng, 37)
    arrays = dict(zip(("x", "residual"), tokens_of(rng, 2, 4, 37), strict=True))
    expected = norm(arrays["x"] + arrays["residual"], weights, backend)
    total = arrays["x"] + arrays["residual"]
    for name, result in (("total", total), ("out", expected)):
        copies = {key: array.copy() for key, array in arrays.items()}
        copies[name] = copies[to]
        ours = nn.add_norm(copies.pop("x"), weights, backend=backend, **copies)
        np.testing.assert_array_equal(ours, expected)
        np.testing.assert_array_equal(copies[name], result)


@KINDS
def test_a_token_does_not_depend_on_the_others(rms, backend, rng):
    weights = make_norm(rng, 300, rms=rms)
    x = tokens_of(rng, 1000, 300)
    whole = norm(x, weights, backend)
    with fastattn.num_threads(1):
        np.testing.assert_array_equal(norm(x, weights, backend), whole)
    np.testing.assert_array_equal(norm(x[7], weights, backend), whole[7])
    view = x.reshape(10, 100, 300)[::-3, 5::7]
    np.testing.assert_array_equal(
        norm(view, weights, backend), whole.reshape(10, 100, 300)[::-3, 5::7]
    )
    wide = np.repeat(x[:9], 2, axis=-1)[:, ::2]
    if backend == "cpu":  # NumPy adds in another order where elements do not lie side by side
        np.testing.assert_array_equal(norm(wide, weights, backend), whole[:9])


def test_layer_norm_keeps_its_digits_beside_a_large_mean(backend, rng):
    weights = make_norm(rng, 64)
    x = 1e4 + tokens_of(rng, 9, 64)
    check_budget(nn.layer_norm(x, weights, backend=backend), norm_formula, x, weights)


def test_layer_norm_of_a_constant_token_is_the_bias(backend, rng):
    weights = make_norm(rng, 16)
    np.testing.assert_array_equal(
        nn.layer_norm(np.full((2, 16), 3, np.float32), weights, backend=backend),
        np.stack([weights.bias] * 2),
    )


@KINDS
def test_eps_is_added_to_the_variance(rms, backend, rng):
    x = 1e-3 * tokens_of(rng, 4, 32)
    for eps in (0.0, 1e-12, 1e-5, 1.0):
        weights = make_norm(rng, 32, eps=eps, rms=rms)
        check_budget(norm(x, weights, backend), norm_formula, x, weights)


# --- errors -------------------------------------------------------------------------------------

WEIGHTS = nn.LayerNormWeights(zeros(3))
ERRORS = {
    "norm-rank": (
        lambda: nn.LayerNormWeights(zeros(3, 2)),
        ValueError,
        "weight must have shape (features,), got (3, 2)",
    ),
    "norm-bias": (
        lambda: nn.LayerNormWeights(zeros(3), zeros(4)),
        ValueError,
        "bias must have shape (3,) to fit weight, got (4,)",
    ),
    "norm-eps": (
        lambda: nn.LayerNormWeights(zeros(3), None, -1.0),
        ValueError,
        "eps must be finite and not negative, got -1.0",
    ),
    "rms-eps": (
        lambda: nn.RMSNormWeights(zeros(3), np.nan),
        ValueError,
        "eps must be finite and not negative, got nan",
    ),
    "norm-x": (
        lambda: nn.layer_norm(zeros(2, 4), WEIGHTS),
        ValueError,
        "x must have shape (..., 3) to fit weights of shape (3,), got (2, 4)",
    ),
    "bias": (
        lambda: nn.add_norm(zeros(2, 3), WEIGHTS, bias=zeros(2, 3)),
        ValueError,
        "bias must have shape (3,) to fit x, got (2, 3)",
    ),
    "residual": (
        lambda: nn.add_norm(zeros(2, 3), WEIGHTS, residual=zeros(3)),
        ValueError,
        "residual must have the shape of x, (2, 3), got (3,)",
    ),
    "total": (
        lambda: nn.add_norm(zeros(2, 3), WEIGHTS, total=zeros(2, 3, dtype=np.float64)),
        TypeError,
        "total must have the dtype of x, float32, got float64",
    ),
    "total-out": (
        lambda: nn.add_norm(*[a := zeros(2, 3), WEIGHTS], total=a, out=a),
        ValueError,
        "total must not share memory with out",
    ),
}


@pytest.mark.parametrize(("call", "error", "message"), ERRORS.values(), ids=ERRORS)
def test_errors(call, error, message):
    with pytest.raises(error) as raised:
        call()
    assert str(raised.value).startswith(message)
