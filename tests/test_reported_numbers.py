"""Faults of numbers and of processes that users of attention libraries reported.

`pytorch#123` is an issue and `pytorch!123` a change of the repository of that name; FA is
Dao-AILab/flash-attention, ORT microsoft/onnxruntime, HF huggingface/transformers.
"""

from __future__ import annotations

import multiprocessing
import os
import threading

import numpy as np
import oracle
import pytest
from calls import F4, attend, case_id, column
from cases import Case

import fastattn

# --- grouped heads and scale --------------------------------------------------------------------


def test_heads_of_a_group_are_neighbours(backend):
    """Heads were tiled 0 1 0 1 instead of 0 0 1 1.

    Reported as onnx!7274.
    """
    q, k = np.zeros((1, 4, 1, 1), F4), np.zeros((1, 2, 1, 1), F4)
    v = np.array([0, 1], F4).reshape(1, 2, 1, 1)
    out, _ = attend(backend, q, k, v)
    np.testing.assert_array_equal(out.ravel(), [0, 0, 1, 1])


@pytest.mark.parametrize(
    ("scale", "result"),
    case_id(
        [
            ("zero", 0.0, 0.5),
            ("default", None, 0.119203),
            ("large", 2.0, 0.017986),
            ("small", 0.5, 0.268941),
            ("negative", -1.0, 0.880797),
        ]
    ),
)
def test_scale_is_literal(scale, result, backend):
    """0 meant "default", or the argument was ignored.

    Reported as SKaiNET-developers/SKaiNET#860, tenstorrent/tt-metal#33304.
    """
    q, k, v = column(1), column(2, 0), column(0, 1)
    out, _ = attend(backend, q, k, v, scale=scale)
    np.testing.assert_allclose(out.ravel(), result, atol=1e-6)


@pytest.mark.parametrize("scale", [np.nan, np.inf, -np.inf], ids=str)
def test_scale_is_finite(scale, backend):
    """A NaN scale gave plausible zeros."""
    with pytest.raises(ValueError, match="scale must be finite"):
        fastattn.attention(*Case("fault", 4, 5).arrays(), scale=scale, backend=backend)


# --- numerics -----------------------------------------------------------------------------------


def test_large_scores(backend):
    """Softmax without subtracting the maximum overflowed.

    Reported as tinygrad/tinygrad!4985, FA#613.
    """
    q = np.full((1, 1, 1, 64), 300, F4)
    k = np.stack([np.full(64, 300, F4), np.full(64, 299, F4)])[None, None]
    out, lse = attend(backend, q, k, column(1, 2))
    assert out.ravel() == 1
    np.testing.assert_allclose(lse.ravel(), 64 * 300 * 300 / 8, rtol=1e-6)


def test_large_scores_in_half_precision(backend):
    """Scores beyond 65504 overflowed float16.

    Reported as tinygrad/tinygrad!4985, FA#613.
    """
    half = np.float16
    q = np.full((1, 1, 1, 64), 300, half)
    k = np.stack([np.full(64, 300, half), np.full(64, 299, half)])[None, None]
    out, lse = fastattn.attention(q, k, column(1, 2, dtype=half), return_lse=True, backend=backend)
    assert out.ravel() == 1
    np.testing.assert_allclose(lse.ravel(), 64 * 300 * 300 / 8, rtol=1e-6)


def test_softcap(backend):
    """tanh(x * cap) instead of cap * tanh(x / cap).

    Reported as ORT!21683, FA#1181.
    """
    out, _ = attend(backend, column(3), column(1, 0), column(1, 0), scale=1, softcap=2)
    np.testing.assert_allclose(out.ravel(), 0.859398, atol=1e-6)


def test_long_sequences_with_a_mask(backend, rng):
    """Rows of a long masked call were wrong.

    Reported as pytorch#162588.
    """
    q, k, v = (rng.standard_normal((1, 4096, 16), dtype=F4) for _ in "qkv")
    mask = rng.random((1, 4096)) < 0.5
    out, _ = attend(backend, q, k, v, mask=mask, causal=True)
    rows = [0, 1, 1000, 2047, 2048, 4095]
    for row in rows:
        exact, _ = oracle.attention(q[:, row : row + 1], k, v, mask=mask, causal=True, align=row)
        np.testing.assert_allclose(out[:, row : row + 1], exact, rtol=0, atol=2e-6)


def test_dropout(backend):
    """Dropout was rescaled wrongly, NaN at p = 1, or different in every run.

    Reported as FA#93, NVIDIA/apex!816.
    """
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


def test_dropout_of_the_torch_function():
    """Reported as FA#93, NVIDIA/apex!816."""
    q, v = np.ones((1, 1, 10000, 2), F4), np.ones((1, 1, 16, 1), F4)
    k = q[..., :16, :]
    assert not fastattn.scaled_dot_product_attention(q, k, v, None, 1.0).any()
    first, second = (fastattn.scaled_dot_product_attention(q, k, v, None, 0.5) for _ in "ab")
    assert abs(first.mean() - 1) < 0.05
    assert (first != second).any()


def test_two_calls_are_the_same(backend):
    """Dropout fired in inference.

    Reported as pytorch#124464.
    """
    case = Case("fault", 100, 300, 32, heads_q=4)
    first, _ = attend(backend, *case.arrays())
    again, _ = attend(backend, *case.arrays())
    np.testing.assert_array_equal(first, again)


@pytest.mark.parametrize("seqlen_q", [1, 4, 7])
def test_distance_of_alibi(seqlen_q, backend):
    """Sign or origin of ALiBi's distance was wrong where the lengths differ.

    Reported as FA#1585, vllm!945.
    """
    q, k, v = Case("fault", seqlen_q, 4, heads_q=1).arrays()
    i, j = np.arange(seqlen_q)[:, None], np.arange(4)
    bias = -0.5 * np.abs(i + 4 - seqlen_q - j)
    slopes = np.array([0.5], F4)
    for flags in ({}, {"causal": True}):
        out, lse = attend(backend, q, k, v, alibi=slopes, **flags)
        expected, expected_lse = attend(backend, q, k, v, bias=bias, **flags)
        np.testing.assert_allclose(out, expected, rtol=0, atol=1e-6)
        np.testing.assert_allclose(lse, expected_lse, rtol=0, atol=1e-6)


def test_merging_with_an_empty_part(backend):
    """lse in base 2, or 0 for an empty row, breaks the merge of partial results.

    Reported as pytorch!134650, FA#404.
    """
    q, k, v = Case("fault", 9, 12).arrays()
    whole = attend(backend, q, k, v)
    nothing = attend(backend, q, k, v, mask=np.zeros(12, bool))
    for merged in (fastattn.merge(*whole, *nothing), fastattn.merge(*nothing, *whole)):
        for found, expected in zip(merged, whole, strict=True):
            np.testing.assert_array_equal(found, expected)
    for found, expected in zip(fastattn.merge(*nothing, *nothing), nothing, strict=True):
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("bad", [np.nan, np.inf], ids=str)
def test_the_tests_themselves_see_nan(bad):
    """A test passed because the reference was NaN as well.

    Reported as tracel-ai/cubecl!1070.
    """
    good = np.ones(3, F4)
    for ours, exact in ((good * bad, good), (good, good * bad)):
        with pytest.raises(AssertionError):
            oracle.assert_within_budget(ours, exact, exact)


# --- process, threads, memory -------------------------------------------------------------------


def test_many_python_threads(backend):
    """Two Python threads in one parallel kernel aborted the process.

    Reported as numba#9288, stumpy#858.
    """
    case = Case("fault", 40, 70, heads_q=4, causal=True)
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
    return attend(backend, *Case("fault", 300, 300, 32, heads_q=4).arrays())[0]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_forked_child(backend):
    """A child forked after a parallel kernel was killed at its first one.

    Reported as camUrban/PteraSoftware!287, coqui-ai/STT#2268.
    """
    expected = _answer(backend)
    with multiprocessing.get_context("fork").Pool(2) as pool:
        for out in pool.map(_answer, [backend] * 4, chunksize=1):
            np.testing.assert_array_equal(out, expected)


def test_thread_limit_holds_in_other_threads():
    """A limit set in the main thread did not reach others.

    Reported as abTEM/abTEM!441.
    """
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
