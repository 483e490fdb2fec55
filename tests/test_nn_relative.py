"""Relative encodings that are part of the scores, against plain loops and transformers."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from nn_cases import DTYPES, tokens_of, zeros

import fastattn
from fastattn import nn
from fastattn.nn import positions
from fastattn.nn.positions import transformer_xl


def softmax(scores):
    """Over the last axis; rows without a finite score are 0."""
    top = np.where(np.isfinite(scores.max(axis=-1)), scores.max(axis=-1), 0)[..., None]
    p = np.exp(scores - top)
    total = p.sum(axis=-1, keepdims=True)
    return np.divide(p, total, out=np.zeros_like(p), where=total > 0)


def visible_pairs(tokens, tokens_k, offset, causal, left=None):
    distance = np.arange(tokens)[:, None] + offset - np.arange(tokens_k)
    visible = np.ones(distance.shape, bool)
    if causal:
        visible &= distance >= 0
    if left is not None:
        visible &= distance <= left
    return visible


def check(ours, exact, slack=40):
    assert ours.shape == exact.shape
    floor = slack * np.finfo(ours.dtype).eps * max(np.abs(exact).max(initial=0), 1)
    assert np.abs(ours - exact).max(initial=0) <= floor


# --- ALiBi and T5 -------------------------------------------------------------------------------


@pytest.mark.parametrize("num_heads", [1, 2, 8, 12, 20, 64, 71])
def test_alibi_slopes_match_transformers(num_heads):
    torch = pytest.importorskip("torch")
    bloom = pytest.importorskip("transformers.models.bloom.modeling_bloom")
    theirs = bloom.build_alibi_tensor(torch.ones(1, 2), num_heads, torch.float32)[:, 0, 1]
    ours = positions.alibi_slopes(num_heads)
    assert ours.dtype == np.float32
    np.testing.assert_allclose(ours, theirs.numpy(), rtol=1e-6)


def test_alibi_slopes_of_twelve_heads_are_the_papers():
    slopes = positions.alibi_slopes(12, float)
    exact = [*(0.5**n for n in range(1, 9)), *(0.5 ** (n + 0.5) for n in range(4))]
    np.testing.assert_allclose(slopes, exact, rtol=1e-14)


@pytest.mark.parametrize("bidirectional", [True, False], ids=["encoder", "decoder"])
def test_t5_layer_matches_transformers(bidirectional, torch, rng):
    """The whole attention of a T5 stack's first layer, on arrays of its own parameters."""
    t5 = pytest.importorskip("transformers.models.t5.modeling_t5")
    import transformers

    config = transformers.T5Config(d_model=24, d_kv=8, num_heads=4, is_decoder=not bidirectional)
    layer = t5.T5Attention(config, has_relative_attention_bias=True, layer_idx=0).eval()
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    x = tokens_of(rng, 2, 200, 24)
    hidden = np.zeros((1, 1, 200, 200), np.float32)
    if not bidirectional:
        hidden[..., ~np.tri(200, dtype=bool)] = np.finfo(np.float32).min
    with torch.no_grad():
        theirs = layer(torch.from_numpy(x), mask=torch.from_numpy(hidden))[0].numpy()
    state = layer.state_dict()
    weights = nn.load_multihead(state, 4, names=("q", "k", "v", "o"))
    table = state["relative_attention_bias.weight"].numpy()
    more = positions.t5_arguments(table, 200, 200, bidirectional=bidirectional)
    ours = nn.multihead_attention(
        x, weights, scale=1, causal=not bidirectional, backend="numpy", **more
    )
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=2e-5)


def test_t5_decoding_with_a_cache(rng):
    weight = tokens_of(rng, 32, 4)
    q, k, v = tokens_of(rng, 3, 4, 150, 8)
    more = positions.t5_arguments(weight, 150, 150, bidirectional=False)
    whole = fastattn.attention(q, k, v, causal=True, backend="numpy", **more)
    cache = nn.KVCache(4, 8)
    for start, stop in [(0, 140), (140, 149), (149, 150)]:
        more = positions.t5_arguments(
            weight, stop - start, stop, bidirectional=False, first_query=start
        )
        part = np.s_[:, start:stop]
        ours = cache.attend(q[part], k[part], v[part], backend="numpy", **more)
        check(ours, whole[part])


# --- Shaw ---------------------------------------------------------------------------------------


def shaw_formula(q, k, v, key_table, value_table, offset, visible):
    """In float64, with every vector of every pair (Shaw et al., equations 3 and 4)."""
    q, k, v = (a.astype(np.float64) for a in (q, k, v))
    group = q.shape[-3] // k.shape[-3]
    k, v = (np.repeat(a, group, axis=-3) for a in (k, v))
    tokens, tokens_k = q.shape[-2], k.shape[-2]
    scores = q @ k.swapaxes(-1, -2)
    radius = len((key_table if key_table is not None else value_table).swapaxes(0, -2)) // 2
    distance = np.arange(tokens_k) - np.arange(tokens)[:, None] - offset
    place = np.clip(distance, -radius, radius) + radius
    if key_table is not None:
        a = key_table.astype(np.float64)[..., place, :]
        scores = scores + np.einsum(
            "...hid,...ijd->...hij" if a.ndim == 3 else "...hid,hijd->...hij", q, a
        )
    p = softmax(np.where(visible, scores / np.sqrt(q.shape[-1]), -np.inf))
    out = p @ v
    if value_table is not None:
        c = value_table.astype(np.float64)[..., place, :]
        out += np.einsum("...hij,...ijd->...hid" if c.ndim == 3 else "...hij,hijd->...hid", p, c)
    return out


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("terms", ["both", "keys", "values", "both-by-head"])
def test_shaw(terms, causal, dtype, backend, rng):
    tokens, tokens_k, radius = 30, 37, 4
    q = tokens_of(rng, 2, 4, tokens, 8, dtype=dtype)
    k, v = (tokens_of(rng, 2, 2, tokens_k, w, dtype=dtype) for w in (8, 5))
    heads = (4,) if terms == "both-by-head" else ()
    tables = [tokens_of(rng, *heads, 2 * radius + 1, w, dtype=dtype) for w in (8, 5)]
    tables = [tables[0], None] if terms == "keys" else tables
    tables = [None, tables[1]] if terms == "values" else tables
    mask = rng.random((2, 1, tokens, tokens_k)) < 0.8
    mask[0, 0, 3] = False
    ours = positions.shaw_attention(q, k, v, *tables, causal=causal, mask=mask, backend=backend)
    visible = visible_pairs(tokens, tokens_k, 7, causal) & mask
    check(ours, shaw_formula(q, k, v, *tables, 7, visible))


@pytest.mark.parametrize("radius", [1, 3, 60])
@pytest.mark.parametrize(
    ("tokens", "tokens_k", "offset"), [(1, 1, 0), (5, 70, 65), (40, 3, -9), (50, 50, 4)]
)
def test_shaw_radius_and_offset(tokens, tokens_k, offset, radius, backend, rng):
    q, k, v = (tokens_of(rng, 3, n, 6) for n in (tokens, tokens_k, tokens_k))
    tables = [tokens_of(rng, 2 * radius + 1, 6) for _ in "kv"]
    for causal in (False, True):
        visible = visible_pairs(tokens, tokens_k, offset, causal)
        ours = positions.shaw_attention(
            q, k, v, *tables, causal=causal, offset=offset, backend=backend
        )
        check(ours, shaw_formula(q, k, v, *tables, offset, visible))


def test_shaw_matches_transformers(torch, rng):
    """Wav2Vec2-BERT has the key term, with other limits on each side; equal here."""
    module = pytest.importorskip("transformers.models.wav2vec2_bert.modeling_wav2vec2_bert")
    import transformers

    config = transformers.Wav2Vec2BertConfig(
        hidden_size=24,
        num_attention_heads=3,
        position_embeddings_type="relative_key",
        left_max_position_embeddings=5,
        right_max_position_embeddings=5,
        attention_dropout=0.0,
    )
    layer = module.Wav2Vec2BertSelfAttention(config).eval()
    torch.nn.init.normal_(layer.distance_embedding.weight)
    x = tokens_of(rng, 2, 40, 24)
    with torch.no_grad():
        theirs = layer(torch.from_numpy(x))[0].numpy()
    names = ("linear_q", "linear_k", "linear_v", "linear_out")
    weights = nn.load_multihead(layer.state_dict(), 3, names=names)
    q, k, v = nn.project_heads(x, weights)
    table = layer.distance_embedding.weight.detach().numpy()
    ours = nn.join_heads(positions.shaw_attention(q, k, v, table), weights)
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=2e-6)


# --- Transformer-XL -----------------------------------------------------------------------------


def transformer_xl_formula(q, k, v, r, u, w, zero, offset, visible):
    """The four terms of the paper's section 3.3, in float64 and pair by pair."""
    q, k, v, r, u, w = (a.astype(np.float64) for a in (q, k, v, r, u, w))
    distance = np.arange(q.shape[-2])[:, None] + offset - np.arange(k.shape[-2])
    of_pair = r[:, np.clip(distance + zero, 0, r.shape[1] - 1)]  # (heads, i, j, head_dim)
    scores = np.einsum("...hid,...hjd->...hij", q, k) + np.einsum("...hid,hijd->...hij", q, of_pair)
    scores += np.einsum("hd,...hjd->...hj", u, k)[..., None, :]
    scores += np.einsum("hd,hijd->hij", w, of_pair)
    return softmax(np.where(visible, scores / np.sqrt(q.shape[-1]), -np.inf)) @ v


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("left", [None, 9])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("rows", [1, 7, 100])
def test_transformer_xl(rows, causal, left, dtype, monkeypatch, rng):
    """In blocks of a few rows, after a memory of 20 tokens."""
    q = tokens_of(rng, 2, 3, 25, 8, dtype=dtype)
    k, v = (tokens_of(rng, 2, 3, 45, width, dtype=dtype) for width in (8, 6))
    zero = 0 if causal else 25
    r = tokens_of(rng, 3, 45 + zero, 8, dtype=dtype)
    u, w = tokens_of(rng, 2, 3, 8, dtype=dtype)
    mask = rng.random((2, 3, 25, 45)) < 0.8
    monkeypatch.setattr(transformer_xl, "TABLE_BYTES", rows * 6 * 45 * np.dtype(dtype).itemsize)
    ours = positions.transformer_xl_attention(
        q, k, v, r, u, w, zero=zero, causal=causal, left=left, mask=mask, backend="numpy"
    )
    visible = visible_pairs(25, 45, 20, causal, left) & mask
    check(ours, transformer_xl_formula(q, k, v, r, u, w, zero, 20, visible))


def test_transformer_xl_compiled(rng):
    q, k, v = tokens_of(rng, 3, 2, 3, 70, 8)
    r, (u, w) = tokens_of(rng, 3, 70, 8), tokens_of(rng, 2, 3, 8)
    out = [
        positions.transformer_xl_attention(q, k, v, r, u, w, mask=np.ones(70, bool), backend=b)
        for b in ("numpy", "auto")
    ]
    np.testing.assert_allclose(*out, rtol=0, atol=2e-6)


def test_transformer_xl_matches_xlnet(torch, rng):
    """XLNet's attention of one segment after a memory: the whole layer but its LayerNorm."""
    xlnet = pytest.importorskip("transformers.models.xlnet.modeling_xlnet")
    import transformers

    config = transformers.XLNetConfig(d_model=24, n_head=3, d_inner=24, dropout=0.0)
    layer = xlnet.XLNetRelativeAttention(config).eval()
    layer.layer_norm = torch.nn.Identity()
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    x, memory = tokens_of(rng, 2, 6, 24), tokens_of(rng, 2, 10, 24)
    # Distances 16 to -5: theirs starts with the largest.
    r = positions.sinusoidal(np.arange(0, 17), 24, interleaved=False)
    r = np.concatenate([reflected(r[5:0:-1]), r])
    hidden = np.broadcast_to(~np.tri(6, 16, 10, dtype=bool), (2, 6, 16)).transpose(1, 2, 0)
    with torch.no_grad():
        theirs = layer(
            h=torch.from_numpy(x.swapaxes(0, 1).copy()),
            g=None,
            attn_mask_h=torch.from_numpy(hidden[..., None].astype(np.float32)),
            attn_mask_g=None,
            r=torch.from_numpy(r[::-1, None].repeat(2, axis=1).copy()),
            seg_mat=None,
            mems=torch.from_numpy(memory.swapaxes(0, 1).copy()),
        )[0]
    p = {name: tensor.detach().numpy() for name, tensor in layer.named_parameters()}
    both = np.concatenate([memory, x], axis=1)
    q = np.einsum("bth,hnd->bntd", x, p["q"])
    k, v = (np.einsum("bth,hnd->bntd", both, p[name]) for name in "kv")
    ours = positions.transformer_xl_attention(
        q,
        k,
        v,
        np.einsum("th,hnd->ntd", r, p["r"]),
        p["r_w_bias"],
        p["r_r_bias"],
        zero=5,
        backend="numpy",
    )
    ours = x + np.einsum("bntd,hnd->bth", ours, p["o"])
    np.testing.assert_allclose(ours, theirs.numpy().swapaxes(0, 1), rtol=0, atol=1e-5)


def reflected(encodings):
    """Sinusoids of the negative positions: the sines change sign."""
    half = encodings.shape[-1] // 2
    return np.concatenate([-encodings[:, :half], encodings[:, half:]], axis=-1)


@pytest.mark.parametrize("scheme", ["shaw", "transformer-xl"])
def test_memory_is_linear_in_the_tokens(scheme, rng):
    """4096 tokens: an array of all pairs of the two heads would have 128 MiB."""
    q, k, v = tokens_of(rng, 3, 2, 4096, 8)
    tables, r = tokens_of(rng, 2, 33, 8), tokens_of(rng, 2, 4096, 8)
    u, w = tokens_of(rng, 2, 2, 8)
    tracemalloc.start()
    try:
        if scheme == "shaw":
            positions.shaw_attention(q, k, v, *tables, backend="numpy")
        else:
            positions.transformer_xl_attention(q, k, v, r, u, w, backend="numpy")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 32 << 20


# --- errors -------------------------------------------------------------------------------------


def shaw(key=(5, 8), value=(5, 8), q=(2, 4, 6, 8), dtype=np.float32):
    tables = [None if shape is None else zeros(*shape, dtype=dtype) for shape in (key, value)]
    return positions.shaw_attention(zeros(*q), zeros(*q), zeros(*q), *tables)


def dai(r=(4, 6, 8), u=(4, 8), w=(4, 8), q=(2, 4, 6, 8), dtype=np.float32):
    q = zeros(*q)
    return positions.transformer_xl_attention(q, q, q, zeros(*r, dtype=dtype), zeros(*u), zeros(*w))


ERRORS = {
    "slopes": (
        lambda: positions.alibi_slopes(0),
        ValueError,
        "num_heads must be at least 1, got 0",
    ),
    "t5-rank": (
        lambda: positions.t5_arguments(zeros(32), 4, 4),
        ValueError,
        "weight must have shape (num_buckets, num_heads), got (32,)",
    ),
    "t5-first": (
        lambda: positions.t5_arguments(zeros(32, 4), 4, 4, first_query=-1),
        ValueError,
        "first_query must be at least 0, got -1",
    ),
    "shaw-none": (
        lambda: shaw(None, None),
        ValueError,
        "key_table or value_table must be given",
    ),
    "shaw-even": (
        lambda: shaw((4, 8), None),
        ValueError,
        "key_table must have shape (2 * radius + 1, 8) with radius >= 1, heads_q = 4 before it",
    ),
    "shaw-unlike": (
        lambda: shaw((5, 8), (7, 8)),
        ValueError,
        "value_table must have shape (2 * radius + 1, 8) with radius >= 1",
    ),
    "shaw-heads": (lambda: shaw((3, 5, 8), None), ValueError, "key_table must have shape"),
    "shaw-rank": (
        lambda: shaw(q=(6, 8)),
        ValueError,
        "q must have shape (..., heads, tokens, dim), got (6, 8)",
    ),
    "shaw-dtype": (
        lambda: shaw(dtype=np.float64),
        TypeError,
        "key_table must have the dtype of q, float32, got float64",
    ),
    "xl-r": (
        lambda: dai(r=(3, 6, 8)),
        ValueError,
        "r must have shape (4, distances, 8), got (3, 6, 8)",
    ),
    "xl-u": (lambda: dai(u=(8,)), ValueError, "u must have shape (4, 8), got (8,)"),
    "xl-rank": (
        lambda: dai(q=(6, 8)),
        ValueError,
        "q must have shape (..., heads, tokens, dim), got (6, 8)",
    ),
    "xl-dtype": (
        lambda: dai(dtype=np.float64),
        TypeError,
        "r must have the dtype of q, float32, got float64",
    ),
}


@pytest.mark.parametrize(("call", "error", "message"), ERRORS.values(), ids=ERRORS)
def test_errors(call, error, message):
    with pytest.raises(error) as raised:
        call()
    assert str(raised.value).startswith(message)
