"""The layers' gradients are finite differences, by x and by every parameter."""

from __future__ import annotations

from dataclasses import fields, is_dataclass

import numpy as np
import pytest
from nn_cases import make_layer, make_linear, make_norm

from fastattn import nn

F8 = np.float64
FORMS = [
    {"activation": "gelu"},
    {"activation": "relu"},
    {"activation": "gelu_tanh", "norm_first": True},
    {"activation": "silu", "norm_first": True, "gated": True, "rms": True},
    {"activation": "gelu", "gated": True},
]


def arrays_of(record):
    """The arrays of a record of parameters, each once."""
    if isinstance(record, np.ndarray):
        return [record]
    if isinstance(record, tuple):
        return [a for part in record for a in arrays_of(part)]
    if not is_dataclass(record):
        return []
    return [a for f in fields(record) if f.init for a in arrays_of(getattr(record, f.name))]


def differentiate(forward, backward, x, weights, atol=1e-7):
    """Hold backward(dy, x, weights) against differences of forward(x, weights)."""
    rng = np.random.default_rng(1)
    dy = rng.standard_normal(forward(x, weights).shape)
    dx, dweights = backward(dy, x, weights)
    assert type(dweights) is type(weights)
    given, found = [x, *arrays_of(weights)], [dx, *arrays_of(dweights)]
    assert len(given) == len(found)
    for a, gradient in zip(given, found, strict=True):
        assert gradient.shape == a.shape
        before, step = a.copy(), rng.standard_normal(a.shape)
        losses = []
        for size in (1e-6, -1e-6):
            a[...] = before + size * step
            losses.append((forward(x, weights) * dy).sum())
        a[...] = before
        difference, slope = (losses[0] - losses[1]) / 2e-6, (gradient * step).sum()
        assert abs(difference - slope) <= atol * max(1, abs(slope), abs(gradient).max())
        assert gradient.any()


@pytest.mark.parametrize("bias", [True, False])
def test_linear(bias, rng):
    x, weights = rng.standard_normal((2, 5, 7)), make_linear(rng, 4, 7, F8, bias=bias)
    differentiate(nn.linear, nn.linear_backward, x, weights)
    differentiate(nn.linear, nn.linear_backward, x[0, 0], weights)


@pytest.mark.parametrize("form", [{}, {"bias": False}, {"rms": True}], ids=str)
def test_norms(form, rng):
    weights = make_norm(rng, 7, F8, **form)
    forward = nn.rms_norm if "rms" in form else nn.layer_norm
    differentiate(forward, nn.norm_backward, rng.standard_normal((2, 5, 7)) * 3 + 1, weights)


@pytest.mark.parametrize("name", ["relu", "gelu", "gelu_tanh", "silu"])
@pytest.mark.parametrize("dtype", [np.float32, F8])
def test_activations(name, dtype):
    x = np.concatenate([np.linspace(-9, 9, 400), [-60, -1e-9, 1e-9, 60]])
    exact = (nn.activate(name, x + 1e-6) - nn.activate(name, x - 1e-6)) / 2e-6
    exact[np.abs(x) < 1e-6] = 0
    x = x.astype(dtype)
    found = nn.activate_backward(name, np.full_like(x, 2), x)
    assert found.dtype == dtype
    found[np.abs(x) < 1e-6] = 0
    np.testing.assert_allclose(found, 2 * exact, rtol=0, atol=1e-5 if dtype == np.float32 else 1e-8)


@pytest.mark.parametrize("name", ["gelu", "gelu_tanh", "silu"])
def test_activations_at_their_ends(name):
    x = np.array([0.0, -0.0, 1e-310, np.inf, 700.0, -700.0, -np.inf])
    found = nn.activate_backward(name, np.ones_like(x), x)
    np.testing.assert_allclose(found, [0.5, 0.5, 0.5, 1, 1, 0, 0], rtol=1e-12, atol=1e-300)
    assert np.isnan(nn.activate_backward(name, x[:1] * 0 + 1, np.array([np.nan]))).all()


HEADS = [
    {},
    {"num_heads_kv": 2},
    {"sinks": True},
    {"separate": True, "num_heads_kv": 1},
]


@pytest.mark.parametrize("form", HEADS, ids=str)
def test_multihead_attention(form, rng):
    x, form = rng.standard_normal((2, 9, 16)), dict(form)
    heads_kv, head_dim = form.pop("num_heads_kv", 4), 4
    rows = (4 * head_dim, heads_kv * head_dim, heads_kv * head_dim)
    if form.pop("separate", False):
        qkv = tuple(make_linear(rng, n, 16, F8) for n in rows)
    else:
        qkv = make_linear(rng, sum(rows), 16, F8)
    sinks = rng.standard_normal(4) if form else None
    weights = nn.MultiHeadWeights(qkv, make_linear(rng, 16, 16, F8), 4, heads_kv, sinks)
    options = {"causal": True, "key_mask": np.arange(9) < np.array([[9], [5]])}
    options["mask"] = rng.random((9, 9)) < 0.8
    differentiate(
        lambda x, w: nn.multihead_attention(x, w, **options),
        lambda dy, x, w: nn.multihead_attention_backward(dy, x, w, **options),
        x,
        weights,
    )


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_transformer_layer(form, rng):
    weights = make_layer(rng, 16, 4, 24, dtype=F8, **form)
    differentiate(
        lambda x, w: nn.transformer_layer(x, w, causal=True, window=(5, 0)),
        lambda dy, x, w: nn.transformer_layer_backward(dy, x, w, causal=True, window=(5, 0)),
        rng.standard_normal((2, 9, 16)),
        weights,
    )


def test_backends_agree(rng):
    pytest.importorskip("numba")
    weights, x = make_layer(rng, 32, 4, 64, norm_first=True), rng.standard_normal((2, 40, 32))
    x = x.astype(np.float32)
    pairs = [nn.transformer_layer_backward(x, x, weights, backend=b) for b in ("numpy", "cpu")]
    for a, b in zip(*([dx, *arrays_of(dw)] for dx, dw in pairs), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=2e-5 * np.abs(b).max())


def test_a_key_mask_beside_no_mask(rng):
    x, weights = rng.standard_normal((2, 5, 16)), make_layer(rng, 16, 4, 24, dtype=F8)
    given = (x, x, weights.attention)
    mask = np.arange(5) < np.array([[5], [3]])
    dx, _ = nn.multihead_attention_backward(*given, key_mask=mask, mask=None)
    same, _ = nn.multihead_attention_backward(*given, mask=mask[:, None, None])
    np.testing.assert_array_equal(dx, same)


def test_wrong_arguments(rng):
    x, weights = rng.standard_normal((2, 5, 16)), make_linear(rng, 16, 16, F8)
    with pytest.raises(ValueError, match=r"dy must have the shape of the result, \(2, 5, 16\)"):
        nn.linear_backward(x[0], x, weights)
    with pytest.raises(TypeError, match="dy must have the dtype of the result, float64"):
        nn.norm_backward(x.astype(np.float32), x, make_norm(rng, 16, F8))
    with pytest.raises(ValueError, match="name must be one of"):
        nn.activate_backward("swish", x, x)
    extra = (np.ones((4, 4)), np.ones((4, 4)))
    heads = nn.MultiHeadWeights(make_linear(rng, 48, 16, F8), weights, 4, extra=extra)
    with pytest.raises(NotImplementedError, match=r"weights\.extra must be None"):
        nn.multihead_attention_backward(x, x, heads)
