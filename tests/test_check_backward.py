"""The rules of attention_backward()'s own arguments, and what is said of those that break them."""

from __future__ import annotations

import numpy as np
import pytest

import fastattn

X = np.ones((2, 3, 8), np.float32)
WRONG = [
    ({"dout": X[:1]}, ValueError, r"dout must have shape \(2, 3, 8\), got \(1, 3, 8\)"),
    ({"out": X.astype(float)}, TypeError, "out must be float32, got float64"),
    ({"lse": X}, ValueError, r"lse must have shape \(2, 3\), got \(2, 3, 8\)"),
    ({"dlse": X[..., 0] > 0}, TypeError, "dlse must be float32, got bool"),
    ({"return_dbias": True}, ValueError, "bias must be given with return_dbias=True, got None"),
    ({"return_dsinks": True}, ValueError, "sinks must be given with return_dsinks=True"),
    ({"return_dalibi": 1}, TypeError, "return_dalibi must be a bool, got int"),
    ({"dropout_p": 0.5}, ValueError, "dropout_seed must be the forward pass's with dropout_p > 0"),
    ({"score_mod_grad": max}, ValueError, "score_mod must be given with score_mod_grad, got None"),
    ({"causal": 2}, TypeError, "causal must be a bool, got int"),
    ({"return_lse": True}, TypeError, "got an unexpected keyword argument 'return_lse'"),
    ({"backend": "gpu"}, ValueError, "backend must be one of"),
]


@pytest.mark.parametrize(("changes", "error", "message"), WRONG)
def test_wrong_arguments(changes, error, message):
    arguments = {"dout": X, "q": X, "k": X, "v": X, "out": X, "lse": X[..., 0]} | changes
    with pytest.raises(error, match=message):
        fastattn.attention_backward(**arguments)


def test_a_wrong_derivative_is_named():
    with pytest.raises(TypeError, match="score_mod_grad must be a function of"):
        fastattn.attention_backward(
            *[X] * 5,
            X[..., 0],
            score_mod=lambda score, b, h, i, j, aux: score,
            score_mod_grad=lambda score: score,
        )


def test_packed_arguments_that_do_not_exist():
    arrays = [X] * 5
    with pytest.raises(TypeError, match="unexpected keyword argument 'bias'"):
        fastattn.attention_varlen_backward(*arrays, X[..., 0], [0, 2], [0, 2], bias=X)
