"""Faults that users of attention libraries reported, each with the kind it stands for.

The test id starts with the report's letter and number in the collection of such reports that this
file covers; the docstring says what went wrong where.
"""

from __future__ import annotations

import multiprocessing
import os
import threading

import numpy as np
import oracle
import pytest
from cases import Case

import fastattn

F4 = np.float32
MIN = np.finfo(F4).min


def attend(backend, q, k, v, **flags):
    """Return (out, lse), written into an output full of NaN."""
    shape = (*np.broadcast_shapes(q.shape[:-2], (*v.shape[:-3], 1)), q.shape[-2], v.shape[-1])
    out = np.full(shape, np.nan, q.dtype)
    return fastattn.attention(q, k, v, **flags, return_lse=True, out=out, backend=backend)


def assert_exact(backend, q, k, v, **flags):
    out, lse = attend(backend, q, k, v, **flags)
    exact, formula = oracle.judge(q, k, v, **flags)
    oracle.assert_within_budget(out, exact[0], formula[0], floor=8)
    oracle.assert_within_budget(lse, exact[1], formula[1], floor=8)
    return out


def column(*values, dtype=F4):
    """Return values as (1, 1, n, 1)."""
    return np.array(values, dtype).reshape(1, 1, -1, 1)


def two_rows():
    """Two queries and two keys of ones: both keys weigh the same."""
    q = np.ones((1, 1, 2, 2), F4)
    return q, q, np.array([[[[0, 1], [2, 3]]]], F4)


def case_id(rows):
    return [pytest.param(*row[1:], id=row[0]) for row in rows]


# --- A: masks and fully masked rows ---------------------------------------------------------------

TWO_ROW_MASK = np.array([[True, True], [False, False]])
MIN_ROWS = np.array([[0, 0], [MIN, MIN]], F4)
INF_ROWS = np.where(TWO_ROW_MASK, F4(0), -np.inf)


@pytest.mark.parametrize(
    ("flags", "second_row", "second_lse"),
    case_id(
        [
            ("A01-F10-bool", {"mask": TWO_ROW_MASK}, [0, 0], -np.inf),
            ("A01-F10-minus-inf", {"bias": INF_ROWS}, [0, 0], -np.inf),
            ("A01-both", {"mask": TWO_ROW_MASK, "bias": MIN_ROWS}, [0, 0], -np.inf),
            ("A03-min", {"bias": MIN_ROWS}, [1, 2], MIN),
            ("A04-min-plus-min", {"bias": INF_ROWS + MIN_ROWS}, [0, 0], -np.inf),
        ]
    ),
)
def test_dead_row(flags, second_row, second_lse, backend):
    """NaN or mean(v) where a row may attend to nothing; NaN or zeros for a row of finfo.min."""
    out, lse = attend(backend, *two_rows(), **flags)
    np.testing.assert_allclose(out[0, 0], [[1, 2], second_row], rtol=1e-6)
    np.testing.assert_allclose(lse[0, 0, 0], 2.107361, rtol=1e-6)
    # A kernel that works in base 2 cannot hold finfo.min / ln 2: finite and huge is enough.
    np.testing.assert_allclose(lse[0, 0, 1], second_lse, rtol=0.31)


def test_A03_long_rows_of_min(backend):
    """NaN from finfo.min as padding of 441 keys."""
    q, k, v = Case("A03", 441, 441, 64, batch=2, heads_q=2).arrays()
    keys = np.arange(441) >= 128
    by_min, _ = attend(backend, q, k, v, bias=np.where(keys, F4(0), MIN))
    by_mask, _ = attend(backend, q, k, v, mask=keys)
    np.testing.assert_allclose(by_min, by_mask, rtol=0, atol=1e-6)


def test_A04_mixed_fills_in_one_row(backend):
    """Padding and causal fills of finfo.min summed to -inf, then NaN."""
    q, k, v = Case("A04", 40, 40).arrays()
    padding = np.where(np.arange(40) < 25, F4(0), MIN)
    with np.errstate(over="ignore"):
        bias = padding + np.where(np.tri(40) > 0, F4(0), MIN)
    assert np.isneginf(bias).any()
    assert (bias == MIN).any()
    assert_exact(backend, q, k, v, bias=bias)


def test_A07_B04_mask_and_causal_intersect(backend):
    """One of mask and causal was ignored, or the dead row became mean(v)."""
    q = np.zeros((1, 1, 2, 1), F4)
    mask = np.array([[False, True], [True, True]])
    flags = {"causal": True, "align": "top_left"}
    for extra in ({"mask": mask}, {"bias": np.where(mask, F4(0), -np.inf)}):
        out, _ = attend(backend, q, q, column(1, 2), **flags, **extra)
        np.testing.assert_array_equal(out.ravel(), [0, 1.5])


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf], ids=str)
@pytest.mark.parametrize("where", ["k", "v"])
def test_A09_masked_key_holds_no_poison(where, bad, backend):
    """NaN or inf in a masked key reached the row through 0 * inf or NaN + -inf."""
    q, k = np.ones((1, 1, 1, 2), F4), np.ones((1, 1, 2, 2), F4)
    v = np.array([[[[1, 2], [3, 4]]]], F4)
    {"k": k, "v": v}[where][..., 1, :] = bad
    for flags in (
        {"mask": np.array([True, False])},
        {"bias": np.array([0, -np.inf], F4)},
        {"causal": True, "align": "top_left"},
    ):
        out, _ = attend(backend, q, k, v, **flags)
        np.testing.assert_array_equal(out[0, 0, 0], [1, 2])


def test_A10_uninitialised_cache_tail(backend):
    """The unused end of a key-value cache leaked NaN."""
    q, k, v = Case("A10", 3, 128, 32, batch=4, heads_q=4, heads_kv=2).arrays()
    lengths = [32, 64, 96, 48]
    for slot, length in enumerate(lengths):
        k[slot, :, length:] = v[slot, :, length:] = np.nan
    mask = np.arange(128) < np.array(lengths)[:, None, None, None]
    out, lse = attend(backend, q, k, v, mask=mask)
    assert_slots_are_cut(backend, q, k, v, lengths, out, lse)


def test_A10_cache_of_known_lengths(backend):
    """The same by kv_len, with a left pad of NaN as well."""
    q, k, v = Case("A10", 3, 128, 32, batch=4, heads_q=4, heads_kv=2).arrays()
    lengths = np.array([32, 64, 96, 48])
    for slot, length in enumerate(lengths):
        k[slot, :, length:] = v[slot, :, length:] = np.nan
    out, lse = attend(backend, q, k, v, kv_len=lengths)
    assert_slots_are_cut(backend, q, k, v, lengths, out, lse)
    k[:, :, :9] = v[:, :, :9] = np.inf
    out, _ = attend(backend, q, k, v, kv_len=lengths, kv_start=9, causal=True)
    for slot, length in enumerate(lengths):
        cut = k[slot, :, 9:length], v[slot, :, 9:length]
        expected, _ = attend(backend, q[slot], *cut, causal=True)
        np.testing.assert_allclose(out[slot], expected, rtol=0, atol=1e-6)


def assert_slots_are_cut(backend, q, k, v, lengths, out, lse):
    for slot, length in enumerate(lengths):
        cut = k[slot, :, :length], v[slot, :, :length]
        expected, expected_lse = attend(backend, q[slot], *cut)
        np.testing.assert_allclose(out[slot], expected, rtol=0, atol=1e-6)
        np.testing.assert_allclose(lse[slot], expected_lse, rtol=0, atol=1e-6)


def test_A11_nan_query_is_not_zero(backend):
    """All-NaN queries silently gave zeros."""
    q, k, v = Case("A11", 16, 16, 8, batch=2, heads_q=4).arrays()
    for flags in ({}, {"causal": True}, {"mask": np.tri(16) > 0}):
        out, lse = attend(backend, np.full_like(q, np.nan), k, v, **flags)
        assert np.isnan(out).all()
        assert np.isnan(lse).all()


def test_A13_half_mask_of_its_smallest_number(backend):
    """-65504 plus a score overflowed to -inf in float16, then NaN."""
    half = np.float16
    q, k, v = column(-1, dtype=half), column(20, 40, dtype=half), column(1, 2, dtype=half)
    out, _ = attend(backend, q, k, v, bias=np.full((1, 2), -65504, half), scale=1)
    assert out.dtype == half
    assert out.ravel() == 1


def test_A14_float_zeros_and_ones_are_added(backend):
    """A 0/1 float mask looks like a bool one; it is added as what it is."""
    zero = column(0), column(0, 0), column(0, 1)
    out, _ = attend(backend, *zero, bias=np.array([1, 0], F4))
    np.testing.assert_allclose(out.ravel(), 0.268941, atol=1e-6)


@pytest.mark.parametrize("dtype", ["int64", "uint8", "int8"])
def test_A15_integer_mask(dtype, backend):
    """An integer mask failed late or was added."""
    q, k, v = Case("A15", 4, 5).arrays()
    for name in ("mask", "bias"):
        with pytest.raises(TypeError, match=f"{name} must be .*, got {dtype}"):
            attend(backend, q, k, v, **{name: np.ones((4, 5), dtype)})


@pytest.mark.parametrize("bias_dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_A15_bias_of_another_width(dtype, bias_dtype, backend):
    """A float mask unlike q failed, or upcast the output."""
    case = Case("A15", 20, 33, dtype=dtype, bias="qk", bias_dtype=bias_dtype)
    out = assert_exact(backend, *case.arrays(), **case.flags())
    assert out.dtype == dtype


def test_A17_polarity(backend):
    """True was read as "hide"; bool and float form differed."""
    zero = column(0), column(0, 0), column(5, 7)
    out, _ = attend(backend, *zero, mask=np.array([True, False]))
    assert out.ravel() == 5
    case = Case("A17", 33, 70, heads_q=4, mask="hqk")
    mask = case.flags()["mask"]
    by_mask, _ = attend(backend, *case.arrays(), mask=mask)
    by_bias, _ = attend(backend, *case.arrays(), bias=np.where(mask, F4(0), -np.inf))
    np.testing.assert_array_equal(by_mask, by_bias)


@pytest.mark.parametrize(
    "shape",
    [
        (1, 1, 5),
        (5,),
        (7, 5),
        (7, 1),
        (1, 5),
        (3, 1, 1, 1, 5),
        (1, 1, 4, 1, 5),
        (2, 1, 7, 5),
        (),
        (1,),
    ],
    ids=str,
)
def test_A18_size_one_axes_broadcast(shape, backend, rng):
    """Masks of size 1 or lower rank were not broadcast."""
    q, k = (rng.standard_normal((3, 2, 4, n, 16), dtype=F4) for n in (7, 5))
    mask = rng.random(shape) < 0.7
    if len(shape) == 4:
        shape = (2, 1, 7, 5)
    out, _ = attend(backend, q, k, k, mask=mask)
    expected, _ = attend(backend, q, k, k, mask=np.broadcast_to(mask, (3, 2, 4, 7, 5)))
    np.testing.assert_array_equal(out, expected)
    assert_exact(backend, q, k, k, bias=np.where(mask, F4(0.3), -np.inf))


@pytest.mark.parametrize("shape", [(4,), (5, 7), (5, 1), (2, 7, 5), (3, 4, 7, 5)], ids=str)
def test_A18_shapes_that_do_not_fit(shape, backend):
    q, k = np.ones((3, 2, 4, 7, 16), F4), np.ones((3, 2, 4, 5, 16), F4)
    message = r"mask must broadcast to the scores \(3, 2, 4, 7, 5\), got "
    with pytest.raises(ValueError, match=message):
        attend(backend, q, k, k, mask=np.ones(shape, bool))


@pytest.mark.parametrize("axes", ["b1qk", "bhqk", "b11k", "1hqk"])
def test_A19_grouped_heads_with_a_mask_per_batch_and_head(axes, backend):
    """The mask was misaligned once the batch had two entries."""
    case = Case("A19", 16, 16, 8, batch=2, heads_q=40, heads_kv=8, mask=axes, bias=axes)
    flags = case.flags()
    assert_exact(backend, *case.arrays(), mask=flags["mask"])
    assert_exact(backend, *case.arrays(), bias=flags["bias"])


def test_A20_mask_of_flattened_heads(backend):
    """(batch * heads, seqlen_q, seqlen_k) was read in tile order; it must be refused."""
    q, k = np.ones((2, 3, 4, 5), F4), np.ones((2, 3, 4, 5), F4)
    with pytest.raises(ValueError, match=r"\(2, 3, 4, 4\), got \(6, 4, 4\)"):
        attend(backend, q, k, k, mask=np.ones((6, 4, 4), bool))


def test_A23_causal_without_a_mask(backend):
    """causal was skipped when no mask was given."""
    assert_exact(backend, *Case("A23", 33, 33).arrays(), causal=True)
    assert_exact(backend, *Case("A23", 1, 33, dtype="float64").arrays(), causal=True, align=3)


# --- B: causal alignment and windows --------------------------------------------------------------


@pytest.mark.parametrize(
    ("seqlen_q", "align", "rows"),
    case_id(
        [
            ("B01-top-left", 2, "top_left", [1, 1.5]),
            ("B01-bottom-right", 2, "bottom_right", [2.5, 3]),
            ("B02-top-left", 1, "top_left", [1]),
            ("B02-bottom-right", 1, "bottom_right", [3]),
            ("B01-more-queries", 7, "bottom_right", [0, 0, 1, 1.5, 2, 2.5, 3]),
            ("B01-more-queries-top-left", 7, "top_left", [1, 1.5, 2, 2.5, 3, 3, 3]),
        ]
    ),
)
def test_alignment_of_unequal_lengths(seqlen_q, align, rows, backend):
    """Libraries, and even CPU and GPU of one, disagreed on which keys a row sees."""
    q, k = column(*[0] * seqlen_q), column(*[0] * 5)
    out, _ = attend(backend, q, k, column(1, 2, 3, 4, 5), causal=True, align=align)
    np.testing.assert_allclose(out.ravel(), rows, rtol=1e-6)


def test_B01_B02_torch_function_is_top_left():
    q, k, v = column(0, 0), column(*[0] * 5), column(1, 2, 3, 4, 5)
    out = fastattn.scaled_dot_product_attention(q, k, v, is_causal=True)
    np.testing.assert_allclose(out.ravel(), [1, 1.5])


def test_B04_torch_function_refuses_both():
    q = column(0, 0)
    for mask in (np.ones((2, 2), bool), np.ones((2, 2), F4)):
        with pytest.raises(ValueError, match="attn_mask must be None if is_causal is True"):
            fastattn.scaled_dot_product_attention(q, q, q, mask, is_causal=True)


@pytest.mark.parametrize("seqlen_q", [1, 7, 16, 33, 64, 65, 129])
@pytest.mark.parametrize("seqlen_k", [1, 7, 16, 33, 64, 65, 129])
def test_B06_block_edges(seqlen_q, seqlen_k, backend):
    """Wrong where lengths differ and end inside a block."""
    arrays = Case("B06", seqlen_q, seqlen_k, 8).arrays()
    for align in ("top_left", "bottom_right"):
        assert_exact(backend, *arrays, causal=True, align=align)
        assert_exact(backend, *arrays, window=(9, 4), align=align)
    assert_exact(backend, *arrays)


# --- C: layout, strides, dtypes -------------------------------------------------------------------


@pytest.mark.parametrize("step", [2, -1, 3])
def test_C01_inner_stride(step, backend, rng):
    """A head dimension that is not contiguous gave wrong numbers."""
    q, k, v = (rng.standard_normal((2, 2, n, 48), dtype=F4)[..., ::step] for n in (20, 33, 33))
    out, _ = attend(backend, q, k, v)
    expected, _ = attend(backend, *map(np.ascontiguousarray, (q, k, v)))
    np.testing.assert_array_equal(out, expected)
    q = np.ascontiguousarray(q.swapaxes(-1, -2)).swapaxes(-1, -2)
    out, _ = attend(backend, q, k, v)
    np.testing.assert_array_equal(out, expected)


def test_C02_heads_last_layout(backend, rng):
    """Permuted (batch, seqlen, heads, head_dim) views gave garbage."""
    q, k, v = (rng.standard_normal((84, 3, 3, 64), dtype=F4).transpose(0, 2, 1, 3) for _ in "qkv")
    out, _ = attend(backend, q, k, v)
    expected, _ = attend(backend, *map(np.ascontiguousarray, (q, k, v)))
    np.testing.assert_array_equal(out, expected)


def test_C04_expanded_keys(backend, rng):
    """Keys expanded with stride 0 were refused or materialised; batch 1 should broadcast."""
    q = rng.standard_normal((3, 4, 20, 16), dtype=F4)
    one = rng.standard_normal((1, 4, 33, 16), dtype=F4)
    full = np.broadcast_to(one, (3, 4, 33, 16))
    expected, _ = attend(backend, q, full.copy(), full.copy())
    for k in (one, full):
        out, _ = attend(backend, q, k, k)
        np.testing.assert_array_equal(out, expected)


def test_C05_read_only_inputs(backend):
    """Read-only arrays were refused by typed signatures."""
    case = Case("C05", 20, 33, mask="qk", bias="k")
    arrays, flags = case.arrays(), case.flags()
    expected, _ = attend(backend, *arrays, **flags)
    for a in (*arrays, flags["mask"], flags["bias"]):
        a.setflags(write=False)
    out, _ = attend(backend, *arrays, **flags)
    np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_C07_halves(dtype, backend):
    """Half-precision arrays failed typing; they are converted inside, and rounded once."""
    for case in (Case("C07", 20, 33, dtype=dtype), Case("C07", 1, 300, 64, dtype=dtype)):
        q, k, v = case.arrays()
        out, lse = fastattn.attention(q, k, v, return_lse=True, backend=backend)
        assert out.dtype == q.dtype
        assert lse.dtype == F4
        wide, wide_lse = attend(backend, *(a.astype(F4) for a in (q, k, v)))
        np.testing.assert_array_equal(out, wide.astype(q.dtype))
        np.testing.assert_array_equal(lse, wide_lse)


@pytest.mark.parametrize("dtype", ["float16", "float64", "int32", "complex64", "bool", "object"])
def test_C07_C08_dtypes_that_differ(dtype, backend):
    """Mixed and integer dtypes crashed deep inside; they are refused by name."""
    arrays = Case("C08", 4, 5).arrays()
    for n in range(3):
        changed = [a.astype(dtype) if m == n else a for m, a in enumerate(arrays)]
        with pytest.raises(
            TypeError, match=r"must (be float16, .* or float64|have the same dtype), got"
        ):
            fastattn.attention(*changed, backend=backend)


def test_C09_output_layout(backend):
    """The layout of the output depended on the path taken."""
    q, k, v = (a.swapaxes(1, 2).copy().swapaxes(1, 2) for a in Case("C09", 9, 12).arrays())
    for flags in ({}, {"causal": True}, {"mask": True}):
        out, lse = fastattn.attention(q, k, v, **flags, return_lse=True, backend=backend)
        assert out.flags.c_contiguous
        assert lse.flags.c_contiguous


# --- D: shapes ------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", ["batch", "heads_q", "seqlen_q", "seqlen_k", "head_dim"])
@pytest.mark.parametrize("causal", [False, True])
def test_D01_D02_empty(size, causal, backend):
    """Empty arrays crashed with SIGFPE or SIGSEGV."""
    case = Case(**{**vars(Case("D01", 4, 5, 8, 6, batch=2)), size: 0})
    q, k, v = case.arrays()
    out, lse = attend(backend, q, k, v, causal=causal)
    assert out.shape == (case.batch, case.heads_q, case.seqlen_q, 6)
    if size == "seqlen_k":
        assert not out.any()
        assert np.isneginf(lse).all()
    if size == "head_dim" and not causal:
        mean = np.broadcast_to(v.mean(axis=-2, keepdims=True), out.shape)
        np.testing.assert_allclose(out, mean, rtol=0, atol=1e-6)


def test_D01_no_key_heads(backend):
    q, k = np.ones((2, 4, 3, 8), F4), np.ones((2, 0, 3, 8), F4)
    with pytest.raises(ValueError, match="q heads must be a multiple of k heads, got 4 and 0"):
        fastattn.attention(q, k, k, backend=backend)


@pytest.mark.parametrize(
    "head_dim", [1, 2, 3, 5, 7, 9, 31, 33, 37, 48, 59, 65, 80, 96, 224, 257, 300, 513]
)
def test_D05_odd_head_dims(head_dim, backend):
    """Head dimensions that no register width divides were wrong or refused."""
    assert_exact(backend, *Case("D05", 33, 33, head_dim).arrays())
    assert_exact(backend, *Case("D05", 1, 33, head_dim).arrays(), causal=True)


@pytest.mark.parametrize(
    "case",
    [
        Case("D07", 4, 4, 5, 7, batch=2, heads_q=3),
        Case("D07", 1, 36, 32, 24, heads_q=8, heads_kv=1, batch=8),
        Case("D07", 40, 300, 64, 1),
        Case("D07", 40, 300, 1, 64),
    ],
    ids=str,
)
def test_D07_values_of_another_width(case, backend):
    """head_dim_v unlike head_dim crashed, or the scale came from the wrong one."""
    out = assert_exact(backend, *case.arrays())
    assert out.shape[-1] == case.head_dim_v


@pytest.mark.parametrize(
    ("lengths_q", "lengths_k"),
    case_id(
        [
            ("D03", [0, 1, 0, 1], [0, 3, 0, 5]),
            ("D03-no-keys", [2, 0, 3], [0, 4, 7]),
            ("D03-nothing", [0, 0], [0, 0]),
            ("D03-one", [5], [9]),
        ]
    ),
)
def test_packed_members_of_no_length(lengths_q, lengths_k, backend, rng):
    """Zero-length members and a longest member of one row crashed or shifted the others."""
    q = rng.standard_normal((sum(lengths_q), 9, 64), dtype=F4)
    k, v = (rng.standard_normal((sum(lengths_k), 3, 64), dtype=F4) for _ in "kv")
    edges_q, edges_k = (np.cumsum([0, *lengths]) for lengths in (lengths_q, lengths_k))
    out, lse = fastattn.attention_varlen(
        q, k, v, edges_q, edges_k, causal=True, return_lse=True, backend=backend
    )
    assert out.shape == q.shape
    assert lse.shape == (9, len(q))
    for b in range(len(lengths_q)):
        rows, keys = slice(*edges_q[b : b + 2]), slice(*edges_k[b : b + 2])
        dense = (a.swapaxes(0, 1) for a in (q[rows], k[keys], v[keys]))
        expected, expected_lse = attend(backend, *dense, causal=True)
        np.testing.assert_allclose(out[rows].swapaxes(0, 1), expected, rtol=0, atol=1e-6)
        np.testing.assert_allclose(lse[:, rows], expected_lse, rtol=0, atol=1e-6)


def test_D09_ranks(backend):
    """Ranks other than four."""
    q, k, v = Case("D09", 9, 12, batch=2, heads_q=3).arrays()
    expected, _ = attend(backend, q, k, v)
    for index in ((0,), (0, 1), (None,)):
        out = fastattn.attention(q[index], k[index], v[index], backend=backend)
        np.testing.assert_allclose(out, expected[index], rtol=0, atol=1e-6)
    with pytest.raises(ValueError, match="q must have rank 2 or more"):
        fastattn.attention(q[0, 0, 0], k[0, 0], v[0, 0], backend=backend)


@pytest.mark.parametrize("shape", [(65537, 1, 4, 4), (1, 65537, 2, 4)], ids=str)
def test_D10_more_slots_than_16_bits(shape, backend, rng):
    """Batches and heads beyond 65535 were silently skipped."""
    q, k, v = (rng.standard_normal(shape, dtype=F4) for _ in "qkv")
    assert_exact(backend, q, k, v)


# --- E: grouped heads and scale -------------------------------------------------------------------


def test_E02_heads_of_a_group_are_neighbours(backend):
    """Heads were tiled 0 1 0 1 instead of 0 0 1 1."""
    q, k = np.zeros((1, 4, 1, 1), F4), np.zeros((1, 2, 1, 1), F4)
    v = np.array([0, 1], F4).reshape(1, 2, 1, 1)
    out, _ = attend(backend, q, k, v)
    np.testing.assert_array_equal(out.ravel(), [0, 0, 1, 1])


@pytest.mark.parametrize(
    ("scale", "result"),
    case_id(
        [
            ("E04-zero", 0.0, 0.5),
            ("E04-default", None, 0.119203),
            ("E05-large", 2.0, 0.017986),
            ("E05-small", 0.5, 0.268941),
            ("E05-negative", -1.0, 0.880797),
        ]
    ),
)
def test_scale_is_literal(scale, result, backend):
    """0 meant "default", or the argument was ignored."""
    q, k, v = column(1), column(2, 0), column(0, 1)
    out, _ = attend(backend, q, k, v, scale=scale)
    np.testing.assert_allclose(out.ravel(), result, atol=1e-6)


@pytest.mark.parametrize("scale", [np.nan, np.inf, -np.inf], ids=str)
def test_E07_scale_is_finite(scale, backend):
    """A NaN scale gave plausible zeros."""
    with pytest.raises(ValueError, match="scale must be finite"):
        fastattn.attention(*Case("E07", 4, 5).arrays(), scale=scale, backend=backend)


# --- F: numerics ----------------------------------------------------------------------------------


def test_F01_large_scores(backend):
    """Softmax without subtracting the maximum overflowed."""
    q = np.full((1, 1, 1, 64), 300, F4)
    k = np.stack([np.full(64, 300, F4), np.full(64, 299, F4)])[None, None]
    out, lse = attend(backend, q, k, column(1, 2))
    assert out.ravel() == 1
    np.testing.assert_allclose(lse.ravel(), 64 * 300 * 300 / 8, rtol=1e-6)


def test_F01_large_scores_in_half_precision(backend):
    """Scores beyond 65504 overflowed float16."""
    half = np.float16
    q = np.full((1, 1, 1, 64), 300, half)
    k = np.stack([np.full(64, 300, half), np.full(64, 299, half)])[None, None]
    out, lse = fastattn.attention(q, k, column(1, 2, dtype=half), return_lse=True, backend=backend)
    assert out.ravel() == 1
    np.testing.assert_allclose(lse.ravel(), 64 * 300 * 300 / 8, rtol=1e-6)


def test_F04_softcap(backend):
    """tanh(x * cap) instead of cap * tanh(x / cap)."""
    out, _ = attend(backend, column(3), column(1, 0), column(1, 0), scale=1, softcap=2)
    np.testing.assert_allclose(out.ravel(), 0.859398, atol=1e-6)


def test_F06_long_sequences_with_a_mask(backend, rng):
    """Rows of a long masked call were wrong."""
    q, k, v = (rng.standard_normal((1, 4096, 16), dtype=F4) for _ in "qkv")
    mask = rng.random((1, 4096)) < 0.5
    out, _ = attend(backend, q, k, v, mask=mask, causal=True)
    rows = [0, 1, 1000, 2047, 2048, 4095]
    for row in rows:
        exact, _ = oracle.attention(q[:, row : row + 1], k, v, mask=mask, causal=True, align=row)
        np.testing.assert_allclose(out[:, row : row + 1], exact, rtol=0, atol=2e-6)


def test_F07_dropout(backend):
    """Dropout was rescaled wrongly, NaN at p = 1, or different in every run."""
    q, v = np.ones((1, 1, 10000, 2), F4), np.ones((1, 1, 16, 1), F4)
    k = q[..., :16, :]
    zeros, _ = attend(backend, q, k, v, dropout_p=1.0, dropout_seed=0)
    assert not zeros.any()
    half, lse = attend(backend, q, k, v, dropout_p=0.5, dropout_seed=0)
    assert abs(half.mean() - 1) < 0.05
    again, _ = attend(backend, q, k, v, dropout_p=0.5, dropout_seed=0)
    np.testing.assert_array_equal(again, half)
    np.testing.assert_array_equal(lse, attend(backend, q, k, v)[1])
    other, _ = attend(backend, q, k, v, dropout_p=0.5, dropout_seed=1)
    assert (other != half).any()


def test_F07_dropout_of_the_torch_function():
    q, v = np.ones((1, 1, 10000, 2), F4), np.ones((1, 1, 16, 1), F4)
    k = q[..., :16, :]
    assert not fastattn.scaled_dot_product_attention(q, k, v, None, 1.0).any()
    first, second = (fastattn.scaled_dot_product_attention(q, k, v, None, 0.5) for _ in "ab")
    assert abs(first.mean() - 1) < 0.05
    assert (first != second).any()


def test_F08_two_calls_are_the_same(backend):
    """Dropout fired in inference."""
    case = Case("F08", 100, 300, 32, heads_q=4)
    first, _ = attend(backend, *case.arrays())
    again, _ = attend(backend, *case.arrays())
    np.testing.assert_array_equal(first, again)


@pytest.mark.parametrize("seqlen_q", [1, 4, 7])
def test_F09_distance_of_alibi(seqlen_q, backend):
    """Sign or origin of ALiBi's distance was wrong where the lengths differ."""
    q, k, v = Case("F09", seqlen_q, 4, heads_q=1).arrays()
    i, j = np.arange(seqlen_q)[:, None], np.arange(4)
    bias = -0.5 * np.abs(i + 4 - seqlen_q - j)
    slopes = np.array([0.5], F4)
    for flags in ({}, {"causal": True}):
        out, lse = attend(backend, q, k, v, alibi=slopes, **flags)
        expected, expected_lse = attend(backend, q, k, v, bias=bias, **flags)
        np.testing.assert_allclose(out, expected, rtol=0, atol=1e-6)
        np.testing.assert_allclose(lse, expected_lse, rtol=0, atol=1e-6)


def test_F10_merging_with_an_empty_part(backend):
    """lse in base 2, or 0 for an empty row, breaks the merge of partial results."""
    q, k, v = Case("F10", 9, 12).arrays()
    whole = attend(backend, q, k, v)
    nothing = attend(backend, q, k, v, mask=np.zeros(12, bool))
    for merged in (fastattn.merge(*whole, *nothing), fastattn.merge(*nothing, *whole)):
        for found, expected in zip(merged, whole, strict=True):
            np.testing.assert_array_equal(found, expected)
    for found, expected in zip(fastattn.merge(*nothing, *nothing), nothing, strict=True):
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("bad", [np.nan, np.inf], ids=str)
def test_F12_the_tests_themselves_see_nan(bad):
    """A test passed because the reference was NaN as well."""
    good = np.ones(3, F4)
    for ours, exact in ((good * bad, good), (good, good * bad)):
        with pytest.raises(AssertionError):
            oracle.assert_within_budget(ours, exact, exact)


# --- G: process, threads, memory ------------------------------------------------------------------


def test_G01_many_python_threads(backend):
    """Two Python threads in one parallel kernel aborted the process."""
    case = Case("G01", 40, 70, heads_q=4, causal=True)
    arrays = case.arrays()
    expected, _ = attend(backend, *arrays, causal=True)
    wrong = []

    def work():
        for _ in range(30):
            out, _ = attend(backend, *arrays, causal=True)
            if not np.array_equal(out, expected):
                wrong.append(out)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def _answer(backend):
    return attend(backend, *Case("G02", 300, 300, 32, heads_q=4).arrays())[0]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_G02_forked_child(backend):
    """A child forked after a parallel kernel was killed at its first one."""
    expected = _answer(backend)
    with multiprocessing.get_context("fork").Pool(2) as pool:
        for out in pool.map(_answer, [backend] * 4, chunksize=1):
            np.testing.assert_array_equal(out, expected)


def test_G04_thread_limit_holds_in_other_threads():
    """A limit set in the main thread did not reach others."""
    before = fastattn.get_num_threads()
    seen = []
    try:
        fastattn.set_num_threads(1)
        thread = threading.Thread(target=lambda: seen.append(fastattn.get_num_threads()))
        thread.start()
        thread.join()
    finally:
        fastattn.set_num_threads(before)
    assert seen == [1]
