"""Packed batches, lengths, sinks, half precision, dropout, merging and inspecting."""

from __future__ import annotations

import tracemalloc
from itertools import pairwise

import numpy as np
import oracle
import pytest
from cases import Case

import fastattn
from fastattn import dropout

F4 = np.float32
HALVES = ["float16", "bfloat16"]


def attend(backend, *arrays, **flags):
    return fastattn.attention(*arrays, **flags, return_lse=True, backend=backend)


def assert_close(found, expected, atol=2e-6):
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=atol)


# --- packed batches -----------------------------------------------------------------------------

FLAGS = {
    "plain": {},
    "causal": {"causal": True},
    "top-left": {"causal": True, "align": "top_left"},
    "window": {"window": (20, 3)},
    "align": {"causal": True, "align": np.array([-3, 40, 0, 7, 2])},
    "chunk": {"chunk": 16, "causal": True},
    "softcap": {"softcap": 3.0, "scale": 1.0},
    "alibi": {"alibi": np.linspace(0.1, 0.7, 4)},
    "alibi of each": {"alibi": np.linspace(0.1, 0.7, 20).reshape(5, 4)},
    "sinks": {"sinks": np.array([0, 1, -2, 3], F4)},
    "dropout": {"dropout_p": 0.4, "dropout_seed": 5},
    "lengths": {"kv_len": np.array([40, 0, 300, 0, 1]), "kv_start": np.array([3, 0, 200, 0, 1])},
}
LENGTHS_Q, LENGTHS_K = [33, 1, 130, 7, 0], [70, 0, 300, 1, 5]


def packed(rng, dtype=F4):
    shapes = (sum(LENGTHS_Q), 4, 24), (sum(LENGTHS_K), 2, 24), (sum(LENGTHS_K), 2, 17)
    arrays = [rng.standard_normal(shape).astype(dtype) for shape in shapes]
    return *arrays, np.cumsum([0, *LENGTHS_Q]), np.cumsum([0, *LENGTHS_K])


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
@pytest.mark.parametrize("how", FLAGS)
def test_packed_members_equal_a_padded_batch(how, dtype, backend, rng):
    q, k, v, edges_q, edges_k = packed(rng, dtype)
    out = np.full((len(q), 4, 17), np.nan, dtype)
    found, lse = fastattn.attention_varlen(
        q, k, v, edges_q, edges_k, **FLAGS[how], out=out, return_lse=True, backend=backend
    )
    assert found is out
    flags = {"kv_len": np.array(LENGTHS_K)} | FLAGS[how]
    padded = (padded_to(a, edges) for a, edges in ((q, edges_q), (k, edges_k), (v, edges_k)))
    dense, dense_lse = attend(backend, *padded, q_len=np.array(LENGTHS_Q), **flags)
    atol = 2e-3 if dtype == "float16" else 2e-6
    for b, length in enumerate(LENGTHS_Q):
        rows = slice(*edges_q[b : b + 2])
        pair = (dense[b, :, :length], dense_lse[b, :, :length])
        assert_close((out[rows].swapaxes(0, 1), lse[:, rows]), pair, atol)


@pytest.mark.parametrize("how", sorted(set(FLAGS) - {"dropout"}))
def test_packed_members_have_the_bits_of_a_call_of_their_own(how, backend, rng):
    """On numpy nearly: BLAS chooses its kernel by size."""
    q, k, v, edges_q, edges_k = packed(rng)
    out, lse = fastattn.attention_varlen(
        q, k, v, edges_q, edges_k, **FLAGS[how], return_lse=True, backend=backend
    )
    for b in range(len(LENGTHS_Q)):
        rows, keys = slice(*edges_q[b : b + 2]), slice(*edges_k[b : b + 2])
        each = {"alibi": 2, "align": 1, "kv_len": 1, "kv_start": 1}
        flags = {
            name: value[b] if np.ndim(value) == each.get(name) else value
            for name, value in FLAGS[how].items()
        }
        alone = (a.swapaxes(0, 1) for a in (q[rows], k[keys], v[keys]))
        expected, expected_lse = attend(backend, *alone, **flags)
        found = out[rows].swapaxes(0, 1), lse[:, rows]
        for a, b in zip(found, (expected, expected_lse), strict=True):
            atol = 2e-6 if backend == "numpy" else 0
            np.testing.assert_allclose(a, b, rtol=atol, atol=atol)


def padded_to(a, edges):
    """Return (batch, heads, longest, dim), NaN where there is nothing."""
    longest = np.diff(edges).max()
    padded = np.full((len(edges) - 1, a.shape[1], longest, a.shape[2]), np.nan, a.dtype)
    for member, (start, stop) in zip(padded, pairwise(edges), strict=True):
        member[:, : stop - start] = a[start:stop].swapaxes(0, 1)
    return padded


def test_packed_arrays_of_any_strides(backend, rng):
    q, k, v, *edges = packed(rng)
    expected = fastattn.attention_varlen(q, k, v, *edges, backend=backend)
    qkv = (np.ascontiguousarray(a.swapaxes(0, 1)).swapaxes(0, 1) for a in (q, k, v))
    out = np.zeros((4, len(q), 17), F4).swapaxes(0, 1)
    fastattn.attention_varlen(*qkv, *edges, out=out, backend=backend)
    np.testing.assert_array_equal(out, expected)


def test_packed_batch_of_nothing(backend):
    q = np.ones((0, 2, 8), F4)
    out, lse = fastattn.attention_varlen(q, q, q, [0], [0], return_lse=True, backend=backend)
    assert out.shape == (0, 2, 8)
    assert lse.shape == (2, 0)


# --- lengths ------------------------------------------------------------------------------------


def test_what_lies_outside_the_lengths_is_never_read(backend):
    case = Case("outside", 40, 300, 24, batch=3, heads_q=4, heads_kv=2, lengths="kv_len kv_start")
    arrays, flags = case.arrays(), case.flags()
    expected = attend(backend, *arrays, **flags)
    poisoned = [a.copy() for a in arrays]
    for b in range(case.batch):
        for a in poisoned[1:]:
            a[b, :, : flags["kv_start"][b]] = a[b, :, flags["kv_len"][b] :] = np.nan
    for found, clean in zip(attend(backend, *poisoned, **flags), expected, strict=True):
        np.testing.assert_array_equal(found, clean)


def test_lengths_of_a_row_of_its_own(backend):
    """One batch entry alone, cut by slicing, gives the rows that it has in the batch."""
    case = Case("alone", 40, 300, 24, batch=3, heads_q=4, lengths="q_len kv_len kv_start")
    (q, k, v), flags = case.arrays(), case.flags()
    out, lse = attend(backend, q, k, v, **flags)
    for b in range(case.batch):
        rows, keys = flags["q_len"][b], slice(flags["kv_start"][b], flags["kv_len"][b])
        alone = attend(backend, q[b, :, :rows], k[b, :, keys], v[b, :, keys])
        assert_close((out[b, :, :rows], lse[b, :, :rows]), alone)
        assert not out[b, :, rows:].any()
        assert np.isneginf(lse[b, :, rows:]).all()


def test_every_length_of_two_leading_axes(backend, rng):
    q, k = (rng.standard_normal((2, 3, 4, n, 8)) for n in (5, 9))
    kv_len, align = rng.integers(0, 10, (2, 3)), rng.integers(-3, 9, 3)
    flags = {"kv_len": kv_len, "align": align, "causal": True, "alibi": rng.random((3, 4))}
    exact = oracle.attention(q, k, k, **flags)
    assert_close(attend(backend, q, k, k, **flags), exact, 1e-14)


# --- sinks --------------------------------------------------------------------------------------


@pytest.mark.parametrize("sink", [-np.inf, -1e30, 0.0, 80.0, 1e30])
def test_sinks_of_any_size(sink, backend):
    q, k, v = Case("sinks", 40, 300).arrays()
    sinks = np.array([sink, 1], F4)
    out, lse = attend(backend, q, k, v, sinks=sinks, causal=True, align=-20)
    exact, formula = oracle.judge(q, k, v, sinks=sinks, causal=True, align=-20)
    oracle.assert_within_budget(out, exact[0], formula[0], floor=8)
    oracle.assert_within_budget(lse, exact[1], formula[1], floor=8)
    assert not out[:, :, :20].any()
    np.testing.assert_allclose(lse[0, :, 0], sinks, rtol=1e-6)


def test_sink_is_a_key_without_a_value(backend):
    q, k, v = Case("sinks", 40, 60, heads_q=1).arrays()
    bias = np.zeros(61)
    bias[-1] = 2.5
    k_more, v_more = (np.concatenate([a, np.zeros_like(a[..., :1, :])], axis=-2) for a in (k, v))
    found = attend(backend, q, k, v, sinks=np.array([2.5]))
    assert_close(found, attend(backend, q, k_more, v_more, bias=bias))


def test_rows_without_keys_have_the_sink_as_lse(backend, rng):
    """To the bit, and so whether the batch entry has keys for other rows or none at all."""
    q, k = (rng.standard_normal((3, 50, n, 8), dtype=F4) for n in (5, 9))
    sinks = rng.standard_normal(50, dtype=F4) * 30
    flags = {"kv_len": np.array([0, 9, 2]), "align": np.array([0, -9, -3]), "causal": True}
    out, lse = attend(backend, q, k, k, sinks=sinks, **flags)
    dead = np.array([[1, 1, 1, 1, 1], [1, 1, 1, 1, 1], [1, 1, 1, 0, 0]]) > 0
    for b in range(3):
        assert not out[b][:, dead[b]].any()
        expected = np.broadcast_to(sinks[:, None], (50, dead[b].sum()))
        np.testing.assert_array_equal(lse[b][:, dead[b]], expected)


def test_no_keys_but_sinks(backend):
    q, k = np.ones((2, 4, 3, 8), F4), np.ones((2, 4, 0, 8), F4)
    out, lse = attend(backend, q, k, k, sinks=np.arange(4.0))
    assert not out.any()
    np.testing.assert_array_equal(lse, np.broadcast_to(np.arange(4.0)[:, None], (2, 4, 3)))


# --- half precision -----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", HALVES)
def test_halves_are_rounded_once(dtype, backend):
    case = Case("half", 70, 300, 40, 24, heads_q=4, heads_kv=2, dtype=dtype, mask="qk", bias="hqk")
    q, k, v = case.arrays()
    out, lse = attend(backend, q, k, v, **case.flags())
    wide, wide_lse = attend(backend, *(a.astype(F4) for a in (q, k, v)), **case.flags())
    np.testing.assert_array_equal(out, wide.astype(out.dtype))
    np.testing.assert_array_equal(lse, wide_lse)


@pytest.mark.unguarded
@pytest.mark.parametrize("dtype", HALVES)
def test_halves_are_converted_by_the_block(dtype, backend):
    case = Case("half", 256, 32768, 64, heads_q=2, dtype=dtype)
    q, k, v = case.arrays()
    fastattn.attention(q[..., :64, :], k, v, backend=backend)  # compiled, threads up
    tracemalloc.start()
    try:
        fastattn.attention(q, k, v, backend=backend)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 12 << 20  # k in float32 is 16 MiB, and so is v


@pytest.mark.parametrize("dtype", HALVES)
def test_halves_of_any_strides(dtype, backend):
    q, k, v = Case("half", 33, 70, 24, heads_q=2, dtype=dtype).arrays()
    expected = fastattn.attention(q, k, v, backend=backend)
    views = [np.repeat(a, 2, axis=-1)[..., ::2] for a in (q, k, v)]
    np.testing.assert_array_equal(fastattn.attention(*views, backend=backend), expected)
    backwards = [np.ascontiguousarray(a[..., ::-1, ::-1])[..., ::-1, ::-1] for a in (q, k, v)]
    np.testing.assert_array_equal(fastattn.attention(*backwards, backend=backend), expected)


# --- dropout ------------------------------------------------------------------------------------


def test_dropout_is_the_same_in_any_tiling(backend):
    case = Case("dropout", 300, 1100, 16, batch=2, heads_q=4, heads_kv=2, dropout_p=0.3)
    q, k, v = case.arrays()
    flags = {"dropout_p": 0.3, "dropout_seed": 11}
    out, _ = attend(backend, q, k, v, **flags)
    keep = fastattn.dropout_mask(case.shape("bhqk"), **flags)
    exact, _ = oracle.attention(q, k, v, keep=keep, dropout_p=0.3)
    np.testing.assert_allclose(out, exact, rtol=0, atol=2e-6)
    for threads in (1, 3):
        with fastattn.num_threads(threads):
            np.testing.assert_array_equal(attend(backend, q, k, v, **flags)[0], out)


def test_dropout_mask_does_not_depend_on_the_shape():
    flags = {"dropout_p": 0.3, "dropout_seed": 2**63 - 1}
    whole = fastattn.dropout_mask((2, 3, 4, 50, 70), **flags)
    np.testing.assert_array_equal(
        whole[0, :2, :3, :20, :30], fastattn.dropout_mask((2, 3, 20, 30), **flags)
    )
    np.testing.assert_array_equal(whole[0, 0, 0], fastattn.dropout_mask((50, 70), **flags))
    assert not fastattn.dropout_mask((5, 7), dropout_p=1.0).any()
    assert fastattn.dropout_mask((5, 7), dropout_p=0.0).all()


# Numbers of standard deviations: the largest of a few hundred stays below 5 but once in 10 000.
LIMIT = 5.0


@pytest.mark.parametrize("seed", [0, 1, 2**40])
@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_dropout_looks_random(p, seed):
    """Means of the whole, of rows and of keys; products of neighbours along every axis."""
    keep = fastattn.dropout_mask((2, 4, 256, 1024), dropout_p=p, dropout_seed=seed)
    z = ((keep - (1 - p)) / np.sqrt(p * (1 - p))).astype(F4)
    scores = [z.mean(dtype=float) * np.sqrt(z.size)]
    for axis in range(4):
        for lag in (1, 2, 3, 4, 8, 16, 64, 128):
            if lag < z.shape[axis]:
                both = np.take(z, range(lag, z.shape[axis]), axis) * np.take(
                    z, range(z.shape[axis] - lag), axis
                )
                scores.append(both.mean(dtype=float) * np.sqrt(both.size))
        means = z.mean(axis=axis, dtype=float).ravel() * np.sqrt(z.shape[axis])
        scores.append((means**2 - 1).mean() * np.sqrt(means.size / 2))
    assert np.abs(scores).max() < LIMIT


@pytest.mark.parametrize("seed", range(4))
def test_dropout_counts_patterns_of_neighbours_evenly(seed):
    """Chi-squared of 12 keep bits in a row, which do not overlap, at p = 1/2."""
    keep = fastattn.dropout_mask((4, 512, 4092), dropout_p=0.5, dropout_seed=seed)
    words = keep.reshape(-1, 12) @ (1 << np.arange(12))
    counts = np.bincount(words, minlength=4096)
    expected = words.size / 4096
    chi2 = ((counts - expected) ** 2 / expected).sum()
    assert abs(chi2 - 4095) / np.sqrt(2 * 4095) < LIMIT


def test_one_bit_of_the_seed_changes_half_of_the_mask():
    masks = [
        fastattn.dropout_mask((1, 64, 1024), dropout_p=0.5, dropout_seed=seed)
        for seed in [0, *(1 << bit for bit in range(63))]
    ]
    share = [(mask != masks[0]).mean() for mask in masks[1:]]
    assert np.abs(np.array(share) - 0.5).max() < LIMIT / 2 / np.sqrt(masks[0].size)


def test_rows_have_keys_of_their_own():
    keys = dropout.chained(dropout.head_keys(0, 8, 16)[..., None], np.arange(1024))
    assert len(np.unique(keys)) == keys.size


# --- merging ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
def test_merged_parts_are_the_whole(dtype, backend):
    case = Case("merge", 33, 70, heads_q=4, batch=2, dtype=dtype, mask="b1qk", sinks=True)
    (q, k, v), mask = case.arrays(), case.flags()["mask"]
    sinks = case.flags()["sinks"]
    whole = attend(backend, q, k, v, mask=mask, sinks=sinks)
    a = attend(backend, q, k[..., :30, :], v[..., :30, :], mask=mask[..., :30], sinks=sinks)
    b = attend(backend, q, k[..., 30:, :], v[..., 30:, :], mask=mask[..., 30:])
    out, lse = fastattn.merge(*a, *b)
    assert out.dtype == dtype
    assert lse.dtype == whole[1].dtype
    atol = {"float32": 2e-6, "float64": 1e-14, "float16": 2e-3}[dtype]
    np.testing.assert_allclose(out, whole[0], rtol=0, atol=atol)
    np.testing.assert_allclose(lse, whole[1], rtol=0, atol=min(atol, 2e-6))


def test_merge_keeps_nan_in_its_row():
    out, lse = np.ones((3, 2), F4), np.zeros(3, F4)
    bad_out, bad_lse = out.copy(), lse.copy()
    bad_out[1], bad_lse[1] = np.nan, np.nan
    bad_lse[2] = -np.inf
    bad_out[2] = np.nan  # of an empty part, so nothing
    merged, merged_lse = fastattn.merge(out, lse, bad_out, bad_lse)
    np.testing.assert_array_equal(np.isnan(merged), [[0, 0], [1, 1], [0, 0]])
    np.testing.assert_array_equal(np.isnan(merged_lse), [0, 1, 0])


# --- inspecting ---------------------------------------------------------------------------------

ROWS = [slice(None), slice(3, 30, 4), slice(0, 0), [5], [31, -1, 0, 5], np.arange(32)]
INSPECTED = [
    Case("weights", 33, 70, causal=True),
    Case("weights", 33, 300, batch=2, heads_q=4, heads_kv=2, mask="b1qk", bias="hqk", sinks=True),
    Case("weights", 33, 70, batch=3, heads_q=4, lengths="q_len kv_len kv_start", alibi="bh"),
    Case("weights", 33, 70, batch=3, lengths="one kv_len kv_start", chunk=16, mask="qk"),
    Case("weights", 33, 70, heads_q=4, softcap=2.0, window=(5, 5), dtype="float16"),
    Case("weights", 33, 70, batch=2, lengths="kv_len align", causal=True, dtype="float64"),
]


def weights_of(case):
    """Return all probabilities: what attention gives to values that are a unit matrix."""
    q, k, _ = case.arrays()
    unit = np.broadcast_to(np.eye(case.seqlen_k), (*k.shape[:-1], case.seqlen_k))
    return oracle.attention(q, k, unit, **case.flags())[0]


@pytest.mark.parametrize("case", INSPECTED, ids=str)
@pytest.mark.parametrize("rows", ROWS, ids=str)
def test_weights_of_chosen_rows(rows, case):
    q, k, _ = case.arrays()
    found = fastattn.attention_weights(q, k, rows=rows, **case.flags())
    expected = weights_of(case)[..., rows, :]
    assert found.shape == expected.shape
    assert found.dtype == (np.float64 if case.dtype == "float64" else np.float32)
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-6)
    sums = fastattn.attention_key_sums(q, k, rows=rows, **case.flags())
    np.testing.assert_allclose(sums, expected.sum(axis=-2), rtol=0, atol=1e-5)


def test_weights_of_one_head():
    q, k, _ = (a[0, 0] for a in Case("weights", 5, 9).arrays())
    assert fastattn.attention_weights(q, k, rows=[1, 2]).shape == (2, 9)
    assert fastattn.attention_key_sums(q, k).shape == (9,)


def test_weights_of_hidden_keys_are_zero_even_in_a_nan_row():
    q, k, _ = Case("weights", 5, 9).arrays()
    k[..., 7, :] = np.nan
    weights = fastattn.attention_weights(q, k, causal=True)
    np.testing.assert_array_equal(weights[..., 0, 5:], 0)
    assert np.isnan(weights[..., 4, :]).all()
    assert np.isfinite(weights[..., :3, :]).all()


def test_key_sums_take_no_memory_for_all_rows():
    q, k, _ = Case("weights", 8192, 2048, 8, heads_q=1).arrays()
    tracemalloc.start()
    try:
        sums = fastattn.attention_key_sums(q, k)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    np.testing.assert_allclose(sums.sum(), 8192, rtol=1e-5)
    assert peak < 16 << 20  # all probabilities are 64 MiB
