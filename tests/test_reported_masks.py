"""Faults of masks and alignment that users of attention libraries reported.

`pytorch#123` is an issue and `pytorch!123` a change of the repository of that name; FA is
Dao-AILab/flash-attention, ORT microsoft/onnxruntime, HF huggingface/transformers.
"""

from __future__ import annotations

import numpy as np
import pytest
from calls import F4, assert_exact, attend, case_id, column
from cases import Case

import fastattn

MIN = np.finfo(F4).min


def two_rows():
    """Two queries and two keys of ones: both keys weigh the same."""
    q = np.ones((1, 1, 2, 2), F4)
    return q, q, np.array([[[[0, 1], [2, 3]]]], F4)


# --- masks and fully masked rows ----------------------------------------------------------------

TWO_ROW_MASK = np.array([[True, True], [False, False]])
MIN_ROWS = np.array([[0, 0], [MIN, MIN]], F4)
INF_ROWS = np.where(TWO_ROW_MASK, F4(0), -np.inf)


@pytest.mark.parametrize(
    ("flags", "second_row", "second_lse"),
    case_id(
        [
            ("bool", {"mask": TWO_ROW_MASK}, [0, 0], -np.inf),
            ("minus-inf", {"bias": INF_ROWS}, [0, 0], -np.inf),
            ("both", {"mask": TWO_ROW_MASK, "bias": MIN_ROWS}, [0, 0], -np.inf),
            ("min", {"bias": MIN_ROWS}, [1, 2], MIN),
            ("min-plus-min", {"bias": INF_ROWS + MIN_ROWS}, [0, 0], -np.inf),
        ]
    ),
)
def test_dead_row(flags, second_row, second_lse, backend):
    """NaN or mean(v) where a row may attend to nothing; NaN or zeros for a row of finfo.min.

    Reported as pytorch#103963, pytorch#103749, pytorch#109517, pytorch#110213, HF!17306, HF!27114,
    pytorch!134650, FA#404.
    """
    out, lse = attend(backend, *two_rows(), **flags)
    np.testing.assert_allclose(out[0, 0], [[1, 2], second_row], rtol=1e-6)
    np.testing.assert_allclose(lse[0, 0, 0], 2.107361, rtol=1e-6)
    # A kernel that works in base 2 cannot hold finfo.min / ln 2: finite and huge is enough.
    np.testing.assert_allclose(lse[0, 0, 1], second_lse, rtol=0.31)


def test_long_rows_of_min(backend):
    """NaN from finfo.min as padding of 441 keys.

    Reported as pytorch#109517, pytorch#110213, HF!17306.
    """
    q, k, v = Case("fault", 441, 441, 64, batch=2, heads_q=2).arrays()
    keys = np.arange(441) >= 128
    by_min, _ = attend(backend, q, k, v, bias=np.where(keys, F4(0), MIN))
    by_mask, _ = attend(backend, q, k, v, mask=keys)
    np.testing.assert_allclose(by_min, by_mask, rtol=0, atol=1e-6)


def test_mixed_fills_in_one_row(backend):
    """Padding and causal fills of finfo.min summed to -inf, then NaN.

    Reported as HF!27114.
    """
    q, k, v = Case("fault", 40, 40).arrays()
    padding = np.where(np.arange(40) < 25, F4(0), MIN)
    with np.errstate(over="ignore"):
        bias = padding + np.where(np.tri(40) > 0, F4(0), MIN)
    assert np.isneginf(bias).any()
    assert (bias == MIN).any()
    assert_exact(backend, q, k, v, bias=bias)


def test_mask_and_causal_intersect(backend):
    """One of mask and causal was ignored, or the dead row became mean(v).

    Reported as ORT#28904, pytorch#187801.
    """
    q = np.zeros((1, 1, 2, 1), F4)
    mask = np.array([[False, True], [True, True]])
    flags = {"causal": True, "align": "top_left"}
    for extra in ({"mask": mask}, {"bias": np.where(mask, F4(0), -np.inf)}):
        out, _ = attend(backend, q, q, column(1, 2), **flags, **extra)
        np.testing.assert_array_equal(out.ravel(), [0, 1.5])


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf], ids=str)
@pytest.mark.parametrize("where", ["k", "v"])
def test_masked_key_holds_no_poison(where, bad, backend):
    """NaN or inf in a masked key reached the row through 0 * inf or NaN + -inf.

    Reported as pytorch#101967.
    """
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


def test_uninitialised_cache_tail(backend):
    """The unused end of a key-value cache leaked NaN.

    Reported as FA#1745, FA#2374.
    """
    q, k, v = Case("fault", 3, 128, 32, batch=4, heads_q=4, heads_kv=2).arrays()
    lengths = [32, 64, 96, 48]
    for slot, length in enumerate(lengths):
        k[slot, :, length:] = v[slot, :, length:] = np.nan
    mask = np.arange(128) < np.array(lengths)[:, None, None, None]
    out, lse = attend(backend, q, k, v, mask=mask)
    assert_slots_are_cut(backend, q, k, v, lengths, out, lse)


def test_cache_of_known_lengths(backend):
    """The same by kv_len, with a left pad of NaN as well.

    Reported as FA#1745, FA#2374.
    """
    q, k, v = Case("fault", 3, 128, 32, batch=4, heads_q=4, heads_kv=2).arrays()
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


def test_nan_query_is_not_zero(backend):
    """All-NaN queries silently gave zeros.

    Reported as pytorch#141128.
    """
    q, k, v = Case("fault", 16, 16, 8, batch=2, heads_q=4).arrays()
    for flags in ({}, {"causal": True}, {"mask": np.tri(16) > 0}):
        out, lse = attend(backend, np.full_like(q, np.nan), k, v, **flags)
        assert np.isnan(out).all()
        assert np.isnan(lse).all()


def test_half_mask_of_its_smallest_number(backend):
    """-65504 plus a score overflowed to -inf in float16, then NaN.

    Reported as HF!17306, HF!17437.
    """
    half = np.float16
    q, k, v = column(-1, dtype=half), column(20, 40, dtype=half), column(1, 2, dtype=half)
    out, _ = attend(backend, q, k, v, bias=np.full((1, 2), -65504, half), scale=1)
    assert out.dtype == half
    assert out.ravel() == 1


def test_float_zeros_and_ones_are_added(backend):
    """A 0/1 float mask looks like a bool one; it is added as what it is.

    Reported as QwenAudio/CosyVoice#628.
    """
    zero = column(0), column(0, 0), column(0, 1)
    out, _ = attend(backend, *zero, bias=np.array([1, 0], F4))
    np.testing.assert_allclose(out.ravel(), 0.268941, atol=1e-6)


@pytest.mark.parametrize("dtype", ["int64", "uint8", "int8"])
def test_integer_mask(dtype, backend):
    """An integer mask failed late or was added.

    Reported as pytorch!161489, mahmoodlab/TITAN#11.
    """
    q, k, v = Case("fault", 4, 5).arrays()
    for name in ("mask", "bias"):
        with pytest.raises(TypeError, match=f"{name} must be .*, got {dtype}"):
            attend(backend, q, k, v, **{name: np.ones((4, 5), dtype)})


@pytest.mark.parametrize("bias_dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_bias_of_another_width(dtype, bias_dtype, backend):
    """A float mask unlike q failed, or upcast the output.

    Reported as pytorch!161489, mahmoodlab/TITAN#11.
    """
    case = Case("fault", 20, 33, dtype=dtype, bias="qk", bias_dtype=bias_dtype)
    out = assert_exact(backend, *case.arrays(), **case.flags())
    assert out.dtype == dtype


def test_polarity(backend):
    """True was read as "hide"; bool and float form differed.

    Reported as pytorch!170415, rasbt/LLMs-from-scratch#1061.
    """
    zero = column(0), column(0, 0), column(5, 7)
    out, _ = attend(backend, *zero, mask=np.array([True, False]))
    assert out.ravel() == 5
    case = Case("fault", 33, 70, heads_q=4, mask="hqk")
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
def test_size_one_axes_broadcast(shape, backend, rng):
    """Masks of size 1 or lower rank were not broadcast.

    Reported as pytorch#120810, jax#28974.
    """
    q, k = (rng.standard_normal((3, 2, 4, n, 16), dtype=F4) for n in (7, 5))
    mask = rng.random(shape) < 0.7
    if len(shape) == 4:
        shape = (2, 1, 7, 5)
    out, _ = attend(backend, q, k, k, mask=mask)
    expected, _ = attend(backend, q, k, k, mask=np.broadcast_to(mask, (3, 2, 4, 7, 5)))
    np.testing.assert_array_equal(out, expected)
    assert_exact(backend, q, k, k, bias=np.where(mask, F4(0.3), -np.inf))


@pytest.mark.parametrize("shape", [(4,), (5, 7), (5, 1), (2, 7, 5), (3, 4, 7, 5)], ids=str)
def test_shapes_that_do_not_fit(shape, backend):
    """Reported as pytorch#120810, jax#28974."""
    q, k = np.ones((3, 2, 4, 7, 16), F4), np.ones((3, 2, 4, 5, 16), F4)
    message = r"mask must broadcast to the scores \(3, 2, 4, 7, 5\), got "
    with pytest.raises(ValueError, match=message):
        attend(backend, q, k, k, mask=np.ones(shape, bool))


@pytest.mark.parametrize("axes", ["b1qk", "bhqk", "b11k", "1hqk"])
def test_grouped_heads_with_a_mask_per_batch_and_head(axes, backend):
    """The mask was misaligned once the batch had two entries.

    Reported as ml-explore/mlx-lm!1467.
    """
    case = Case("fault", 16, 16, 8, batch=2, heads_q=40, heads_kv=8, mask=axes, bias=axes)
    flags = case.flags()
    assert_exact(backend, *case.arrays(), mask=flags["mask"])
    assert_exact(backend, *case.arrays(), bias=flags["bias"])


def test_mask_of_flattened_heads(backend):
    """(batch * heads, seqlen_q, seqlen_k) was read in tile order; it must be refused.

    Reported as pytorch!115913.
    """
    q, k = np.ones((2, 3, 4, 5), F4), np.ones((2, 3, 4, 5), F4)
    with pytest.raises(ValueError, match=r"\(2, 3, 4, 4\), got \(6, 4, 4\)"):
        attend(backend, q, k, k, mask=np.ones((6, 4, 4), bool))


def test_causal_without_a_mask(backend):
    """causal was skipped when no mask was given.

    Reported as facebookresearch/xformers#103.
    """
    assert_exact(backend, *Case("fault", 33, 33).arrays(), causal=True)
    assert_exact(backend, *Case("fault", 1, 33, dtype="float64").arrays(), causal=True, align=3)


# --- causal alignment and windows ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("seqlen_q", "align", "rows"),
    case_id(
        [
            ("top-left", 2, "top_left", [1, 1.5]),
            ("bottom-right", 2, "bottom_right", [2.5, 3]),
            ("top-left", 1, "top_left", [1]),
            ("bottom-right", 1, "bottom_right", [3]),
            ("more-queries", 7, "bottom_right", [0, 0, 1, 1.5, 2, 2.5, 3]),
            ("more-queries-top-left", 7, "top_left", [1, 1.5, 2, 2.5, 3, 3, 3]),
        ]
    ),
)
def test_alignment_of_unequal_lengths(seqlen_q, align, rows, backend):
    """Libraries, and even CPU and GPU of one, disagreed on which keys a row sees.

    Reported as pytorch#108108, FA#282, pytorch#103082, ORT#29020.
    """
    q, k = column(*[0] * seqlen_q), column(*[0] * 5)
    out, _ = attend(backend, q, k, column(1, 2, 3, 4, 5), causal=True, align=align)
    np.testing.assert_allclose(out.ravel(), rows, rtol=1e-6)


def test_torch_function_is_top_left():
    """Reported as pytorch#108108, FA#282, pytorch#103082, ORT#29020."""
    q, k, v = column(0, 0), column(*[0] * 5), column(1, 2, 3, 4, 5)
    out = fastattn.scaled_dot_product_attention(q, k, v, is_causal=True)
    np.testing.assert_allclose(out.ravel(), [1, 1.5])


def test_torch_function_refuses_both():
    """Reported as pytorch#187801."""
    q = column(0, 0)
    for mask in (np.ones((2, 2), bool), np.ones((2, 2), F4)):
        with pytest.raises(ValueError, match="attn_mask must be None if is_causal is True"):
            fastattn.scaled_dot_product_attention(q, q, q, mask, is_causal=True)


@pytest.mark.parametrize("seqlen_q", [1, 7, 16, 33, 64, 65, 129])
@pytest.mark.parametrize("seqlen_k", [1, 7, 16, 33, 64, 65, 129])
def test_block_edges(seqlen_q, seqlen_k, backend):
    """Wrong where lengths differ and end inside a block.

    Reported as jax#24491.
    """
    arrays = Case("fault", seqlen_q, seqlen_k, 8).arrays()
    for align in ("top_left", "bottom_right"):
        assert_exact(backend, *arrays, causal=True, align=align)
        assert_exact(backend, *arrays, window=(9, 4), align=align)
    assert_exact(backend, *arrays)
