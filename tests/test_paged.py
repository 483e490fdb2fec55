"""Keys and values on pages: what they would give in one piece, and nothing else is looked at."""

from __future__ import annotations

import os
import re

import numpy as np
import oracle
import pytest
from cases import Case
from kernels import survives, unreadable
from rules import F4, ones, rule_id

import fastattn

GARBAGE = -(2**31)


def on_pages(arrays, size, layout, rng):
    """Return (pages of each, table) of arrays (batch, heads, seqlen, dim), in random order, between
    pages of NaN. The last page of an entry is filled up with NaN.
    """
    batch, _, seqlen, _ = arrays[0].shape
    per_entry = -(-seqlen // size)
    table = rng.permutation(batch * per_entry + 3)[3:].reshape(batch, per_entry)
    found = []
    for a in arrays:
        axes = [a.shape[1], size, a.shape[-1]]
        pages = np.full([batch * per_entry + 3] + [axes[n] for n in layout], np.nan, a.dtype)
        pages = pages.transpose(0, *(1 + layout.index(n) for n in range(3)))
        for b, t in np.ndindex(table.shape):
            part = a[b, :, t * size : (t + 1) * size]
            pages[table[b, t], :, : part.shape[1]] = part
        found.append(pages)
    return (*found, table)


def without_unused(table, size, start, stop):
    """Return the table with garbage where an entry has no keys."""
    first = np.arange(table.shape[-1]) * size
    start, stop = (np.broadcast_to(n, len(table))[:, None] for n in (start, stop))
    used = (first < stop) & (first + size > start) & (start < stop)
    return np.where(used, table, GARBAGE).astype(np.int32)


CASES = [
    Case("decode", 1, 301, 40, 24, batch=3, heads_q=4, heads_kv=2, lengths="kv_len"),
    Case("decode", 1, 2100, 16, batch=2, heads_q=8, heads_kv=2, lengths="kv_len kv_start"),
    Case("few", 3, 70, 32, batch=2, heads_q=2, lengths="kv_len", causal=True),
    Case("few", 2, 40, 128, batch=2, heads_q=2, lengths="kv_len", softcap=2.0, sinks=True),
    Case("prefill", 70, 300, 17, batch=2, heads_q=4, heads_kv=2, lengths="kv_len q_len"),
    Case("prefill", 40, 130, 16, batch=3, window=(20, 3), lengths="kv_len kv_start one"),
    Case("masked", 9, 65, 8, batch=2, mask="h1k", bias="qk", lengths="kv_len kv_start"),
    Case("whole", 5, 64, 16, batch=2, alibi="h", causal=True),
]
LAYOUTS = {1: (0, 1, 2), 3: (1, 0, 2), 16: (1, 0, 2), 40: (1, 2, 0)}


def flags_of(case, size):
    """Return flags in which kv_len is given where the last page is not full."""
    flags = case.flags()
    room = -(-case.seqlen_k // size) * size
    if room != case.seqlen_k:
        flags.setdefault("kv_len", case.seqlen_k)
        for name in ("mask", "bias"):
            if name in flags:
                pad = [(0, 0)] * (flags[name].ndim - 1) + [(0, room - case.seqlen_k)]
                flags[name] = np.pad(flags[name], pad)
    return flags


@pytest.mark.parametrize("size", LAYOUTS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_pages_against_the_oracle_and_one_piece(case, size, backend, rng):
    q, k, v = case.arrays()
    flags = flags_of(case, size)
    k_pages, v_pages, table = on_pages((k, v), size, LAYOUTS[size], rng)
    start, stop = flags.get("kv_start", 0), flags.get("kv_len", table.shape[-1] * size)
    table = without_unused(table, size, start, stop)
    out = np.full((*q.shape[:-1], v.shape[-1]), np.nan, q.dtype)
    found = fastattn.attention(
        q, k_pages, v_pages, block_table=table, return_lse=True, out=out, backend=backend, **flags
    )
    for name in {"mask", "bias"} & set(flags):
        flags[name] = flags[name][..., : case.seqlen_k]
    exact, formula = oracle.judge(q, k, v, **flags)
    oracle.assert_within_budget(found[0], exact[0], formula[0], case.floor())
    oracle.assert_within_budget(found[1], exact[1], formula[1], case.floor())
    if backend == "cpu":
        whole = fastattn.attention(q, k, v, **flags, return_lse=True, backend=backend)
        for a, b in zip(found, whole, strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("dtype", ["float64", "float16", "bfloat16"])
@pytest.mark.slow
def test_pages_of_other_dtypes_give_the_same_bits(dtype, rng):
    for seqlen_q in (1, 50):
        case = Case("pages", seqlen_q, 300, 40, 24, batch=2, heads_q=4, heads_kv=2, dtype=dtype)
        q, k, v = case.arrays()
        k_pages, v_pages, table = on_pages((k, v), 20, (1, 0, 2), rng)
        found = fastattn.attention(q, k_pages, v_pages, block_table=table, backend="cpu")
        np.testing.assert_array_equal(found, fastattn.attention(q, k, v, backend="cpu"))


def test_packed_queries(backend, rng):
    q, k, v = Case("packed", 7, 60, 16, batch=3, heads_q=4, heads_kv=2).arrays()
    k_pages, v_pages, table = on_pages((k, v), 8, (1, 0, 2), rng)
    counts, keys = [7, 0, 3], np.array([60, 5, 33])
    tokens = np.concatenate([q[b, :, :n].swapaxes(0, 1) for b, n in enumerate(counts)])
    table = without_unused(table, 8, 0, keys)
    edges = [np.concatenate([[0], np.cumsum(n)]) for n in (counts, keys)]
    found, lse = fastattn.attention_varlen(
        tokens, k_pages, v_pages, *edges, block_table=table, causal=True, return_lse=True,
        backend=backend,
    )  # fmt: skip
    for b, n in enumerate(counts):
        here = slice(edges[0][b], edges[0][b + 1])
        one = slice(b, b + 1), slice(None), slice(keys[b])
        exact, formula = oracle.judge(q[b : b + 1, :, :n], k[one], v[one], causal=True)
        oracle.assert_within_budget(found[here].swapaxes(0, 1)[None], exact[0], formula[0], 16)
        oracle.assert_within_budget(lse[None, :, here], exact[1], formula[1], 16)


def test_one_page_an_entry_chooses_rows_of_a_cache(backend, rng):
    q, k, v = Case("rows", 2, 50, 16, batch=5, heads_q=2).arrays()
    rows, kv_len = np.array([4, 0, 4]), np.array([50, 1, 20])
    found = fastattn.attention(
        q[:3], k, v, block_table=rows[:, None], kv_len=kv_len, causal=True, backend=backend
    )
    expected = fastattn.attention(
        q[:3], k[rows], v[rows], kv_len=kv_len, causal=True, backend=backend
    )
    np.testing.assert_array_equal(found, expected)


def test_the_batch_broadcasts(backend, rng):
    q, k, v = Case("lead", 3, 24, 16, batch=6, heads_q=2).arrays()
    k_pages, v_pages, table = on_pages((k, v), 8, (0, 1, 2), rng)
    q, table = q.reshape(2, 3, *q.shape[1:]), table.reshape(2, 3, 3)

    def attend(q, table, heads=slice(None)):
        pages = k_pages[:, heads], v_pages[:, heads]
        return fastattn.attention(q, *pages, block_table=table, backend=backend)

    found = attend(q, table)
    assert found.shape == q.shape
    np.testing.assert_array_equal(attend(q, table[0]), np.stack([attend(a, table[0]) for a in q]))
    np.testing.assert_array_equal(attend(q[0, 0], table)[1, 2], attend(q[0, 0], table[1, 2]))
    one_head = attend(q[0, 0, 0], table[0, 0], slice(1))
    np.testing.assert_array_equal(one_head[0], attend(q[0, 0], table[0, 0])[0])


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.unguarded
@pytest.mark.parametrize("seqlen_q", [1, 40])
def test_pages_of_others_are_never_read(seqlen_q, backend, rng):
    """They kill whoever reads them."""
    size = os.sysconf("SC_PAGE_SIZE") // 128  # keys of 32 numbers, in one page of the system
    q, k, v = Case("pages", seqlen_q, 6 * size, 32, batch=2, heads_q=4, heads_kv=2).arrays()
    k_pages, v_pages, table = on_pages((k, v), size, (0, 1, 2), rng)
    kv_start, kv_len = np.array([size, 0]), np.array([6 * size, 2 * size])
    table = without_unused(table, size, kv_start, kv_len)
    flags = {"block_table": table, "kv_start": kv_start, "kv_len": kv_len, "backend": backend}
    expected = fastattn.attention(q, k_pages, v_pages, **flags)
    hidden = np.ones((*k_pages.shape[:1], 1, 1, 1), bool)
    hidden[table[table != GARBAGE]] = False

    def call():
        np.testing.assert_array_equal(fastattn.attention(q, hidden_k, hidden_v, **flags), expected)

    with unreadable(k_pages, hidden) as hidden_k, unreadable(v_pages, hidden) as hidden_v:
        assert survives(call)
        assert not survives(lambda: hidden_k[np.flatnonzero(hidden)[0]].sum())


# --- rules --------------------------------------------------------------------------------------


def valid():
    table = np.array([[0, 2], [4, -1]], np.int32)
    pages = {"k": ones(5, 2, 3, 8), "v": ones(5, 2, 3, 6)}
    return {"q": ones(2, 4, 7, 8), **pages, "block_table": table, "kv_len": [6, 3]}


PLACES = "block_table must hold pages from 0 to 4 where there are keys, got "
RULES = [
    (
        {"block_table": [[0.0]]},
        TypeError,
        "block_table must be an array of ints of shape (..., max",
    ),
    (
        {"block_table": 3},
        ValueError,
        "block_table must be an array of ints of shape (..., max_page",
    ),
    ({"block_table": [[0, 5], [4, 0]]}, ValueError, PLACES + "5 at (0, 1)"),
    ({"block_table": [[0, 1], [-1, 0]]}, ValueError, PLACES + "-1 at (1, 0)"),
    ({"block_table": [[0, 10**30], [1, 0]]}, ValueError, PLACES + f"{10**30} at (0, 1)"),
    ({"kv_len": None}, ValueError, PLACES + "-1 at (1, 1)"),
    ({"kv_len": 7}, ValueError, "kv_len must lie between 0 and 6, got 7"),
    (
        {"block_table": [[0, 2]] * 3},
        ValueError,
        "block_table must broadcast to the leading dimensions of q, got (3, 2) and (2, 4, 7, 8)",
    ),
    (
        {"k": ones(2, 3, 8)},
        ValueError,
        "k must have shape (num_pages, heads_kv, page_size, dim) with block_table, got (2, 3, 8)",
    ),
    (
        {"v": ones(6, 2, 3, 6)},
        ValueError,
        "k and v must have the same num_pages and page_size, got ",
    ),
    (
        {"k": ones(5, 2, 0, 8), "v": ones(5, 2, 0, 6)},
        ValueError,
        "k must have a page_size of 1 or more, got (5, 2, 0, 8)",
    ),
    (
        {"v": ones(5, 2, 4, 6)},
        ValueError,
        "k and v must have the same num_pages and page_size, got ",
    ),
    ({"mask": ones(7, 5) > 0}, ValueError, "mask must broadcast to the scores (2, 4, 7, 6), got"),
]


@pytest.mark.parametrize(("change", "error", "message"), RULES, ids=rule_id)
def test_rule(change, error, message):
    with pytest.raises(error, match="^" + re.escape(message)):
        fastattn.attention(**valid() | change)
    assert fastattn.explain(**valid()).problem.seqlen_k == 6


PACKED_RULES = [
    ({"block_table": [[0, 2]]}, "block_table must have shape (2, max_pages), got (1, 2)"),
    ({"cu_seqlens_k": [0, 7, 8]}, "cu_seqlens_k must not count more keys of a member than its pa"),
    ({"cu_seqlens_k": [0, 6, 10**30]}, "cu_seqlens_k must end at 2**40 or before, got 1000"),
    ({"q": ones(1, 4, 7, 8)}, "q must have shape (tokens, heads, dim), got (1, 4, 7, 8)"),
]


@pytest.mark.parametrize(("change", "message"), PACKED_RULES, ids=rule_id)
def test_packed_rule(change, message):
    arguments = valid() | {"q": ones(7, 4, 8), "cu_seqlens_q": [0, 3, 7], "cu_seqlens_k": [0, 6, 9]}
    del arguments["kv_len"]
    fastattn.attention_varlen(**arguments)
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        fastattn.attention_varlen(**arguments | change)


def test_no_keys_need_no_pages(backend):
    q, k = ones(2, 1, 3, 4), np.zeros((0, 1, 2, 4), F4)
    out, lse = fastattn.attention(
        q, k, k, block_table=[[7], [-1]], kv_len=0, return_lse=True, backend=backend
    )
    assert not out.any()
    assert (lse == -np.inf).all()


def test_gradients_refuse_pages():
    q, k = ones(1, 1, 2, 4), ones(3, 1, 2, 4)
    lse = ones(1, 1, 2)
    with pytest.raises(TypeError, match="unexpected keyword argument 'block_table'"):
        fastattn.attention_backward(q, q, k, k, q, lse, block_table=[[0]])
