"""nn.layer_norm against its formula in float64."""

from __future__ import annotations

import numpy as np
import pytest
from nn_cases import DTYPES, check_budget, layer_norm_formula, make_norm, tokens_of, zeros

from fastattn import nn


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(48,), (7, 48), (2, 3, 7, 48), (0, 48)], ids=str)
def test_layer_norm(shape, bias, dtype, rng):
    weights = make_norm(rng, 48, dtype, bias)
    x = tokens_of(rng, *shape, dtype=dtype)
    expected = nn.layer_norm(x, weights)
    check_budget(expected, layer_norm_formula, x, weights)
    assert nn.layer_norm(x, weights, out=x) is x
    np.testing.assert_array_equal(x, expected)


def test_layer_norm_keeps_its_digits_beside_a_large_mean(rng):
    weights = make_norm(rng, 64)
    x = 1e4 + tokens_of(rng, 9, 64)
    check_budget(nn.layer_norm(x, weights), layer_norm_formula, x, weights)


def test_layer_norm_of_a_constant_token_is_the_bias(rng):
    weights = make_norm(rng, 16)
    np.testing.assert_array_equal(
        nn.layer_norm(np.full((2, 16), 3, np.float32), weights), np.stack([weights.bias] * 2)
    )


def test_layer_norm_adds_eps_to_the_variance(rng):
    x = 1e-3 * tokens_of(rng, 4, 32)
    for eps in (0.0, 1e-12, 1e-5, 1.0):
        weights = make_norm(rng, 32, eps=eps)
        check_budget(nn.layer_norm(x, weights), layer_norm_formula, x, weights)


# --- errors -------------------------------------------------------------------------------------


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
    "norm-x": (
        lambda: nn.layer_norm(zeros(2, 4), nn.LayerNormWeights(zeros(3))),
        ValueError,
        "x must have shape (..., 3) to fit weights of shape (3,), got (2, 4)",
    ),
}


@pytest.mark.parametrize(("call", "error", "message"), ERRORS.values(), ids=ERRORS)
def test_errors(call, error, message):
    with pytest.raises(error) as raised:
        call()
    assert str(raised.value).startswith(message)
