"""nn.linear against its formula in float64."""

from __future__ import annotations

import numpy as np
import pytest
from nn_cases import DTYPES, check_budget, linear_formula, make_linear, tokens_of, zeros

from fastattn import nn


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(5,), (7, 5), (2, 3, 7, 5), (0, 5), (2, 0, 5)], ids=str)
def test_linear(shape, bias, dtype, rng):
    weights = make_linear(rng, 11, 5, dtype, bias)
    x = tokens_of(rng, *shape, dtype=dtype)
    check_budget(nn.linear(x, weights), linear_formula, x, weights)


def test_reprs_do_not_hold_the_numbers(rng):
    qkv, out = make_linear(rng, 12, 4, "float32", True), make_linear(rng, 4, 4, "float32", False)
    text = "LinearWeights(weight=float32 (12, 4), bias=float32 (12,))"
    assert repr(qkv) == text
    heads = nn.MultiHeadWeights(qkv, out, 2, sinks=np.zeros(2, np.float32))
    text = f"qkv={text}, out=LinearWeights(weight=float32 (4, 4)), num_heads=2, sinks=float32 (2,)"
    assert repr(heads) == f"MultiHeadWeights({text})"
    norm = nn.LayerNormWeights(np.ones(4), eps=1e-6)
    assert repr(norm) == "LayerNormWeights(weight=float64 (4,), eps=1e-06)"
    rotation = nn.positions.Rope(8).rotation(np.arange(3))
    assert repr(rotation) == "Rotation(cos=float32 (3, 4), sin=float32 (3, 4))"


# --- errors -------------------------------------------------------------------------------------


ERRORS = {
    "weight-list": (
        lambda: nn.LinearWeights([[1.0]]),
        TypeError,
        "weight must be a NumPy array, got list",
    ),
    "weight-int": (
        lambda: nn.LinearWeights(np.ones((2, 3), int)),
        TypeError,
        "weight must be float32 or float64, got int64",
    ),
    "weight-rank": (
        lambda: nn.LinearWeights(zeros(3)),
        ValueError,
        "weight must have shape (out_features, in_features), got (3,)",
    ),
    "bias-shape": (
        lambda: nn.LinearWeights(zeros(3, 2), zeros(2)),
        ValueError,
        "bias must have shape (3,) to fit weight, got (2,)",
    ),
    "bias-dtype": (
        lambda: nn.LinearWeights(zeros(3, 2), zeros(3, dtype=np.float64)),
        TypeError,
        "bias must have the dtype of weight, float32, got float64",
    ),
    "linear-x": (
        lambda: nn.linear(zeros(2, 4), nn.LinearWeights(zeros(5, 3))),
        ValueError,
        "x must have shape (..., 3) to fit weights of shape (5, 3), got (2, 4)",
    ),
    "x-list": (
        lambda: nn.linear([1.0], nn.LinearWeights(zeros(5, 1))),
        TypeError,
        "x must be a NumPy array, got list",
    ),
}


@pytest.mark.parametrize(("call", "error", "message"), ERRORS.values(), ids=ERRORS)
def test_errors(call, error, message):
    with pytest.raises(error) as raised:
        call()
    assert str(raised.value).startswith(message)
