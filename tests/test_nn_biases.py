"""ALiBi and T5: against transformers, and with a cache."""

from __future__ import annotations

import numpy as np
import pytest
from nn_cases import tokens_of, zeros
from nn_relative import check_close

import fastattn
from fastattn import nn
from fastattn.nn import positions


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
        more = positions.t5_arguments(weight, stop - start, stop, bidirectional=False)
        part = np.s_[:, start:stop]
        ours = cache.attend(q[part], k[part], v[part], backend="numpy", **more)
        check_close(ours, whole[part])


# --- errors -------------------------------------------------------------------------------------


ERRORS = {
    "slopes": (
        lambda: positions.alibi_slopes(0),
        ValueError,
        "num_heads must be an int >= 1, got 0",
    ),
    "t5-rank": (
        lambda: positions.t5_arguments(zeros(32), 4, 4),
        ValueError,
        "weight must have shape (num_buckets, num_heads), got (32,)",
    ),
}


@pytest.mark.parametrize(("call", "error", "message"), ERRORS.values(), ids=ERRORS)
def test_errors(call, error, message):
    with pytest.raises(error) as raised:
        call()
    assert str(raised.value).startswith(message)
