"""Gradients of rows whose lse is far from 0, as masks of finite numbers make it."""

from __future__ import annotations

import gradient_oracle
import numpy as np
import oracle
import pytest

import fastattn

F4, F8 = np.float32, np.float64
NAMES = ("q", "k", "v", "bias", "sinks", "alibi")
ROWS, KEYS = 37, 300


def arrays_of(dtype, heads_q=4, heads_kv=2):
    rng = np.random.default_rng(3)
    shapes = [(2, heads_q, ROWS, 16), (2, heads_kv, KEYS, 16), (2, heads_kv, KEYS, 8)]
    return [rng.standard_normal(shape).astype(dtype) for shape in shapes]


def masked(size, dtype=F4):
    """A mask in numbers: every third row is masked everywhere, the others at some keys."""
    seen = np.random.default_rng(1).random((ROWS, KEYS)) < 0.6
    seen[::3] = False
    return np.where(seen, 0, size).astype(dtype)


def differentiate(backend, arrays, flags, forward=None):
    """Return (dout, dlse, {name: gradient})."""
    given = flags | {"return_lse": True, "backend": forward or backend}
    out, lse = fastattn.attention(*arrays, **given)
    rng = np.random.default_rng(5)
    dout = rng.standard_normal(out.shape).astype(out.dtype)
    dlse = rng.standard_normal(lse.shape).astype(lse.dtype)
    wanted = [name for name in NAMES[3:] if name in flags]
    more = {f"return_d{name}": True for name in wanted} | {"backend": backend, "dlse": dlse}
    found = fastattn.attention_backward(dout, *arrays, out, lse, **flags, **more)
    return dout, dlse, dict(zip(["q", "k", "v", *wanted], found, strict=True))


def summed(name, gradients):
    a = gradients["d" + name]
    return a.sum((0, 1)) if name == "bias" else a.sum((0, 2)) if name == "sinks" else a


# --- the formula ----------------------------------------------------------------------------------

ROUNDED_AWAY = [(F4, -1e9), (F4, float(np.finfo(F4).min) / 2), (F8, -1e17), (F8, -1e307)]


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize(("dtype", "size"), ROUNDED_AWAY)
def test_where_all_scores_of_a_row_round_to_one(dtype, size, sinks, backend):
    """Such a row spreads its weight evenly, in every order of operations."""
    arrays, flags = arrays_of(dtype), {"bias": masked(size, dtype)}
    if sinks:
        flags["sinks"] = np.array([size, -np.inf, 0, size], dtype)
    dout, dlse, found = differentiate(backend, arrays, flags)
    formula = gradient_oracle.gradients(dout, *arrays, dlse=dlse, **flags, dtype=dtype)
    for name, a in found.items():
        expected = summed(name, formula)
        allowed = 64 * np.finfo(dtype).eps * np.abs(expected).max()
        np.testing.assert_allclose(a, expected, rtol=0, atol=allowed, err_msg=name)


@pytest.mark.parametrize("forward", ["numpy", None])
@pytest.mark.parametrize(("dtype", "size"), [(F4, -1e4), (F4, -1e6), (F8, -1e10)])
def test_error_is_at_most_twice_the_formulas(dtype, size, forward, backend):
    arrays, flags = arrays_of(dtype), {"bias": masked(size, dtype), "causal": True}
    dout, dlse, found = differentiate(backend, arrays, flags, forward)
    pair = gradient_oracle.judge(dout, *arrays, dlse=dlse, **flags)
    for name, a in found.items():
        oracle.assert_within_budget(a, *(summed(name, of) for of in pair), 32)


# --- sums -----------------------------------------------------------------------------------------

ALIBI = np.array([3000, 0.5, 0.1, 1e5])
OPTIONS = {
    "plain": {},
    "causal": {"causal": True},
    "window and softcap": {"window": (90, 3), "softcap": 2.0, "scale": -0.7},
    "sinks": {"sinks": np.array([-1e6, -np.inf, 3.0, -1e6 + 1])},
    "alibi": {"alibi": ALIBI, "align": 5000},
    "dropout": {"dropout_p": 0.4, "dropout_seed": 4},
    "lengths": {"q_len": np.array([ROWS, 12]), "kv_len": np.array([250, 31]), "kv_start": 3},
    "scores": {"scale": 3e4},
}
SIZES = [(F4, -1e4), (F4, -1e6), (F4, -1e9), (F8, -1e17)]


@pytest.mark.parametrize(("dtype", "size"), SIZES)
@pytest.mark.parametrize("name", OPTIONS)
def test_a_rows_share_is_one(name, dtype, size, backend):
    """However scores are rounded: by bias, sinks and the scores, a row has dlse in all."""
    flags = {n: np.asarray(a, dtype) if n in NAMES else a for n, a in OPTIONS[name].items()}
    arrays, flags["bias"] = arrays_of(dtype), np.tile(masked(size, dtype), (2, 4, 1, 1))
    _, dlse, found = differentiate(backend, arrays, flags)
    total, expected = found["bias"].sum(-1, dtype=F8), dlse.astype(F8)
    if "q_len" in flags:
        total[1, :, 12:] = expected[1, :, 12:] = 0
    if "sinks" in flags:
        total, expected = total.sum((0, 2)) + found["sinks"], expected.sum((0, 2))
    allowed = 2000 * np.finfo(dtype).eps * (KEYS if "sinks" in flags else 1)
    np.testing.assert_allclose(total, expected, rtol=0, atol=allowed)


@pytest.mark.parametrize("seqlen_q", [ROWS, 3])
@pytest.mark.parametrize("size", [1e3, 1e5, 1e8])
def test_large_products(size, seqlen_q, backend):
    """Without a bias, and so rounded elsewhere; dv sums up to dout."""
    q, k, v = arrays_of(F4, 2)
    q = q[:, :, :seqlen_q] * F4(size)
    out, lse = fastattn.attention(q, k, v, return_lse=True, backend=backend)
    dout = np.random.default_rng(4).standard_normal(out.shape).astype(F4)
    dv = fastattn.attention_backward(dout, q, k, v, out, lse, backend=backend)[2]
    total, expected = (a.sum(-2, dtype=F8) for a in (dv, dout))
    np.testing.assert_allclose(total, expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_packed_members(dtype, backend):
    """Under ALiBi of rows far behind all keys: dv sums up to dout."""
    rng = np.random.default_rng(2)
    edges = np.array([0, 20, 20, 61]), np.array([0, 130, 150, 400])
    q, k, v = (rng.standard_normal((n, 2, 16)).astype(dtype) for n in (61, 400, 400))
    flags = {"alibi": np.array([3e4, 1e8], F4), "align": 5000}
    out, lse = fastattn.attention_varlen(q, k, v, *edges, **flags, return_lse=True, backend=backend)
    assert (np.abs(lse) > 1e6).all()
    dout = rng.standard_normal(out.shape).astype(dtype)
    dq, dk, dv = fastattn.attention_varlen_backward(
        dout, q, k, v, out, lse, *edges, **flags, backend=backend
    )
    assert np.isfinite(dq).all()
    assert np.isfinite(dk).all()
    for b in (0, 2):
        rows, keys = (slice(edge[b], edge[b + 1]) for edge in edges)
        total = dv[keys].sum(0, dtype=F8)
        allowed = 2e-5 if dtype == "float32" else 0.05
        np.testing.assert_allclose(total, dout[rows].sum(0, dtype=F8), rtol=0, atol=allowed)


# --- bits, and lse of more keys -------------------------------------------------------------------


def test_ordinary_rows_keep_their_bits_beside_large_ones(backend):
    arrays = arrays_of(F4)
    flags = {"bias": np.stack([masked(0), masked(-1e6)])[:, None]}
    out, lse = fastattn.attention(*arrays, **flags, return_lse=True, backend=backend)
    whole = fastattn.attention_backward(out, *arrays, out, lse, **flags, backend=backend)
    for b in range(2):
        one = [a[b : b + 1] for a in (out, *arrays, out, lse, flags["bias"])]
        alone = fastattn.attention_backward(*one[:-1], bias=one[-1], backend=backend)
        for a, own in zip(whole, alone, strict=True):
            np.testing.assert_array_equal(a[b], own[0])


def test_number_of_threads_does_not_matter(backend):
    flags = {"bias": masked(-1e6), "causal": True}
    with fastattn.num_threads(1):
        expected = differentiate(backend, arrays_of(F4), flags)[2]
    with fastattn.num_threads(3):
        found = differentiate(backend, arrays_of(F4), flags)[2]
    for name, a in found.items():
        np.testing.assert_array_equal(a, expected[name])


def test_lse_of_more_keys_is_kept(backend):
    """Each half of the keys is given out and lse of both, as after merge()."""
    q, k, v = arrays_of(F4)
    bias = np.full((ROWS, KEYS), -1e4, F4)
    out, lse = fastattn.attention(q, k, v, bias=bias, return_lse=True, backend=backend)
    halves = [slice(0, KEYS // 2), slice(KEYS // 2, KEYS)]
    parts = [
        fastattn.attention_backward(
            out, q, k[:, :, at], v[:, :, at], out, lse, bias=bias[:, at], backend=backend
        )
        for at in halves
    ]
    whole = fastattn.attention_backward(out, q, k, v, out, lse, bias=bias, backend=backend)
    np.testing.assert_allclose(parts[0][0] + parts[1][0], whole[0], rtol=0, atol=2e-3)
    for n in (1, 2):
        joined = np.concatenate([part[n] for part in parts], axis=-2)
        np.testing.assert_allclose(joined, whole[n], rtol=0, atol=2e-3)


@pytest.mark.parametrize("lse", [-1e3, -1e6, 1e8])
def test_merge_weighs_the_parts_of_a_large_row_to_one(lse):
    ones, lses = np.ones((1, 5), np.float32), np.float32([[lse], [lse * 1.0000003]])
    out, _ = fastattn.merge(ones, lses[0], ones, lses[1])
    np.testing.assert_allclose(out, ones, rtol=3e-7)
