"""nn.transformer_layer against its formula in float64, and against torch."""

from __future__ import annotations

import numpy as np
import pytest
from nn_cases import (
    check_budget,
    linear_of,
    make_layer,
    multihead_of,
    norm_of,
    tokens_of,
    transformer_formula,
    zeros,
)

from fastattn import nn

FORMS = [
    {"activation": "gelu"},
    {"activation": "relu"},
    {"activation": "gelu_tanh", "norm_first": True},
    {"activation": "silu", "norm_first": True, "gated": True, "rms": True},
    {"activation": "gelu", "gated": True},
]


@pytest.mark.parametrize("form", FORMS, ids=lambda form: "-".join([form["activation"], *form][:4]))
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_transformer_layer(form, causal, backend, rng):
    weights = make_layer(rng, 32, 4, 80, **form)
    x = tokens_of(rng, 3, 19, 32)
    key_mask = np.arange(19) < np.array([[19], [1], [12]])
    ours = nn.transformer_layer(x, weights, causal=causal, key_mask=key_mask, backend=backend)
    check_budget(ours, transformer_formula, x, weights, causal=causal, key_mask=key_mask)


def test_padding_reaches_no_other_token(backend, rng):
    weights = make_layer(rng, 16, 2, 48)
    lengths = [9, 4, 1]
    x = tokens_of(rng, 3, 9, 16)
    key_mask = np.arange(9) < np.array(lengths)[:, None]
    x[~key_mask] = np.nan
    padded = nn.transformer_layer(x, weights, key_mask=key_mask, backend=backend)
    for b, length in enumerate(lengths):
        alone = nn.transformer_layer(x[b, :length], weights, backend=backend)
        np.testing.assert_allclose(padded[b, :length], alone, rtol=0, atol=2e-6)


def test_layer_takes_any_strides_and_leaves_its_input_alone(backend, rng):
    weights = make_layer(rng, 16, 2, 24)
    x = tokens_of(rng, 10, 3, 32)
    view = x.transpose(1, 0, 2)[:, ::-1, ::2]
    view.flags.writeable = False
    before = x.copy()
    ours = nn.transformer_layer(view, weights, backend=backend)
    np.testing.assert_array_equal(ours, nn.transformer_layer(view.copy(), weights, backend=backend))
    np.testing.assert_array_equal(x, before)


@pytest.mark.parametrize("shape", [(0, 16), (0, 5, 16), (2, 0, 16)], ids=str)
def test_layer_without_tokens_is_empty(shape, rng):
    weights = make_layer(rng, 16, 2, 24)
    assert nn.transformer_layer(np.empty(shape, np.float32), weights).shape == shape


# --- against torch ------------------------------------------------------------------------------


@pytest.mark.parametrize("norm_first", [False, True], ids=["post-norm", "pre-norm"])
@pytest.mark.parametrize("activation", ["gelu", "relu"])
def test_transformer_layer_matches_torch(activation, norm_first, torch, backend, rng):
    options = {"batch_first": True, "layer_norm_eps": 1e-6, "norm_first": norm_first}
    module = torch.nn.TransformerEncoderLayer(48, 6, 160, activation=activation, **options).eval()
    for parameter in module.parameters():  # biases start at 0, norms at 1: both would hide faults
        torch.nn.init.normal_(parameter, std=0.3)
    x = tokens_of(rng, 3, 21, 48)
    key_mask = np.arange(21) < np.array([[21], [1], [13]])
    with torch.no_grad():
        theirs = module(
            torch.from_numpy(x), src_key_padding_mask=torch.from_numpy(~key_mask)
        ).numpy()
    weights = nn.TransformerLayerWeights(
        attention=multihead_of(module.self_attn),
        attention_norm=norm_of(module.norm1),
        up=linear_of(module.linear1),
        down=linear_of(module.linear2),
        mlp_norm=norm_of(module.norm2),
        activation=activation,
        norm_first=norm_first,
    )
    ours = nn.transformer_layer(x, weights, key_mask=key_mask, backend=backend)
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=4e-6)


# --- errors -------------------------------------------------------------------------------------


def layer(**changes):
    parts = {
        "attention": nn.MultiHeadWeights(
            nn.LinearWeights(zeros(24, 8)), nn.LinearWeights(zeros(8, 8)), 2
        ),
        "attention_norm": nn.LayerNormWeights(zeros(8)),
        "up": nn.LinearWeights(zeros(32, 8)),
        "down": nn.LinearWeights(zeros(8, 32)),
        "mlp_norm": nn.LayerNormWeights(zeros(8)),
    }
    return nn.TransformerLayerWeights(**(parts | changes))


ERRORS = {
    "activation": (
        lambda: layer(activation="swish"),
        ValueError,
        "activation must be one of ('relu', 'gelu', 'gelu_tanh', 'silu'), got 'swish'",
    ),
    "gated": (
        lambda: layer(up=nn.LinearWeights(zeros(31, 8)), gated=True),
        ValueError,
        "up weight must have an even number of rows if gated, got 31",
    ),
    "gated-down": (
        lambda: layer(gated=True),
        ValueError,
        "down weight must have shape (8, 16) to fit the weights before it, got (8, 32)",
    ),
    "attention-norm": (
        lambda: layer(attention_norm=nn.LayerNormWeights(zeros(9))),
        ValueError,
        "attention_norm weight must have shape (8,) to fit the weights before it, got (9,)",
    ),
    "up": (
        lambda: layer(up=nn.LinearWeights(zeros(32, 9))),
        ValueError,
        "up weight must have shape (32, 8) to fit the weights before it, got (32, 9)",
    ),
    "down": (
        lambda: layer(down=nn.LinearWeights(zeros(8, 31))),
        ValueError,
        "down weight must have shape (8, 32) to fit the weights before it, got (8, 31)",
    ),
    "mlp-norm": (
        lambda: layer(mlp_norm=nn.LayerNormWeights(zeros(8, dtype=np.float64))),
        TypeError,
        "mlp_norm weight must have the dtype of qkv weight, float32, got float64",
    ),
}


@pytest.mark.parametrize(("call", "error", "message"), ERRORS.values(), ids=ERRORS)
def test_errors(call, error, message):
    with pytest.raises(error) as raised:
        call()
    assert str(raised.value).startswith(message)
