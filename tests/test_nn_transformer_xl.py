"""Transformer-XL's relative encodings against plain loops and XLNet."""

from __future__ import annotations

import numpy as np
import pytest
from nn_cases import DTYPES, tokens_of, zeros
from nn_relative import check_close, peak_bytes, softmax, visible_pairs

from fastattn.nn import positions
from fastattn.nn.positions import transformer_xl


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
    check_close(ours, transformer_xl_formula(q, k, v, r, u, w, zero, 20, visible))


@pytest.mark.parametrize("left", [None, 2])
@pytest.mark.parametrize("offset", [-30, -9, 0, 40, 90])
def test_transformer_xl_rows_without_keys(offset, left, monkeypatch, rng):
    """Whole blocks of them, before the first key or far past the last."""
    q, k, v = (tokens_of(rng, 3, n, 8) for n in (25, 20, 20))
    r, (u, w) = tokens_of(rng, 3, 30, 8), tokens_of(rng, 2, 3, 8)
    monkeypatch.setattr(transformer_xl, "TABLE_BYTES", 500)
    ours = positions.transformer_xl_attention(
        q, k, v, r, u, w, left=left, offset=offset, backend="numpy"
    )
    visible = visible_pairs(25, 20, offset, True, left)
    check_close(ours, transformer_xl_formula(q, k, v, r, u, w, 0, offset, visible))


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


@pytest.mark.parametrize(("batch", "tokens", "tokens_k"), [(2, 0, 5), (2, 5, 0), (0, 5, 5)])
def test_nothing_to_attend(batch, tokens, tokens_k, rng):
    q, k = zeros(batch, 3, tokens, 8), zeros(batch, 3, tokens_k, 8)
    r, (u, w) = tokens_of(rng, 3, 9, 8), tokens_of(rng, 2, 3, 8)
    out = positions.transformer_xl_attention(q, k, k, r, u, w, backend="numpy")
    np.testing.assert_array_equal(out, zeros(batch, 3, tokens, 8))


def test_memory_is_linear_in_the_tokens(rng):
    """4096 tokens: an array of all pairs of the two heads would have 128 MiB."""
    q, k, v = tokens_of(rng, 3, 2, 4096, 8)
    r, (u, w) = tokens_of(rng, 2, 4096, 8), tokens_of(rng, 2, 2, 8)

    def call():
        positions.transformer_xl_attention(q, k, v, r, u, w, backend="numpy")

    assert peak_bytes(call) < 32 << 20


# --- errors -------------------------------------------------------------------------------------


def dai(r=(4, 6, 8), u=(4, 8), w=(4, 8), q=(2, 4, 6, 8), dtype=np.float32):
    q = zeros(*q)
    return positions.transformer_xl_attention(q, q, q, zeros(*r, dtype=dtype), zeros(*u), zeros(*w))


ERRORS = {
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
