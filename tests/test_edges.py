"""Nothing to see, infinities, NaNs, and numbers at the ends of their range."""

from __future__ import annotations

import numpy as np
import oracle
import pytest
from calls import assert_exact, attend
from cases import Case

import fastattn

DTYPES = ["float32", "float64"]

# --- sizes of zero ------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "empty",
    ["batch", "heads_q", "seqlen_q", "seqlen_k", "head_dim", "head_dim_v", "head_dim head_dim_v"],
)
def test_empty_dimensions(empty, causal, dtype, backend):
    case = Case("empty", 5, 7, 8, 6, batch=2, heads_q=4, heads_kv=2)
    sizes = dict.fromkeys(empty.split(), 0)
    q, k, v = Case(**{**vars(case), **sizes, "dtype": dtype}).arrays()
    out, lse = attend(backend, q, k, v, causal=causal)
    if "seqlen_k" in sizes:
        assert not out.any()
        assert (lse == -np.inf).all()
        return
    exact, exact_lse = oracle.attention(q, k, v, causal=causal)
    np.testing.assert_allclose(out, exact, rtol=0, atol=1e-6)
    np.testing.assert_allclose(lse, exact_lse, rtol=0, atol=1e-6)


def test_no_heads_at_all(backend):
    q = np.ones((2, 0, 5, 8), np.float32)
    out, lse = attend(backend, q, q, q)
    assert out.shape == (2, 0, 5, 8)
    assert lse.shape == (2, 0, 5)


def test_no_keys_with_mask_and_bias(backend):
    q, k = np.ones((2, 3, 4), np.float32), np.ones((2, 0, 4), np.float32)
    mask, bias = np.ones((3, 0), bool), np.ones((2, 3, 0), np.float32)
    out, lse = attend(backend, q, k, k, mask=mask, bias=bias, window=(1, 1))
    assert not out.any()
    assert (lse == -np.inf).all()


def test_explain_of_nothing(backend):
    for shape in [(0, 4, 5, 8), (2, 0, 5, 8), (2, 4, 0, 8), (2, 4, 5, 0)]:
        q = np.ones(shape, np.float32)
        assert fastattn.explain(q, q, q, backend=backend).backend == backend


@pytest.mark.parametrize("sizes", [(2, 2**20 + 3), (2**18 + 3, 2)], ids=str)
def test_a_million_keys_or_rows_of_one_number(sizes, backend):
    q, k, v = Case("huge", *sizes, 1, heads_q=1).arrays()
    assert_exact(backend, q, k, v)
    assert_exact(backend, q, k, v, causal=True)


# --- rows that see nothing ----------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seqlen_k", [1, 5, 64, 300])
@pytest.mark.parametrize("how", ["mask", "bias", "align", "window", "both"])
def test_rows_without_a_key(how, seqlen_k, dtype, backend, rng):
    q, k, v = Case("dead", 70, seqlen_k, dtype=dtype).arrays()
    dead = rng.random((70, 1)) < 0.4
    mask = np.broadcast_to(~dead, (70, seqlen_k))
    flags = {
        "mask": {"mask": mask},
        "bias": {"bias": np.where(dead, -np.inf, np.zeros(seqlen_k)).astype(dtype)},
        "align": {"align": -30, "causal": True},
        "window": {"align": seqlen_k - 20, "window": (4, 0)},
        "both": {"mask": mask, "bias": np.where(mask, -np.inf, 0).astype(dtype)},
    }[how]
    assert_exact(backend, q, k, v, **flags)
    out, lse = attend(backend, q, k, v, **flags)
    _, exact_lse = oracle.attention(q, k, v, **flags)
    assert np.isneginf(exact_lse).any()
    assert not out[np.isneginf(exact_lse)].any()
    np.testing.assert_array_equal(np.isneginf(lse), np.isneginf(exact_lse))


# --- infinities and NaNs ------------------------------------------------------------------------

BAD = [np.nan, np.inf, -np.inf]


@pytest.mark.parametrize("bad", BAD, ids=str)
@pytest.mark.parametrize("seqlen_k", [1, 3, 40, 300])
@pytest.mark.parametrize("where", ["k", "v", "k and v"])
@pytest.mark.parametrize(
    "how", ["mask", "key mask", "bias", "causal", "window", "chunk", "lengths"]
)
def test_hidden_keys_contribute_nothing(how, where, seqlen_k, bad, backend, rng):
    """Same bits as with zeros in the hidden keys; a row that sees one differs from no other row."""
    q, k, v = Case("hidden", 40, seqlen_k, 8, heads_q=4, heads_kv=2).arrays()
    flags, hidden = {
        "mask": lambda: hide_by_mask(rng, rng.random((40, seqlen_k)) < 0.7),
        "key mask": lambda: hide_by_mask(rng, rng.random(seqlen_k) < 0.7),
        "bias": lambda: hide_by_bias(rng, rng.random((40, seqlen_k)) < 0.7),
        "causal": lambda: ({"causal": True, "align": "top_left"}, np.tri(40, seqlen_k) == 0),
        "window": lambda: hide_by_window(seqlen_k),
        "chunk": lambda: hide_by_chunk(seqlen_k),
        "lengths": lambda: hide_by_lengths(seqlen_k),
    }[how]()
    never_seen = np.broadcast_to(hidden, (40, seqlen_k)).all(axis=0)
    for name, a in (("k", k), ("v", v)):
        if name in where:
            a[..., never_seen, :] = bad
    clean = [np.where(np.isfinite(a), a, np.float32(0)) for a in (k, v)]
    out, lse = attend(backend, q, k, v, **flags)
    expected, expected_lse = attend(backend, q, *clean, **flags)
    np.testing.assert_array_equal(out, expected)
    np.testing.assert_array_equal(lse, expected_lse)


def hide_by_mask(rng, mask):
    mask[..., rng.random(mask.shape[-1]) < 0.5] = False
    return {"mask": mask}, ~mask


def hide_by_bias(rng, mask):
    mask[..., rng.random(mask.shape[-1]) < 0.5] = False
    return {"bias": np.where(mask, np.float32(0.5), -np.inf)}, ~mask


def hide_by_chunk(seqlen_k):
    flags = {"chunk": 16, "align": 20, "softcap": 2.0}
    return flags, (np.arange(40)[:, None] + 20) // 16 != np.arange(seqlen_k) // 16


def hide_by_lengths(seqlen_k):
    start, stop = seqlen_k // 4, seqlen_k - seqlen_k // 3
    flags = {"kv_start": np.array([start]), "kv_len": stop, "q_len": 39, "causal": True}
    i, j = np.arange(40)[:, None], np.arange(seqlen_k)
    visible = (i < 39) & (j >= start) & (j < stop) & (j - start <= i + stop - start - 39)
    return flags, ~visible


def hide_by_window(seqlen_k):
    flags = {"window": (2, 1), "align": 5}
    return flags, ~oracle.visible_keys(40, seqlen_k, False, 5, (2, 1))


@pytest.mark.parametrize("bad", BAD, ids=str)
@pytest.mark.parametrize("seqlen_k", [2, 40, 300])
@pytest.mark.parametrize(
    "flags", [{"causal": True, "align": "top_left"}, {"window": (3, 2)}], ids=str
)
def test_bad_value_reaches_only_the_rows_that_see_it(flags, seqlen_k, bad, backend):
    """Of v, a row gets the bad value in that column only, and exactly the oracle's one."""
    q, k, v = Case("seen", seqlen_k, seqlen_k, 8).arrays()
    at = seqlen_k // 2
    sees = oracle.visible_keys(
        seqlen_k,
        seqlen_k,
        flags.get("causal", False),
        "top_left",
        flags.get("window", (None, None)),
    )[:, at]
    clean, _ = attend(backend, q, k, v, **flags)
    v[0, 1, at, 3] = bad
    out, _ = attend(backend, q, k, v, **flags)
    np.testing.assert_array_equal(out[0, 1, sees, 3], np.float32(bad))
    out[0, 1, sees, 3] = clean[0, 1, sees, 3]
    np.testing.assert_allclose(out, clean, rtol=0, atol=1e-6)


@pytest.mark.parametrize("seqlen_k", [2, 40, 300])
def test_nan_in_k_makes_nan_of_the_rows_that_see_it(seqlen_k, backend):
    q, k, v = Case("seen", seqlen_k, seqlen_k, 8).arrays()
    at = seqlen_k // 2
    clean, _ = attend(backend, q, k, v, causal=True)
    k[0, 1, at, 3] = np.nan
    out, lse = attend(backend, q, k, v, causal=True)
    assert np.isnan(out[0, 1, at:]).all()
    assert np.isnan(lse[0, 1, at:]).all()
    np.testing.assert_allclose(out[0, 1, :at], clean[0, 1, :at], rtol=0, atol=1e-6)
    np.testing.assert_array_equal(out[0, 0], clean[0, 0])


@pytest.mark.parametrize("bad", BAD, ids=str)
@pytest.mark.parametrize("seqlen_k", [2, 5, 40, 300])
@pytest.mark.parametrize("how", ["plain", "causal", "mask", "bias", "all keys"])
def test_a_key_whose_product_is_minus_infinity_is_seen(how, seqlen_k, bad, backend, rng):
    """It weighs 0, and 0 times what is not finite is NaN: only mask, window and bias hide."""
    q, k, v = Case("product", seqlen_k, seqlen_k, 8).arrays()
    q, at = np.abs(q), seqlen_k // 2
    k[..., at if how != "all keys" else slice(None), :] = -np.inf
    v[..., at, 3] = bad
    mask = rng.random((seqlen_k, seqlen_k)) < 0.7
    flags = {
        "causal": {"causal": True},
        "mask": {"mask": mask},
        "bias": {"bias": np.where(mask, np.float32(0.5), -np.inf)},
    }
    assert_exact(backend, q, k, v, **flags.get(how, {}))


@pytest.mark.parametrize("seqlen_k", [1, 40, 300])
def test_bad_query_is_a_nan_row_and_no_other(seqlen_k, backend):
    q, k, v = Case("bad-q", 40, seqlen_k, 8).arrays()
    clean, clean_lse = attend(backend, q, k, v)
    q[0, 1, 7, 2] = np.nan
    q[0, 0, 9] = np.inf
    out, lse = attend(backend, q, k, v)
    bad = np.zeros((1, 2, 40), bool)
    bad[0, 1, 7] = True
    bad[0, 0, 9] = np.isnan(oracle.attention(q, k, v)[1][0, 0, 9])
    assert np.isnan(out[bad]).all()
    assert np.isnan(lse[bad]).all()
    bad[0, 0, 9] = True
    np.testing.assert_array_equal(out[~bad], clean[~bad])
    np.testing.assert_array_equal(lse[~bad], clean_lse[~bad])


@pytest.mark.parametrize("bad", [np.nan, np.inf], ids=str)
@pytest.mark.parametrize("seqlen_k", [1, 40, 300])
def test_bad_bias_is_a_nan_row_unless_masked(seqlen_k, bad, backend):
    q, k, v = Case("bad-bias", 40, seqlen_k, 8).arrays()
    bias = np.zeros((40, seqlen_k), np.float32)
    bias[5, -1] = bias[30, 0] = bad
    mask = np.ones((40, seqlen_k), bool)
    mask[30, 0] = False
    out, lse = attend(backend, q, k, v, bias=bias, mask=mask)
    is_nan = np.isnan(out).all(axis=-1)
    np.testing.assert_array_equal(is_nan, np.isnan(lse))
    np.testing.assert_array_equal(np.flatnonzero(is_nan[0, 0]), [5])
    assert np.isfinite(np.delete(out, 5, axis=2)).all()


@pytest.mark.parametrize("seqlen_k", [2, 33, 300])
@pytest.mark.parametrize("bias_dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_smallest_number_as_bias_is_not_minus_infinity(dtype, bias_dtype, seqlen_k, backend):
    """A row of finfo.min absorbs every score (float16: nearly); it is uniform and not empty."""
    q, k, v = Case("min", 5, seqlen_k, 8, dtype=dtype).arrays()
    bias = np.zeros((5, seqlen_k), bias_dtype)
    bias[1] = np.finfo(bias_dtype).min
    bias[2, 0] = np.finfo(bias_dtype).min
    if bias_dtype == "float16":
        q *= 0  # the scores would survive a bias as small as 65504
    out, lse = attend(backend, q, k, v, bias=bias)
    tolerance = 100 * np.finfo(dtype).eps
    mean = v.mean(axis=-2, dtype=np.float64)
    np.testing.assert_allclose(out[..., 1, :], mean, rtol=0, atol=tolerance)
    rest, _ = oracle.attention(q[..., 2:3, :], k[..., 1:, :], v[..., 1:, :])
    np.testing.assert_allclose(out[..., 2:3, :], rest, rtol=0, atol=tolerance)
    assert not np.isnan(lse).any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_largest_number_as_bias_is_not_infinity(dtype, backend):
    q, k, v = Case("max", 5, 33, 8, dtype=dtype).arrays()
    bias = np.full((5, 33), np.finfo(dtype).max, dtype)
    out, lse = attend(backend, q, k, v, bias=bias)
    mean = np.broadcast_to(v.mean(axis=-2, keepdims=True), out.shape)
    np.testing.assert_allclose(out, mean, rtol=0, atol=100 * np.finfo(dtype).eps)
    assert not np.isnan(lse).any()


def test_large_scores_do_not_overflow(backend):
    q, k, v = Case("large", 33, 300, 64).arrays()
    assert_exact(backend, q * 1e17, k * 1e18, v, scale=1e-36)
    out, _ = attend(backend, np.full_like(q, 300), np.full_like(k, 300), v)
    np.testing.assert_allclose(
        out, np.broadcast_to(v.mean(-2, keepdims=True), out.shape), atol=1e-5
    )


@pytest.mark.parametrize("size", [2.5e38, np.finfo(np.float32).max])
@pytest.mark.parametrize("name", ["sinks", "alibi", "softcap"])
def test_large_numbers_stay_finite(name, size, backend):
    """In base 2 they would be infinite."""
    q, k, v = Case("large", 5, 33, 8, heads_q=2, heads_kv=2).arrays()
    size = np.float32(size)
    arguments = {name: float(size) if name == "softcap" else np.full(2, size)}
    out, _ = attend(backend, q, k, v, **arguments)
    exact, _ = oracle.attention(q, k, v, **arguments)
    np.testing.assert_allclose(out, exact, rtol=0, atol=1e-5)


@pytest.mark.parametrize("scale", [1e-46, -1e-46, 1e-60, 1e-39])
def test_scale_too_small_for_the_dtype_is_0(scale, backend):
    q, k, v = Case("tiny scale", 5, 33, 8).arrays()
    out, lse = attend(backend, q, k, v, scale=scale)
    mean = np.broadcast_to(v.mean(axis=-2, keepdims=True), out.shape)
    np.testing.assert_allclose(out, mean, rtol=0, atol=1e-6)
    np.testing.assert_allclose(lse, np.log(33), rtol=1e-6)
