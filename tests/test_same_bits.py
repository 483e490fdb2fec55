"""A row comes out the same whatever it is computed with: to the bit from the compiled kernels."""

from __future__ import annotations

import numpy as np
import pytest
from cases import Case
from hypothesis import given, settings
from hypothesis import strategies as st
from test_properties import DTYPES, FUZZ, attend, cases, tolerance

import fastattn

SAME_BITS = [
    Case("bits", 96, 96, 32, batch=3, heads_q=4, heads_kv=2, causal=True),
    Case("bits", 70, 301, 40, 24, batch=3, heads_q=4, heads_kv=2, mask="h1k"),
    Case("bits", 700, 300, 16, batch=2, heads_q=2, window=(40, 9)),
    Case("bits", 1, 5000, 32, batch=3, heads_q=4, heads_kv=1, causal=True),
    Case("bits", 3, 2500, 64, batch=2, heads_q=2, bias="hqk", dtype="float64"),
    Case("bits", 33, 65, 8, batch=2, heads_q=2, bias="qk", mask="b1qk"),
    Case("bits", 70, 301, 16, batch=3, heads_q=4, heads_kv=2, softcap=3.0, alibi="bh", causal=True),
    Case("bits", 33, 1500, 16, batch=3, heads_q=2, sinks=True, chunk=700),
    Case("bits", 40, 700, 16, batch=3, heads_q=4, heads_kv=2, lengths="kv_len kv_start"),
    Case("bits", 1, 5000, 32, batch=3, heads_q=4, heads_kv=1, lengths="kv_len", causal=True),
    Case("bits", 40, 700, 16, batch=3, lengths="kv_len kv_start align", window=(90, 3), alibi="h"),
    Case("bits", 70, 301, 24, batch=2, heads_q=2, causal=True, dtype="float16"),
    Case("bits", 70, 301, 24, batch=2, heads_q=2, causal=True, dtype="bfloat16"),
]


def assert_same(backend, case, found, expected):
    """The compiled kernels promise the same bits; BLAS, which chooses by size, does not."""
    for a, b in zip(found, expected, strict=True):
        if backend == "numpy":
            a, b = a.astype(float), b.astype(float)
            np.testing.assert_allclose(a, b, rtol=0, atol=tolerance(case))
        else:
            np.testing.assert_array_equal(a, b)


# Axes of an argument that has one value for each batch entry.
AXES_IN_BATCH = {
    "mask": 4,
    "bias": 4,
    "alibi": 2,
    "q_len": 1,
    "kv_len": 1,
    "kv_start": 1,
    "align": 1,
}


def of_slot(slot, flags):
    """Return the flags of one batch entry alone."""
    return {
        name: value[slot] if np.ndim(value) == AXES_IN_BATCH.get(name) else value
        for name, value in flags.items()
    }


def of_rows(part, case, flags):
    """Return the flags of a call with the queries of a slice alone."""
    q_len = flags.get("q_len", case.seqlen_q)
    align = flags["align"]
    if isinstance(align, str):
        keys = flags.get("kv_len", case.seqlen_k) - flags.get("kv_start", 0)
        align = keys - q_len if align == "bottom_right" else 0
    piece = flags | {"align": align + part.start}
    if "q_len" in flags:
        piece["q_len"] = np.clip(q_len - part.start, 0, part.stop - part.start)
    for name in ("mask", "bias"):
        if np.ndim(flags.get(name)) > 1 and flags[name].shape[-2] > 1:
            piece[name] = flags[name][..., part, :]
    return piece


@pytest.mark.parametrize("case", SAME_BITS, ids=str)
def test_neighbours_in_the_batch_do_not_matter(case, backend):
    arrays, flags = case.arrays(), case.flags()
    out, lse = attend(backend, *arrays, **flags)
    for slot in range(case.batch):
        found = attend(backend, *(a[slot] for a in arrays), **of_slot(slot, flags))
        assert_same(backend, case, found, (out[slot], lse[slot]))


WITH_DROPOUT = [
    Case("bits", 70, 1500, 24, batch=3, heads_q=4, heads_kv=2, dropout_p=0.3, sinks=True),
    Case("bits", 1, 5000, 32, heads_q=4, heads_kv=1, dropout_p=0.3, bias="h1k", dtype="float16"),
]


@pytest.mark.parametrize("case", SAME_BITS + WITH_DROPOUT, ids=str)
def test_number_of_threads_does_not_matter(case, backend):
    expected = attend(backend, *case.arrays(), **case.flags())
    for threads in (1, 2, 3, 7):
        with fastattn.num_threads(threads):
            found = attend(backend, *case.arrays(), **case.flags())
        assert_same(backend, case, found, expected)


@pytest.mark.parametrize("case", SAME_BITS, ids=str)
@pytest.mark.parametrize("rows", [1, 2, 16, 33])
def test_queries_in_several_calls(case, rows, backend):
    q, k, v = case.arrays()
    flags = case.flags()
    expected = attend(backend, q, k, v, **flags)
    for start in range(0, min(case.seqlen_q, 10 * rows), rows):
        part = slice(start, min(start + rows, case.seqlen_q))
        found = attend(backend, q[..., part, :], k, v, **of_rows(part, case, flags))
        assert_same(backend, case, found, [a[:, :, part] for a in expected])


@pytest.mark.parametrize("case", SAME_BITS, ids=str)
def test_grouped_heads_equal_repeated_ones(case, backend):
    q, k, v = case.arrays()
    group = case.heads_q // (case.heads_kv or case.heads_q)
    expected = attend(backend, q, k, v, **case.flags())
    repeated = (np.repeat(a, group, axis=1) for a in (k, v))
    assert_same(backend, case, attend(backend, q, *repeated, **case.flags()), expected)


@pytest.mark.parametrize("case", SAME_BITS, ids=str)
def test_bool_mask_equals_minus_infinity(case, backend):
    """Bit for bit where both add a bias, on every backend: a hidden key is a hidden key."""
    mask = np.random.default_rng(1).random(case.shape("hqk")) < 0.6
    zero, hidden = np.array([0, -np.inf]).astype(case.arrays()[0].dtype)
    flags = {"causal": case.causal, "window": case.window}
    by_mask = attend(backend, *case.arrays(), mask=mask, bias=zero, **flags)
    by_bias = attend(backend, *case.arrays(), bias=np.where(mask, zero, hidden), **flags)
    plain = attend(backend, *case.arrays(), mask=mask, **flags)
    for a, b, c in zip(by_mask, by_bias, plain, strict=True):
        np.testing.assert_array_equal(a, b)
        np.testing.assert_allclose(a.astype(float), c.astype(float), rtol=0, atol=tolerance(case))


def test_hiding_keys_by_a_bias_leaves_the_bits_of_the_others():
    """Rows of bias without infinities go another way than those with."""
    rng = np.random.default_rng(8)
    q, k, v = (rng.standard_normal((2, n, 40), np.float32) for n in (60, 301, 301))
    bias = rng.standard_normal((2, 60, 301), np.float32)
    mask = rng.random(bias.shape) < 0.7
    by_mask = fastattn.attention(q, k, v, bias=bias, mask=mask)
    hidden = np.where(mask, bias, np.float32(-np.inf))
    by_bias = fastattn.attention(q, k, v, bias=hidden)
    assert_same("auto", None, [by_bias], [by_mask])


@given(
    case=cases(DTYPES, features=True),
    seed=st.integers(0, 99),
    threads=st.integers(2, 4),
    place=st.tuples(*[st.floats(0, 0.999)] * 3),
)
@settings(FUZZ, max_examples=200)
def test_any_row_has_the_same_bits_in_any_call(backend, case, seed, threads, place):
    (q, k, v), flags = case.arrays(seed), case.flags(seed)
    expected = attend(backend, q, k, v, **flags)
    with fastattn.num_threads(threads):
        assert_same(backend, case, attend(backend, q, k, v, **flags), expected)
    if case.dropout_p:  # what it drops depends on the place
        return
    slot = int(place[0] * case.batch)
    alone = attend(backend, q[slot], k[slot], v[slot], **of_slot(slot, flags))
    assert_same(backend, case, alone, [a[slot] for a in expected])
    start, stop = sorted(int(share * case.seqlen_q) for share in place[1:])
    part = slice(start, stop + 1)
    found = attend(backend, q[..., part, :], k, v, **of_rows(part, case, flags))
    assert_same(backend, case, found, [a[:, :, part] for a in expected])
