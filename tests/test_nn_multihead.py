"""nn.multihead_attention against its formula in float64, and against torch."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from nn_cases import (
    DTYPES,
    check_budget,
    make_multihead,
    multihead_formula,
    multihead_of,
    tokens_of,
    zeros,
)

from fastattn import nn


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


def test_causal_tokens_do_not_see_later_ones(backend, rng):
    weights = make_multihead(rng, 16, 2, 8)
    x = tokens_of(rng, 12, 16)
    before = nn.multihead_attention(x, weights, causal=True, backend=backend)
    x[7:] = 100
    after = nn.multihead_attention(x, weights, causal=True, backend=backend)
    np.testing.assert_array_equal(before[:7], after[:7])
    assert np.abs(before[7:] - after[7:]).max() > 1


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


# --- errors -------------------------------------------------------------------------------------


def multihead(qkv=(24, 8), out=(8, 8), num_heads=2, dtype=np.float32):
    weights = nn.LinearWeights(zeros(*qkv)), nn.LinearWeights(zeros(*out, dtype=dtype))
    return nn.MultiHeadWeights(*weights, num_heads)


def attend(x=None, **options):
    return nn.multihead_attention(zeros(2, 5, 8) if x is None else x, multihead(), **options)


ERRORS = {
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
}


@pytest.mark.parametrize(("call", "error", "message"), ERRORS.values(), ids=ERRORS)
def test_errors(call, error, message):
    with pytest.raises(error) as raised:
        call()
    assert str(raised.value).startswith(message)


def test_weights_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        multihead().num_heads = 4
