"""jax.nn.dot_product_attention as another opinion, on float64, where it means what fastattn means.

It stands apart in two ways: a row that sees no key is the mean of v there, and is left out here;
and its softmax is float32 whatever the inputs, which sets the tolerance.
"""

from __future__ import annotations

import numpy as np
import oracle
import pytest
from cases import Case

import fastattn

TOLERANCE = 3e-6  # the largest difference seen is 1.3e-6
HEADS = {"batch": 3, "heads_q": 4, "heads_kv": 2, "dtype": "float64", "align": "top_left"}
CASES = [
    *(Case("causal", m, n, **HEADS, causal=True) for m, n in [(33, 33), (9, 70), (70, 9), (1, 40)]),
    *(Case("window", 33, 40, **HEADS, window=window) for window in [(7, 0), (0, 3), (5, 9)]),
    Case("window", 33, 40, **HEADS, window=(5, 5), causal=True),
    *(Case("scale", 33, 40, **HEADS, scale=scale) for scale in (0.0, -0.5, 2.0)),
    *(Case("mask", 33, 40, **HEADS, mask=axes) for axes in ("bhqk", "b11k", "1hqk", "b1qk", "qk")),
    *(Case("bias", 33, 40, **HEADS, bias=axes) for axes in ("bhqk", "11qk", "1h1k", "b111")),
    *(Case("lengths", 33, 40, **HEADS, lengths=names) for names in ("q_len", "kv_len")),
    Case("lengths", 33, 40, **HEADS, lengths="q_len kv_len", causal=True),
    Case("all", 33, 40, **HEADS, lengths="q_len kv_len", window=(20, 3), mask="b1qk", bias="bhqk"),
]


def dot_product_attention(arrays, flags):
    """Return JAX's (out, lse), computed in float64, for arrays and flags of its own kind."""
    import jax

    found = jax.nn.dot_product_attention(*arrays, **flags, return_residual=True)
    return tuple(np.asarray(a) for a in found)


def as_jax_says(flags):
    """Return `flags` of attention() under JAX's names."""
    left, right = flags["window"]
    theirs = {"scale": flags["scale"], "is_causal": flags["causal"]}
    if left is not None:
        theirs["local_window_size"] = (left, right)
    for name, name_there in (("q_len", "query"), ("kv_len", "key_value")):
        if name in flags:
            theirs[f"{name_there}_seq_lengths"] = flags[name].astype(np.int32)
    for name in ("mask", "bias"):
        if name in flags:
            a = flags[name]
            theirs[name] = a.reshape((1,) * (4 - a.ndim) + a.shape)
    return theirs


@pytest.mark.parametrize("case", CASES, ids=str)
def test_agrees_with_jax(case, backend, jax_process):
    (q, k, v), flags = case.arrays(), case.flags()
    tokens_first = [a.swapaxes(1, 2) for a in (q, k, v)]
    call = jax_process.submit(dot_product_attention, tokens_first, as_jax_says(flags))
    theirs, their_lse = call.result()
    out, lse = fastattn.attention(q, k, v, **flags, return_lse=True, backend=backend)
    seen = np.isfinite(oracle.attention(q, k, v, **flags)[1])
    assert seen.mean() > 0.3
    is_padding = np.arange(case.seqlen_q) >= np.reshape(flags.get("q_len", case.seqlen_q), (-1, 1))
    theirs = theirs.swapaxes(1, 2)
    # Before jax 0.10.1, padding may be NaN.
    compared = seen | (is_padding[:, None] & ~np.isnan(theirs).any(axis=-1))
    np.testing.assert_allclose(out[compared], theirs[compared], rtol=0, atol=TOLERANCE)
    np.testing.assert_allclose(lse[seen], their_lse.swapaxes(1, 2)[seen], rtol=0, atol=TOLERANCE)
