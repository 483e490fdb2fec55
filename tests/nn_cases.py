"""Formulas in float64, random layers, and error budgets for the tests of fastattn.nn."""

from __future__ import annotations

import math

import numpy as np

from fastattn import nn

DTYPES = (np.float32, np.float64)


def linear_formula(x, weights):
    y = x @ np.swapaxes(weights.weight.astype(x.dtype), 0, 1)
    return y if weights.bias is None else y + weights.bias.astype(x.dtype)


def norm_formula(x, weights):
    mean = x.mean(axis=-1, keepdims=True) if isinstance(weights, nn.LayerNormWeights) else 0
    variance = ((x - mean) ** 2).mean(axis=-1, keepdims=True)
    y = (x - mean) / np.sqrt(variance + x.dtype.type(weights.eps)) * weights.weight.astype(x.dtype)
    return y if weights.bias is None else y + weights.bias.astype(x.dtype)


def gelu_formula(x):
    erf = np.array([math.erf(value / math.sqrt(2)) for value in x.ravel().tolist()], x.dtype)
    return x * (1 + erf.reshape(x.shape)) / 2


def gelu_tanh_formula(x):
    return x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2


def silu_formula(x):
    return x / (1 + np.exp(-x))


ACTIVATION_FORMULAS = {
    "relu": lambda x: np.maximum(x, 0),
    "gelu": gelu_formula,
    "gelu_tanh": gelu_tanh_formula,
    "silu": silu_formula,
}


def multihead_formula(x, weights, causal=False, key_mask=None, keys=None, values=None, turn=None):
    """turn(q or k of one head) rotates it by the positions of its tokens."""
    keys = x if keys is None else keys.astype(x.dtype)
    values = keys if values is None else values.astype(x.dtype)
    q, k, v = (linear_formula(a, w) for a, w in zip((x, keys, values), parts(weights), strict=True))
    tokens, tokens_k, group = q.shape[-2], k.shape[-2], weights.num_heads // weights.heads_kv
    visible = np.ones((tokens, tokens_k), bool)
    visible = np.tri(tokens, tokens_k, tokens_k - tokens, bool) if causal else visible
    if key_mask is not None:
        visible = visible & key_mask[..., None, :]
    heads = []
    for h in range(weights.num_heads):
        qh = one_head(q, h, weights.head_dim)
        kh, vh = (
            one_head(a, h // group, w) for a, w in ((k, weights.head_dim), (v, weights.head_dim_v))
        )
        if turn is not None:
            qh, kh = turn(qh).astype(x.dtype), turn(kh).astype(x.dtype)
        scores = np.where(
            visible, qh @ np.swapaxes(kh, -1, -2) / math.sqrt(weights.head_dim), -np.inf
        )
        more, more_v = additions(qh, h, weights)
        p = np.exp(np.concatenate([scores, more], axis=-1))
        p /= p.sum(axis=-1, keepdims=True)
        heads.append(p[..., :tokens_k] @ vh + p[..., tokens_k:] @ more_v)
    return linear_formula(np.concatenate(heads, axis=-1), weights.out)


def parts(weights):
    """The three maps, cut out here and not by the weights themselves."""
    if not isinstance(weights.qkv, nn.LinearWeights):
        return weights.qkv
    rows = weights.qkv.weight.shape[0] // (weights.num_heads + 2 * weights.heads_kv)
    cuts = np.array([weights.num_heads, weights.num_heads + weights.heads_kv]) * rows
    bias = weights.qkv.bias
    biases = [None] * 3 if bias is None else np.split(bias, cuts)
    return [
        nn.LinearWeights(*a) for a in zip(np.split(weights.qkv.weight, cuts), biases, strict=True)
    ]


def one_head(a, h, width):
    return a[..., h * width : (h + 1) * width]


def additions(q, h, weights):
    """Scores and values of the sink and of the extra key of head h."""
    scores, values = [], []
    if weights.sinks is not None:
        scores.append(np.full((*q.shape[:-1], 1), weights.sinks[h], q.dtype))
        values.append(np.zeros(weights.head_dim_v, q.dtype))
    if weights.extra is not None:
        k, v = (
            a[h // (weights.num_heads // weights.heads_kv)].astype(q.dtype) for a in weights.extra
        )
        scores.append((q @ k / math.sqrt(weights.head_dim))[..., None])
        values.append(v)
    if not scores:
        return np.empty((*q.shape[:-1], 0), q.dtype), np.empty((0, weights.head_dim_v), q.dtype)
    return np.concatenate(scores, axis=-1), np.stack(values)


def transformer_formula(x, weights, **options):
    def attended(x):
        return multihead_formula(x, weights.attention, **options)

    def processed(x):
        hidden, activation = linear_formula(x, weights.up), ACTIVATION_FORMULAS[weights.activation]
        if weights.gated:
            gate, up = np.split(hidden, 2, axis=-1)
            return linear_formula(activation(gate) * up, weights.down)
        return linear_formula(activation(hidden), weights.down)

    if weights.norm_first:
        x = x + attended(norm_formula(x, weights.attention_norm))
        return x + processed(norm_formula(x, weights.mlp_norm))
    x = norm_formula(x + attended(x), weights.attention_norm)
    return norm_formula(x + processed(x), weights.mlp_norm)


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


def make_norm(rng, features, dtype=np.float32, bias=True, eps=1e-5, rms=False):
    weight = rng.uniform(0.5, 1.5, features).astype(dtype)
    if rms:
        return nn.RMSNormWeights(weight, eps)
    shift = rng.standard_normal(features).astype(dtype) if bias else None
    return nn.LayerNormWeights(weight, shift, eps)


def make_multihead(
    rng, model_dim, num_heads, head_dim, dtype=np.float32, bias=True, heads_kv=None, **more
):
    rows = (num_heads + 2 * (heads_kv or num_heads)) * head_dim
    return nn.MultiHeadWeights(
        qkv=make_linear(rng, rows, model_dim, dtype, bias),
        out=make_linear(rng, model_dim, num_heads * head_dim, dtype, bias),
        num_heads=num_heads,
        num_heads_kv=heads_kv,
        **more,
    )


def make_separate(rng, dims, num_heads, heads_kv, head_dim, head_dim_v, dtype=np.float32):
    """Maps of queries, keys and values of dims features: model_dim and those of keys and values."""
    rows = (num_heads * head_dim, heads_kv * head_dim, heads_kv * head_dim_v)
    qkv = tuple(make_linear(rng, r, d, dtype) for r, d in zip(rows, dims, strict=True))
    out = make_linear(rng, dims[0], num_heads * head_dim_v, dtype)
    return nn.MultiHeadWeights(qkv, out, num_heads, heads_kv)


def make_layer(
    rng, model_dim, num_heads, hidden_dim, dtype=np.float32, rms=False, gated=False, **options
):
    return nn.TransformerLayerWeights(
        attention=make_multihead(rng, model_dim, num_heads, model_dim // num_heads, dtype),
        attention_norm=make_norm(rng, model_dim, dtype, rms=rms),
        up=make_linear(rng, (1 + gated) * hidden_dim, model_dim, dtype),
        down=make_linear(rng, model_dim, hidden_dim, dtype),
        mlp_norm=make_norm(rng, model_dim, dtype, rms=rms),
        gated=gated,
        **options,
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
