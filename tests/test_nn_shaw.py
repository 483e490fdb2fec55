"""Shaw's relative encodings against plain loops and transformers."""

from __future__ import annotations

import numpy as np
import pytest
from nn_cases import DTYPES, tokens_of, zeros
from nn_relative import check_close, peak_bytes, softmax, visible_pairs

from fastattn import nn
from fastattn.nn import positions


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
    check_close(ours, shaw_formula(q, k, v, *tables, 7, visible))


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
        check_close(ours, shaw_formula(q, k, v, *tables, offset, visible))


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


@pytest.mark.parametrize(("batch", "tokens", "tokens_k"), [(2, 0, 5), (2, 5, 0), (0, 5, 5)])
def test_nothing_to_attend(batch, tokens, tokens_k, rng):
    q, k = zeros(batch, 3, tokens, 8), zeros(batch, 3, tokens_k, 8)
    tables = tokens_of(rng, 2, 9, 8)
    out = positions.shaw_attention(q, k, k, *tables, backend="numpy")
    np.testing.assert_array_equal(out, zeros(batch, 3, tokens, 8))


def test_memory_is_linear_in_the_tokens(rng):
    """4096 tokens: an array of all pairs of the two heads would have 128 MiB."""
    q, k, v = tokens_of(rng, 3, 2, 4096, 8)
    tables = tokens_of(rng, 2, 33, 8)
    assert (
        peak_bytes(lambda: positions.shaw_attention(q, k, v, *tables, backend="numpy")) < 32 << 20
    )


# --- errors -------------------------------------------------------------------------------------


def shaw(key=(5, 8), value=(5, 8), q=(2, 4, 6, 8), dtype=np.float32):
    tables = [None if shape is None else zeros(*shape, dtype=dtype) for shape in (key, value)]
    return positions.shaw_attention(zeros(*q), zeros(*q), zeros(*q), *tables)


ERRORS = {
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
}


@pytest.mark.parametrize(("call", "error", "message"), ERRORS.values(), ids=ERRORS)
def test_errors(call, error, message):
    with pytest.raises(error) as raised:
        call()
    assert str(raised.value).startswith(message)
