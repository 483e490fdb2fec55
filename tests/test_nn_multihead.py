"""nn.multihead_attention against its formula in float64, and against torch."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from nn_cases import (
    DTYPES,
    check_budget,
    make_multihead,
    make_separate,
    multihead_formula,
    multihead_of,
    tokens_of,
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


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize(("num_heads", "heads_kv"), [(6, 3), (4, 1), (9, 3)])
def test_grouped_heads(num_heads, heads_kv, causal, backend, rng):
    weights = make_multihead(rng, 24, num_heads, 8, heads_kv=heads_kv)
    x = tokens_of(rng, 2, 13, 24)
    key_mask = np.arange(13) < np.array([[13], [5]])
    ours = nn.multihead_attention(x, weights, causal=causal, key_mask=key_mask, backend=backend)
    check_budget(ours, multihead_formula, x, weights, causal=causal, key_mask=key_mask)


@pytest.mark.parametrize("dtype", DTYPES)
def test_sinks_and_an_extra_key(dtype, backend, rng):
    extra = tuple(tokens_of(rng, 2, 8, dtype=dtype) for _ in "kv")
    sinks = tokens_of(rng, 4, dtype=dtype)
    for more in ({"sinks": sinks}, {"extra": extra}, {"sinks": sinks, "extra": extra}):
        weights = make_multihead(rng, 24, 4, 8, dtype, heads_kv=2, **more)
        x = tokens_of(rng, 2, 13, 24, dtype=dtype)
        key_mask = np.arange(13) < np.array([[13], [5]])
        ours = nn.multihead_attention(x, weights, causal=True, key_mask=key_mask, backend=backend)
        check_budget(ours, multihead_formula, x, weights, causal=True, key_mask=key_mask)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_texts_without_padding(causal, backend, rng):
    weights = make_multihead(rng, 24, 6, 8, heads_kv=3)
    x, cuts = tokens_of(rng, 20, 24), [0, 7, 7, 8, 20]
    rope = nn.positions.Rope(8)
    where = np.concatenate([np.arange(b - a) for a, b in itertools.pairwise(cuts)])
    options = {"causal": causal, "backend": backend}
    together = nn.multihead_attention(
        x, weights, cu_seqlens=cuts, rotary=rope.rotation(where), **options
    )
    for a, b in itertools.pairwise(cuts):
        rotary = rope.rotation(np.arange(b - a))
        alone = nn.multihead_attention(x[a:b], weights, rotary=rotary, **options)
        np.testing.assert_allclose(together[a:b], alone, rtol=0, atol=4e-6)


def test_key_mask_joins_a_mask(backend, rng):
    weights, x = make_multihead(rng, 24, 4, 8), tokens_of(rng, 2, 13, 24)
    key_mask = np.arange(13) < np.array([[13], [5]])
    exact = nn.multihead_attention(x, weights, causal=True, key_mask=key_mask, backend=backend)
    for causal in (np.tri(13, dtype=bool), None):
        ours = nn.multihead_attention(
            x, weights, causal=causal is None, key_mask=key_mask, mask=causal, backend=backend
        )
        np.testing.assert_allclose(ours, exact, rtol=0, atol=1e-6)


# --- cross-attention ----------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_cross_attention(causal, backend, rng):
    weights = make_multihead(rng, 24, 4, 8, heads_kv=2)
    x, keys = tokens_of(rng, 2, 7, 24), tokens_of(rng, 2, 13, 24)
    key_mask = np.arange(13) < np.array([[13], [9]])
    for values in (None, tokens_of(rng, 2, 13, 24)):
        given = {"keys": keys, "values": values, "causal": causal, "key_mask": key_mask}
        ours = nn.multihead_attention(x, weights, backend=backend, **given)
        check_budget(ours, multihead_formula, x, weights, **given)


@pytest.mark.parametrize("dtype", DTYPES)
def test_maps_of_their_own(dtype, backend, rng):
    """Keys and values with other features than the tokens, and a head_dim_v."""
    weights = make_separate(rng, (24, 10, 14), 6, 3, 8, 5, dtype)
    assert (weights.model_dim, weights.head_dim, weights.head_dim_v) == (24, 8, 5)
    x = tokens_of(rng, 2, 7, 24, dtype=dtype)
    given = {"keys": tokens_of(rng, 2, 9, 10, dtype=dtype)}
    given["values"] = tokens_of(rng, 2, 9, 14, dtype=dtype)
    ours = nn.multihead_attention(x, weights, backend=backend, **given)
    check_budget(ours, multihead_formula, x, weights, **given)
    weights = make_separate(rng, (24, 24, 24), 6, 2, 8, 3, dtype)
    ours = nn.multihead_attention(x, weights, causal=True, backend=backend)
    check_budget(ours, multihead_formula, x, weights, causal=True)


@pytest.mark.parametrize("apart", [False, True], ids=["one-product", "apart"])
def test_keys_projected_once(apart, backend, rng):
    weights = make_multihead(rng, 16, 4, 8, heads_kv=2)
    if apart:
        weights = make_separate(rng, (16, 10, 10), 4, 2, 8, 6)
    x, keys = tokens_of(rng, 3, 5, 16), tokens_of(rng, 3, 8, 10 if apart else 16)
    key_mask = np.arange(8) < np.array([[8], [1], [4]])
    cache = nn.KVCache(2, 8, head_dim_v=weights.head_dim_v, batch=(3,))
    cache.append(*nn.project_keys(keys, weights))
    exact = nn.multihead_attention(x, weights, keys=keys, key_mask=key_mask, backend=backend)
    for _ in range(2):
        ours = nn.multihead_attention(x, weights, keys=cache, key_mask=key_mask, backend=backend)
        np.testing.assert_array_equal(ours, exact)
    assert cache.seqlen == 8


# --- positions and cache ------------------------------------------------------------------------


def turned(where, frequencies):
    """A function that turns the pairs (t, t + r / 2) of (..., tokens, r) as complex numbers."""

    def turn(a):
        half = a.shape[-1] // 2
        z = (a[..., :half] + 1j * a[..., half:]) * np.exp(1j * np.outer(where, frequencies))
        return np.concatenate([z.real, z.imag], axis=-1)

    return turn


@pytest.mark.parametrize("form", ["fused", "apart", "two"])
def test_rotary(form, backend, rng):
    weights = make_multihead(rng, 24, 4, 8, heads_kv=2)
    if form == "apart":
        weights = make_separate(rng, (24, 24, 24), 4, 2, 8, 8)
    x, where = tokens_of(rng, 2, 13, 24), np.arange(5, 18)
    rotation = nn.positions.Rope(8).rotation(where)
    rotary = (rotation, rotation) if form == "two" else rotation
    ours = nn.multihead_attention(x, weights, rotary=rotary, causal=True, backend=backend)
    turn = turned(where, 10000.0 ** (-np.arange(4) / 4))
    check_budget(ours, multihead_formula, x, weights, turn=turn, causal=True)


def in_parts(x, weights, cache, sizes, key_mask, backend):
    outs, start, rope = [], 0, nn.positions.Rope(8)
    for size in sizes:
        stop = start + size
        out = nn.multihead_attention(
            x[:, start:stop],
            weights,
            rotary=rope.rotation(np.arange(start, stop)),
            cache=cache,
            key_mask=key_mask[:, :stop],
            backend=backend,
        )
        outs.append(out)
        start = stop
    return np.concatenate(outs, axis=1)


@pytest.mark.parametrize("left", [None, 6])
@pytest.mark.parametrize("sizes", [[20], [9, 11], [5, *[1] * 15]], ids=["once", "chunks", "decode"])
def test_cache(sizes, left, backend, rng):
    """As without it; the projections are BLAS's, whose bits depend on the number of rows."""
    extra = tuple(tokens_of(rng, 2, 8) for _ in "kv")
    weights = make_multihead(rng, 24, 4, 8, heads_kv=2, extra=extra)
    x = tokens_of(rng, 3, 20, 24)
    key_mask = np.arange(20) >= np.array([[0], [3], [1]])  # padding on the left
    cache = nn.KVCache(2, 8, batch=(3,), left=left, reserve=4)
    ours = in_parts(x, weights, cache, sizes, key_mask, backend)
    rotation = nn.positions.Rope(8).rotation(np.arange(20))
    whole = nn.multihead_attention(
        x, weights, rotary=rotation, window=(left, 0), key_mask=key_mask, backend=backend
    )
    np.testing.assert_allclose(ours, whole, rtol=0, atol=2e-6)


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
