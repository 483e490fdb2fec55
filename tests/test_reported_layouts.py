"""Faults of layouts, dtypes and shapes that users of attention libraries reported.

`pytorch#123` is an issue and `pytorch!123` a change of the repository of that name; FA is
Dao-AILab/flash-attention, ORT microsoft/onnxruntime, HF huggingface/transformers.
"""

from __future__ import annotations

import numpy as np
import pytest
from calls import F4, assert_exact, attend, case_id
from cases import Case

import fastattn

# --- layout, strides, dtypes --------------------------------------------------------------------


@pytest.mark.parametrize("step", [2, -1, 3])
def test_inner_stride(step, backend, rng):
    """A head dimension that is not contiguous gave wrong numbers.

    Reported as pytorch!187506.
    """
    q, k, v = (rng.standard_normal((2, 2, n, 48), dtype=F4)[..., ::step] for n in (20, 33, 33))
    out, _ = attend(backend, q, k, v)
    expected, _ = attend(backend, *map(np.ascontiguousarray, (q, k, v)))
    np.testing.assert_array_equal(out, expected)
    q = np.ascontiguousarray(q.swapaxes(-1, -2)).swapaxes(-1, -2)
    out, _ = attend(backend, q, k, v)
    np.testing.assert_array_equal(out, expected)


def test_heads_last_layout(backend, rng):
    """Permuted (batch, seqlen, heads, head_dim) views gave garbage.

    Reported as pytorch#181133, pytorch#112577.
    """
    q, k, v = (rng.standard_normal((84, 3, 3, 64), dtype=F4).transpose(0, 2, 1, 3) for _ in "qkv")
    out, _ = attend(backend, q, k, v)
    expected, _ = attend(backend, *map(np.ascontiguousarray, (q, k, v)))
    np.testing.assert_array_equal(out, expected)


def test_expanded_keys(backend, rng):
    """Keys expanded with stride 0 were refused or materialised; batch 1 should broadcast.

    Reported as facebookresearch/xformers#87, pytorch!95657.
    """
    q = rng.standard_normal((3, 4, 20, 16), dtype=F4)
    one = rng.standard_normal((1, 4, 33, 16), dtype=F4)
    full = np.broadcast_to(one, (3, 4, 33, 16))
    expected, _ = attend(backend, q, full.copy(), full.copy())
    for k in (one, full):
        out, _ = attend(backend, q, k, k)
        np.testing.assert_array_equal(out, expected)


def test_read_only_inputs(backend):
    """Read-only arrays were refused by typed signatures.

    Reported as numba#4511, numba#3844.
    """
    case = Case("fault", 20, 33, mask="qk", bias="k")
    arrays, flags = case.arrays(), case.flags()
    expected, _ = attend(backend, *arrays, **flags)
    for a in (*arrays, flags["mask"], flags["bias"]):
        a.setflags(write=False)
    out, _ = attend(backend, *arrays, **flags)
    np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_halves(dtype, backend):
    """Half-precision arrays failed typing; they are converted inside, and rounded once.

    Reported as numba#8138, numba#4402.
    """
    for case in (Case("fault", 20, 33, dtype=dtype), Case("fault", 1, 300, 64, dtype=dtype)):
        q, k, v = case.arrays()
        out, lse = fastattn.attention(q, k, v, return_lse=True, backend=backend)
        assert out.dtype == q.dtype
        assert lse.dtype == F4
        wide, wide_lse = attend(backend, *(a.astype(F4) for a in (q, k, v)))
        np.testing.assert_array_equal(out, wide.astype(q.dtype))
        np.testing.assert_array_equal(lse, wide_lse)


@pytest.mark.parametrize("dtype", ["float16", "float64", "int32", "complex64", "bool", "object"])
def test_dtypes_that_differ(dtype, backend):
    """Mixed and integer dtypes crashed deep inside; they are refused by name.

    Reported as numba#8138, numba#4402, pytorch!161489.
    """
    arrays = Case("fault", 4, 5).arrays()
    for n in range(3):
        changed = [a.astype(dtype) if m == n else a for m, a in enumerate(arrays)]
        with pytest.raises(
            TypeError, match=r"must (be float16, .* or float64|have the same dtype), got"
        ):
            fastattn.attention(*changed, backend=backend)


def test_output_layout(backend):
    """The layout of the output depended on the path taken.

    Reported as pytorch#133671, pytorch#138340.
    """
    q, k, v = (a.swapaxes(1, 2).copy().swapaxes(1, 2) for a in Case("fault", 9, 12).arrays())
    for flags in ({}, {"causal": True}, {"mask": True}):
        out, lse = fastattn.attention(q, k, v, **flags, return_lse=True, backend=backend)
        assert out.flags.c_contiguous
        assert lse.flags.c_contiguous


# --- shapes -------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", ["batch", "heads_q", "seqlen_q", "seqlen_k", "head_dim"])
@pytest.mark.parametrize("causal", [False, True])
def test_empty(size, causal, backend):
    """Empty arrays crashed with SIGFPE or SIGSEGV.

    Reported as pytorch#141218, pytorch!175000, FA!2470, FA!2568.
    """
    case = Case(**{**vars(Case("fault", 4, 5, 8, 6, batch=2)), size: 0})
    q, k, v = case.arrays()
    out, lse = attend(backend, q, k, v, causal=causal)
    assert out.shape == (case.batch, case.heads_q, case.seqlen_q, 6)
    if size == "seqlen_k":
        assert not out.any()
        assert np.isneginf(lse).all()
    if size == "head_dim" and not causal:
        mean = np.broadcast_to(v.mean(axis=-2, keepdims=True), out.shape)
        np.testing.assert_allclose(out, mean, rtol=0, atol=1e-6)


def test_no_key_heads(backend):
    """Reported as pytorch#141218, pytorch!175000."""
    q, k = np.ones((2, 4, 3, 8), F4), np.ones((2, 0, 3, 8), F4)
    with pytest.raises(ValueError, match="q heads must be a multiple of k heads, got 4 and 0"):
        fastattn.attention(q, k, k, backend=backend)


@pytest.mark.parametrize(
    "head_dim", [1, 2, 3, 5, 7, 9, 31, 33, 37, 48, 59, 65, 80, 96, 224, 257, 300, 513]
)
def test_odd_head_dims(head_dim, backend):
    """Head dimensions that no register width divides were wrong or refused.

    Reported as FA#1347, FA#28.
    """
    assert_exact(backend, *Case("fault", 33, 33, head_dim).arrays())
    assert_exact(backend, *Case("fault", 1, 33, head_dim).arrays(), causal=True)


@pytest.mark.parametrize(
    "case",
    [
        Case("fault", 4, 4, 5, 7, batch=2, heads_q=3),
        Case("fault", 1, 36, 32, 24, heads_q=8, heads_kv=1, batch=8),
        Case("fault", 40, 300, 64, 1),
        Case("fault", 40, 300, 1, 64),
    ],
    ids=str,
)
def test_values_of_another_width(case, backend):
    """head_dim_v unlike head_dim crashed, or the scale came from the wrong one.

    Reported as pytorch#128348, ORT#28357.
    """
    out = assert_exact(backend, *case.arrays())
    assert out.shape[-1] == case.head_dim_v


@pytest.mark.parametrize(
    ("lengths_q", "lengths_k"),
    case_id(
        [
            ("zero-length", [0, 1, 0, 1], [0, 3, 0, 5]),
            ("no-keys", [2, 0, 3], [0, 4, 7]),
            ("nothing", [0, 0], [0, 0]),
            ("one", [5], [9]),
        ]
    ),
)
def test_packed_members_of_no_length(lengths_q, lengths_k, backend, rng):
    """Zero-length members and a longest member of one row crashed or shifted the others.

    Reported as FA#1537, pytorch#81077.
    """
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


def test_ranks(backend):
    """Ranks other than four.

    Reported as pytorch#120810.
    """
    q, k, v = Case("fault", 9, 12, batch=2, heads_q=3).arrays()
    expected, _ = attend(backend, q, k, v)
    for index in ((0,), (0, 1), (None,)):
        out = fastattn.attention(q[index], k[index], v[index], backend=backend)
        np.testing.assert_allclose(out, expected[index], rtol=0, atol=1e-6)
    with pytest.raises(ValueError, match="q must have rank 2 or more"):
        fastattn.attention(q[0, 0, 0], k[0, 0], v[0, 0], backend=backend)


@pytest.mark.parametrize("shape", [(65537, 1, 4, 4), (1, 65537, 2, 4)], ids=str)
def test_more_slots_than_16_bits(shape, backend, rng):
    """Batches and heads beyond 65535 were silently skipped.

    Reported as pytorch#142228.
    """
    q, k, v = (rng.standard_normal(shape, dtype=F4) for _ in "qkv")
    assert_exact(backend, q, k, v)
