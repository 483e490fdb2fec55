"""The layers of fastattn.nn against their formulas in float64, and against torch."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from fastattn import nn
from fastattn.nn import activations

DTYPES = (np.float32, np.float64)


# --- the formulas, in the dtype of what they are given ------------------------------------------


def linear_formula(x, weights):
    y = x @ np.swapaxes(weights.weight.astype(x.dtype), 0, 1)
    return y if weights.bias is None else y + weights.bias.astype(x.dtype)


def layer_norm_formula(x, weights):
    mean = x.mean(axis=-1, keepdims=True)
    variance = ((x - mean) ** 2).mean(axis=-1, keepdims=True)
    y = (x - mean) / np.sqrt(variance + x.dtype.type(weights.eps)) * weights.weight.astype(x.dtype)
    return y if weights.bias is None else y + weights.bias.astype(x.dtype)


def gelu_formula(x):
    erf = np.array([math.erf(value / math.sqrt(2)) for value in x.ravel().tolist()], x.dtype)
    return x * (1 + erf.reshape(x.shape)) / 2


def multihead_formula(x, weights, causal=False, key_mask=None):
    q, k, v = np.split(linear_formula(x, weights.qkv), 3, axis=-1)
    tokens, head_dim = x.shape[-2], weights.head_dim
    visible = np.tri(tokens, dtype=bool) if causal else np.ones((tokens, tokens), bool)
    if key_mask is not None:
        visible = visible & key_mask[..., None, :]
    heads = []
    for h in range(weights.num_heads):
        of_head = np.s_[..., h * head_dim : (h + 1) * head_dim]
        scores = q[of_head] @ np.swapaxes(k[of_head], -1, -2) / math.sqrt(head_dim)
        p = np.exp(scores - scores.max(axis=-1, keepdims=True)) * visible
        heads.append(p / p.sum(axis=-1, keepdims=True) @ v[of_head])
    return linear_formula(np.concatenate(heads, axis=-1), weights.out)


def transformer_formula(x, weights, **options):
    x = layer_norm_formula(
        x + multihead_formula(x, weights.attention, **options), weights.attention_norm
    )
    hidden = linear_formula(x, weights.up)
    hidden = gelu_formula(hidden) if weights.activation == "gelu" else np.maximum(hidden, 0)
    return layer_norm_formula(x + linear_formula(hidden, weights.down), weights.mlp_norm)


def check_budget(ours, formula, x, *arguments, **options):
    """ours errs at most twice as much as the formula in the same dtype, plus a rounding floor."""
    exact = formula(x.astype(np.float64), *arguments, **options)
    plain = formula(x, *arguments, **options)
    floor = 4 * np.finfo(x.dtype).eps * np.abs(exact).max(initial=0)
    assert ours.dtype == x.dtype
    assert ours.shape == exact.shape
    error = np.abs(ours - exact).max(initial=0)
    assert error <= 2 * np.abs(plain - exact).max(initial=0) + floor


# --- random layers ------------------------------------------------------------------------------


def make_linear(rng, out_features, in_features, dtype=np.float32, bias=True):
    weight = rng.standard_normal((out_features, in_features)) / math.sqrt(in_features)
    shift = rng.standard_normal(out_features).astype(dtype) if bias else None
    return nn.LinearWeights(weight.astype(dtype), shift)


def make_norm(rng, features, dtype=np.float32, bias=True, eps=1e-5):
    weight = rng.uniform(0.5, 1.5, features).astype(dtype)
    shift = rng.standard_normal(features).astype(dtype) if bias else None
    return nn.LayerNormWeights(weight, shift, eps)


def make_multihead(rng, model_dim, num_heads, head_dim, dtype=np.float32, bias=True):
    return nn.MultiHeadWeights(
        qkv=make_linear(rng, 3 * num_heads * head_dim, model_dim, dtype, bias),
        out=make_linear(rng, model_dim, num_heads * head_dim, dtype, bias),
        num_heads=num_heads,
    )


def make_layer(rng, model_dim, num_heads, hidden_dim, dtype=np.float32, activation="gelu"):
    return nn.TransformerLayerWeights(
        attention=make_multihead(rng, model_dim, num_heads, model_dim // num_heads, dtype),
        attention_norm=make_norm(rng, model_dim, dtype),
        up=make_linear(rng, hidden_dim, model_dim, dtype),
        down=make_linear(rng, model_dim, hidden_dim, dtype),
        mlp_norm=make_norm(rng, model_dim, dtype),
        activation=activation,
    )


def tokens_of(rng, *shape, dtype=np.float32):
    return rng.standard_normal(shape).astype(dtype)


# --- activations --------------------------------------------------------------------------------


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


# --- linear and layer_norm ----------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(5,), (7, 5), (2, 3, 7, 5), (0, 5), (2, 0, 5)], ids=str)
def test_linear(shape, bias, dtype, rng):
    weights = make_linear(rng, 11, 5, dtype, bias)
    x = tokens_of(rng, *shape, dtype=dtype)
    check_budget(nn.linear(x, weights), linear_formula, x, weights)


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


# --- multi-head attention and the layer ---------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize(
    ("shape", "num_heads", "head_dim"),
    [((1, 8), 2, 4), ((33, 8), 1, 8), ((2, 17, 24), 3, 8), ((2, 3, 5, 12), 4, 5)],
    ids=str,
)
def test_multihead_attention(shape, num_heads, head_dim, causal, dtype, backend, rng):
    weights = make_multihead(rng, shape[-1], num_heads, head_dim, dtype, bias=not causal)
    x = tokens_of(rng, *shape, dtype=dtype)
    ours = nn.multihead_attention(x, weights, causal=causal, backend=backend)
    check_budget(ours, multihead_formula, x, weights, causal=causal)


@pytest.mark.parametrize("activation", ["gelu", "relu"])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_transformer_layer(activation, causal, backend, rng):
    weights = make_layer(rng, 32, 4, 80, activation=activation)
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


def test_causal_tokens_do_not_see_later_ones(backend, rng):
    weights = make_multihead(rng, 16, 2, 8)
    x = tokens_of(rng, 12, 16)
    before = nn.multihead_attention(x, weights, causal=True, backend=backend)
    x[7:] = 100
    after = nn.multihead_attention(x, weights, causal=True, backend=backend)
    np.testing.assert_array_equal(before[:7], after[:7])
    assert np.abs(before[7:] - after[7:]).max() > 1


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


def test_heads_are_views_of_one_product(monkeypatch, rng):
    """q, k, v and the output reach the core as they lie in memory: no head is copied."""
    seen = {}
    core, project = nn.multihead.attention, nn.multihead.linear

    def spy_core(q, k, v, **options):
        seen.update(q=q, k=k, v=v, out=options["out"])
        return core(q, k, v, **options)

    def spy_linear(x, weights):
        seen.setdefault("projection", project(x, weights))
        return seen["projection"] if weights is multihead.qkv else project(x, weights)

    multihead = make_multihead(rng, 24, 3, 8)
    monkeypatch.setattr(nn.multihead, "attention", spy_core)
    monkeypatch.setattr(nn.multihead, "linear", spy_linear)
    nn.multihead_attention(tokens_of(rng, 2, 6, 24), multihead)
    assert all(np.shares_memory(seen[name], seen["projection"]) for name in "qkv")
    assert seen["out"].strides == np.empty((2, 6, 3, 8), np.float32).swapaxes(1, 2).strides


# --- against torch ------------------------------------------------------------------------------


@pytest.fixture
def torch():
    torch = pytest.importorskip("torch")
    fast_path = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)  # it warns of nested tensors
    torch.manual_seed(0)
    yield torch
    torch.backends.mha.set_fastpath_enabled(fast_path)


def linear_of(module):
    return nn.LinearWeights(module.weight.detach().numpy(), module.bias.detach().numpy())


def norm_of(module):
    weight, bias = module.weight.detach().numpy(), module.bias.detach().numpy()
    return nn.LayerNormWeights(weight, bias, module.eps)


def multihead_of(module):
    bias = module.in_proj_bias.detach().numpy()
    qkv = nn.LinearWeights(module.in_proj_weight.detach().numpy(), bias)
    return nn.MultiHeadWeights(qkv, linear_of(module.out_proj), module.num_heads)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_multihead_attention_matches_torch(causal, torch, backend, rng):
    module = torch.nn.MultiheadAttention(48, 6, batch_first=True)
    torch.nn.init.normal_(module.in_proj_bias)
    x = tokens_of(rng, 3, 21, 48)
    key_mask = np.arange(21) < np.array([[21], [1], [13]])
    hidden = torch.from_numpy(~np.tri(21, dtype=bool)) if causal else None
    with torch.no_grad():
        theirs, _ = module(
            *[torch.from_numpy(x)] * 3,
            key_padding_mask=torch.from_numpy(~key_mask),
            attn_mask=hidden,
            need_weights=False,
        )
    ours = nn.multihead_attention(
        x, multihead_of(module), causal=causal, key_mask=key_mask, backend=backend
    )
    np.testing.assert_allclose(ours, theirs.numpy(), rtol=0, atol=2e-6)


@pytest.mark.parametrize("activation", ["gelu", "relu"])
def test_transformer_layer_matches_torch(activation, torch, backend, rng):
    module = torch.nn.TransformerEncoderLayer(
        48, 6, 160, activation=activation, batch_first=True, layer_norm_eps=1e-6
    ).eval()
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
    )
    ours = nn.transformer_layer(x, weights, key_mask=key_mask, backend=backend)
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=4e-6)


# --- errors -------------------------------------------------------------------------------------


def zeros(*shape, dtype=np.float32):
    return np.zeros(shape, dtype)


def multihead(qkv=(24, 8), out=(8, 8), num_heads=2, dtype=np.float32):
    weights = nn.LinearWeights(zeros(*qkv)), nn.LinearWeights(zeros(*out, dtype=dtype))
    return nn.MultiHeadWeights(*weights, num_heads)


def layer(**changes):
    parts = {
        "attention": multihead(),
        "attention_norm": nn.LayerNormWeights(zeros(8)),
        "up": nn.LinearWeights(zeros(32, 8)),
        "down": nn.LinearWeights(zeros(8, 32)),
        "mlp_norm": nn.LayerNormWeights(zeros(8)),
    }
    return nn.TransformerLayerWeights(**(parts | changes))


def attend(x=None, **options):
    return nn.multihead_attention(zeros(2, 5, 8) if x is None else x, multihead(), **options)


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
    "num-heads": (
        lambda: multihead(num_heads=0),
        ValueError,
        "num_heads must be at least 1, got 0",
    ),
    "qkv-rows": (
        lambda: multihead(num_heads=5),
        ValueError,
        "qkv weight must have a multiple of 3 * num_heads = 15 rows, got shape (24, 8)",
    ),
    "out-shape": (
        lambda: multihead(out=(8, 6)),
        ValueError,
        "out weight must have shape (8, 8) to fit qkv weight (24, 8), got (8, 6)",
    ),
    "out-dtype": (
        lambda: multihead(dtype=np.float64),
        TypeError,
        "out weight must have the dtype of qkv weight, float32, got float64",
    ),
    "x-features": (
        lambda: attend(zeros(2, 5, 9)),
        ValueError,
        "x must have shape (..., 8) to fit weights of shape (24, 8), got (2, 5, 9)",
    ),
    "x-rank": (
        lambda: attend(zeros(8)),
        ValueError,
        "x must have shape (..., tokens, model_dim), got (8,)",
    ),
    "x-dtype": (
        lambda: attend(zeros(2, 5, 8, dtype=np.float64)),
        TypeError,
        "x must have the dtype of the weights, float32, got float64",
    ),
    "key-mask-dtype": (
        lambda: attend(key_mask=np.ones((2, 5), np.int64)),
        TypeError,
        "key_mask must be bool, got int64",
    ),
    "key-mask-shape": (
        lambda: attend(key_mask=np.ones((5,), bool)),
        ValueError,
        "key_mask must have the shape of x without its last dimension, (2, 5), got (5,)",
    ),
    "backend": (
        lambda: attend(backend="gpu"),
        ValueError,
        "backend must be one of",
    ),
    "activation": (
        lambda: layer(activation="swish"),
        ValueError,
        "activation must be one of ('gelu', 'relu'), got 'swish'",
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


def test_weights_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        multihead().num_heads = 4
