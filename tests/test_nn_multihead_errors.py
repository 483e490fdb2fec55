"""What nn.MultiHeadWeights and nn.multihead_attention refuse, and how they say so."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from nn_cases import zeros

from fastattn import nn


def multihead(qkv=(24, 8), out=(8, 8), num_heads=2, dtype=np.float32):
    weights = nn.LinearWeights(zeros(*qkv)), nn.LinearWeights(zeros(*out, dtype=dtype))
    return nn.MultiHeadWeights(*weights, num_heads)


def attend(x=None, weights=None, **options):
    x = zeros(2, 5, 8) if x is None else x
    return nn.multihead_attention(x, multihead() if weights is None else weights, **options)


def separate(q=(8, 8), k=(4, 6), v=(10, 7), out=(8, 20), dtype=np.float32):
    """Four heads over two, head_dim 2, head_dim_v 5."""
    maps = tuple(nn.LinearWeights(zeros(*shape)) for shape in (q, k, v))
    return nn.MultiHeadWeights(maps, nn.LinearWeights(zeros(*out, dtype=dtype)), 4, 2)


def cache_of(**options):
    return nn.KVCache(2, 4, batch=(2,), **options)


def added(**more):
    return nn.MultiHeadWeights(multihead().qkv, multihead().out, 2, **more)


EXTRA = zeros(2, 4), zeros(2, 4)


ERRORS = {
    "num-heads": (
        lambda: multihead(num_heads=0),
        ValueError,
        "num_heads must be an int >= 1, got 0",
    ),
    "qkv-rows": (
        lambda: multihead(num_heads=5),
        ValueError,
        "qkv weight must have a multiple of num_heads + 2 * num_heads_kv = 15 rows, got",
    ),
    "out-shape": (
        lambda: multihead(out=(8, 6)),
        ValueError,
        "out weight must have shape (8, 8) to fit qkv weight (24, 8), got (8, 6)",
    ),
    "out-dtype": (
        lambda: multihead(dtype=np.float64),
        TypeError,
        "out weight must have the dtype of q weight, float32, got float64",
    ),
    "x-features": (
        lambda: attend(zeros(2, 5, 9)),
        ValueError,
        "x must have shape (..., 8) to fit weights of shape (8, 8), got (2, 5, 9)",
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
        "key_mask must have one element for each key, (2, 5), got (5,)",
    ),
    "num-heads-kv": (
        lambda: nn.MultiHeadWeights(multihead().qkv, multihead().out, 2, 0),
        ValueError,
        "num_heads_kv must be an int >= 1, got 0",
    ),
    "groups": (
        lambda: nn.MultiHeadWeights(multihead().qkv, multihead().out, 4, 3),
        ValueError,
        "num_heads must be a multiple of num_heads_kv, got 4 and 3",
    ),
    "grouped-rows": (
        lambda: nn.MultiHeadWeights(multihead().qkv, multihead().out, 8, 1),
        ValueError,
        "qkv weight must have a multiple of num_heads + 2 * num_heads_kv = 10 rows, got shape",
    ),
    "q-rows": (
        lambda: separate(q=(9, 8)),
        ValueError,
        "q weight must have a multiple of 4 rows, one for each head and feature, got shape (9, 8)",
    ),
    "v-rows": (
        lambda: separate(v=(9, 7)),
        ValueError,
        "v weight must have a multiple of 2 rows, one for each head and feature, got shape (9, 7)",
    ),
    "k-rows": (
        lambda: separate(k=(6, 6)),
        ValueError,
        "k weight must have 4 rows, 2 heads of 2 to fit q weight (8, 8), got shape (6, 6)",
    ),
    "separate-out": (
        lambda: separate(out=(8, 8)),
        ValueError,
        "out weight must have shape (8, 20) to fit v weight (10, 7), got (8, 8)",
    ),
    "sinks": (
        lambda: added(sinks=zeros(3)),
        ValueError,
        "sinks must have shape (2,), got (3,)",
    ),
    "extra": (
        lambda: added(extra=(zeros(2, 4), zeros(2, 5))),
        ValueError,
        "extra[1] must have shape (2, 4), got (2, 5)",
    ),
    "extra-dtype": (
        lambda: added(extra=(zeros(2, 4), zeros(2, 4, dtype=np.float64))),
        TypeError,
        "extra[1] must have the dtype of the weights, float32, got float64",
    ),
    "extra-dropout": (
        lambda: attend(weights=added(extra=EXTRA), dropout_p=0.5),
        ValueError,
        "dropout_p must be 0 with an extra key",
    ),
    "keys-features": (
        lambda: attend(keys=zeros(2, 5, 9)),
        ValueError,
        "keys must have shape (..., 8) to fit weights of shape (8, 8), got (2, 5, 9)",
    ),
    "values-features": (
        lambda: attend(weights=separate(), keys=zeros(2, 5, 6), values=zeros(2, 5, 6)),
        ValueError,
        "values must have shape (..., 7) to fit weights of shape (10, 7), got (2, 5, 6)",
    ),
    "keys-batch": (
        lambda: attend(keys=zeros(3, 5, 8)),
        ValueError,
        "keys must have the leading dimensions of x, (2, 5, 8), got (3, 5, 8)",
    ),
    "keys-list": (lambda: attend(keys=[1.0]), TypeError, "keys must be a NumPy array, got list"),
    "keys-and-cache": (
        lambda: attend(keys=zeros(2, 5, 8), cache=cache_of()),
        ValueError,
        "cache must be None with keys or values: it holds tokens of x",
    ),
    "cached-values": (
        lambda: attend(keys=cache_of(), values=zeros(2, 5, 8)),
        ValueError,
        "values must be None where keys is a KVCache, which holds both",
    ),
    "out": (
        lambda: attend(out=zeros(2, 5, 8)),
        TypeError,
        "multihead_attention() got an unexpected keyword argument 'out'",
    ),
    "unknown": (
        lambda: attend(caussal=True),
        TypeError,
        "multihead_attention() got an unexpected keyword argument 'caussal'",
    ),
    "cache-batch": (
        lambda: attend(zeros(3, 5, 8), cache=cache_of()),
        ValueError,
        "k must have shape (2, 2, tokens, 4), got (3, 2, 5, 4)",
    ),
    "cache-capacity": (
        lambda: attend(cache=cache_of(capacity=4)),
        ValueError,
        "k must keep the cache within its capacity of 4 tokens, got 5 after 0",
    ),
    "cache-key-mask": (
        lambda: attend(cache=cache_of(), key_mask=np.ones((2, 4), bool)),
        ValueError,
        "key_mask must have one element for each key, (2, 5), got (2, 4)",
    ),
    "rotary-tokens": (
        lambda: attend(rotary=nn.positions.Rope(4).rotation(np.arange(4))),
        ValueError,
        "cos must have a row for each token of x, (2, 4, 5, 4), got (4, 2)",
    ),
    "backend": (
        lambda: attend(backend="gpu"),
        ValueError,
        "backend must be one of",
    ),
    "packed-x": (
        lambda: attend(cu_seqlens=[0, 5]),
        ValueError,
        "x must have shape (tokens, model_dim) with cu_seqlens, got (2, 5, 8)",
    ),
    "packed-cache": (
        lambda: attend(zeros(5, 8), cu_seqlens=[0, 5], cache=nn.KVCache(2, 4)),
        ValueError,
        "cache must be None with cu_seqlens, got KVCache",
    ),
    "packed-mask": (
        lambda: attend(zeros(5, 8), cu_seqlens=[0, 5], mask=np.ones((5, 5), bool)),
        TypeError,
        "attention_varlen() got an unexpected keyword argument 'mask'",
    ),
    "packed-cuts": (
        lambda: attend(zeros(5, 8), cu_seqlens=[0, 4]),
        ValueError,
        "cu_seqlens_q must",
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


@pytest.mark.parametrize("change", [{"bias": zeros(9, 9)}, {"backend": "gpu"}, {"scale": np.inf}])
def test_nothing_is_written_to_the_cache_on_error(change, rng):
    cache = cache_of()
    cache.append(zeros(2, 2, 3, 4), zeros(2, 2, 3, 4))
    with pytest.raises(ValueError, match=r"."):
        attend(cache=cache, **change)
    assert cache.seqlen == 3
