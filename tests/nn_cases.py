"""Formulas in float64, random layers, and error budgets for the tests of fastattn.nn."""

from __future__ import annotations

import math

import numpy as np

from fastattn import nn

DTYPES = (np.float32, np.float64)


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


def zeros(*shape, dtype=np.float32):
    return np.zeros(shape, dtype)


def linear_of(module):
    return nn.LinearWeights(module.weight.detach().numpy(), module.bias.detach().numpy())


def norm_of(module):
    weight, bias = module.weight.detach().numpy(), module.bias.detach().numpy()
    return nn.LayerNormWeights(weight, bias, module.eps)


def multihead_of(module):
    bias = module.in_proj_bias.detach().numpy()
    qkv = nn.LinearWeights(module.in_proj_weight.detach().numpy(), bias)
    return nn.MultiHeadWeights(qkv, linear_of(module.out_proj), module.num_heads)
