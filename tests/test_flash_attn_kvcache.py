"""flash_attn_with_kvcache, step by step as its documentation has it, on random calls."""

from __future__ import annotations

import flash_oracle
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_flash_attn import F4, as_infinity, assert_close, normal

import fastattn.flash_attn as flash_attn

FUZZ = settings(max_examples=150, deadline=None, derandomize=True)
DIM, DIM_V = 16, 8


def place(call, b, row):
    """(page, slot) of a logical row of batch entry b."""
    if call["block_table"] is not None:
        size = call["k_cache"].shape[1]
        return call["block_table"][b, row // size], row % size
    rows = call["cache_batch_idx"]
    return (b if rows is None else rows[b]), row


def expected(call):
    """(out, lse, k_cache, v_cache) after the call, from the definition."""
    k_cache, v_cache = (call[name].astype(float) for name in ("k_cache", "v_cache"))
    q, lengths = call["q"], call["cache_seqlens"]
    batch, rows = q.shape[:2]
    if lengths is None:
        size = call["k_cache"].shape[1]
        table = call["block_table"]
        lengths = size if table is None else size * table.shape[1]
    lengths = np.broadcast_to(lengths, batch)
    left = np.broadcast_to(0 if call["cache_leftpad"] is None else call["cache_leftpad"], batch)
    outs, lses = [], []
    for b in range(batch):
        n, mine = lengths[b], q[b]
        if call["k"] is not None:
            new_k, new_v = call["k"][b], call["v"][b]
            if call["rotary_cos"] is not None:
                angles = call["rotary_cos"], call["rotary_sin"]
                pairing = call["rotary_interleaved"]
                steps = call["causal"] or max(call["window_size"]) >= 0
                at = n + (np.arange(rows) if steps else np.zeros(rows, int))
                mine = flash_oracle.rotate_rows(mine, *angles, at, pairing)
                at = n + np.arange(len(new_k))
                new_k = flash_oracle.rotate_rows(new_k, *angles, at, pairing)
            for t in range(len(new_k)):
                k_cache[place(call, b, n + t)] = new_k[t]
                v_cache[place(call, b, n + t)] = new_v[t]
            n = n + len(new_k)
        keys = [place(call, b, row) for row in range(left[b], n)]
        k = np.array([k_cache[at] for at in keys]).reshape(-1, *k_cache.shape[2:])
        v = np.array([v_cache[at] for at in keys]).reshape(-1, *v_cache.shape[2:])
        slopes = call["alibi_slopes"]
        out, lse = flash_oracle.attend(
            mine,
            k,
            v,
            scale=call["softmax_scale"],
            causal=call["causal"],
            window=call["window_size"],
            softcap=call["softcap"],
            slopes=slopes[b] if np.ndim(slopes) == 2 else slopes,
        )
        outs.append(out)
        lses.append(lse)
    return np.stack(outs), np.stack(lses), k_cache, v_cache


@st.composite
def calls(draw):
    """The arguments of one call, by name."""
    rng = np.random.default_rng(draw(st.integers(0, 9999)))
    batch, heads_kv, group = draw(st.integers(1, 3)), draw(st.integers(1, 2)), draw(
        st.integers(1, 3)
    )  # fmt: skip
    rows, count = draw(st.integers(1, 4)), draw(st.integers(0, 3))
    paged, append = draw(st.booleans()), draw(st.booleans())
    call = dict.fromkeys(
        ("k", "v", "rotary_cos", "rotary_sin", "cache_seqlens", "cache_batch_idx", "cache_leftpad",
         "block_table", "alibi_slopes")
    )  # fmt: skip
    if paged:
        size, per_entry = draw(st.sampled_from([1, 2, 5, 16])), draw(st.integers(1, 4))
        capacity, pages = size * per_entry, batch * per_entry + 2
        call["block_table"] = rng.permutation(pages)[: batch * per_entry].reshape(batch, -1)
    else:
        size = capacity = draw(st.integers(3, 20))
        pages = batch + draw(st.integers(0, 2))
        if draw(st.booleans()):
            call["cache_batch_idx"] = rng.permutation(pages)[:batch]
    count = min(count, capacity)
    call["q"] = normal(rng, batch, rows, heads_kv * group, DIM)
    for name, dim in (("k", DIM), ("v", DIM_V)):
        call[f"{name}_cache"] = normal(rng, pages, size, heads_kv, dim)
        if append:
            call[name] = normal(rng, batch, count, heads_kv, dim)
    room = capacity - count if append else capacity
    lengths = [rng.integers(0, room + 1, batch), int(rng.integers(0, room + 1))]
    call["cache_seqlens"] = draw(st.sampled_from(lengths + [None] * (not append)))
    if draw(st.booleans()):
        least = capacity if call["cache_seqlens"] is None else call["cache_seqlens"]
        call["cache_leftpad"] = rng.integers(0, np.broadcast_to(least, batch) + 1)
    if append and draw(st.booleans()):
        angles = rng.random((capacity + 4, draw(st.integers(1, DIM // 2)))) * 6
        call["rotary_cos"], call["rotary_sin"] = (
            np.cos(angles).astype(F4),
            np.sin(angles).astype(F4),
        )
    if draw(st.integers(0, 3)) == 0:
        shape = draw(st.sampled_from([(heads_kv * group,), (batch, heads_kv * group)]))
        call["alibi_slopes"] = rng.random(shape).astype(F4)
    call["rotary_interleaved"] = draw(st.booleans())
    call["causal"] = draw(st.booleans())
    call["window_size"] = draw(
        st.sampled_from([(-1, -1), (-1, -1), (3, 0), (2, 1), (-1, 0), (0, 5)])
    )
    call["softcap"] = draw(st.sampled_from([0.0, 0.0, 2.0]))
    call["softmax_scale"] = draw(st.sampled_from([None, 0.4]))
    return call


@given(calls())
@FUZZ
def test_against_the_definition(call):
    out, lse, k_cache, v_cache = expected(call)
    found, found_lse = flash_attn.flash_attn_with_kvcache(**call, return_softmax_lse=True)
    assert_close(found, out, 3)
    assert_close(found_lse, as_infinity(lse), 3)
    assert found.flags.c_contiguous
    np.testing.assert_allclose(call["k_cache"], k_cache, 1e-6, 1e-6)
    np.testing.assert_array_equal(call["v_cache"], v_cache)


@given(calls())
@settings(FUZZ, max_examples=25)
def test_tensors_are_written_in_place(call):
    torch = pytest.importorskip("torch")
    arrays = {name: a for name, a in call.items() if isinstance(a, np.ndarray)}
    tensors = {name: torch.from_numpy(a.copy()) for name, a in arrays.items()}
    found = flash_attn.flash_attn_with_kvcache(**call | tensors)
    assert isinstance(found, torch.Tensor)
    np.testing.assert_array_equal(found.numpy(), flash_attn.flash_attn_with_kvcache(**call))
    for name in ("k_cache", "v_cache"):
        np.testing.assert_array_equal(tensors[name].numpy(), call[name])


def test_a_text_token_by_token_is_the_text_at_once(rng):
    q, k, v = (normal(rng, 2, 12, n, DIM) for n in (4, 2, 2))
    pages = [np.full((9, 3, 2, DIM), np.nan, F4) for _ in range(2)]
    table = rng.permutation(9)[:8].reshape(2, 4)
    angles = np.outer(np.arange(12), 10.0 ** -np.arange(8)).astype(F4)
    flags = {"rotary_cos": np.cos(angles), "rotary_sin": np.sin(angles), "causal": True}
    steps = [
        flash_attn.flash_attn_with_kvcache(
            *(q[:, t : t + 1], *pages, k[:, t : t + 1], v[:, t : t + 1]),
            cache_seqlens=t,
            block_table=table,
            **flags,
        )
        for t in range(12)
    ]
    caches = [np.zeros((2, 12, 2, DIM), F4) for _ in range(2)]
    whole = flash_attn.flash_attn_with_kvcache(q, *caches, k, v, cache_seqlens=0, **flags)
    np.testing.assert_allclose(np.concatenate(steps, axis=1), whole, 1e-5, 1e-6)


@pytest.mark.slow
def test_halves(rng):
    q, k, v = (normal(rng, 2, 2, n, DIM).astype("f2") for n in (4, 2, 2))
    caches = [normal(rng, 2, 9, 2, DIM).astype("f2") for _ in range(2)]
    angles = (rng.random((9, 4)) * 6).astype(F4)
    call = {"q": q, "k_cache": caches[0], "v_cache": caches[1], "k": k, "v": v}
    call |= {"rotary_cos": np.cos(angles).astype("f2"), "rotary_sin": np.sin(angles).astype("f2")}
    call |= {"cache_seqlens": np.array([3, 7]), "causal": True, "window_size": (-1, -1)}
    others = ("cache_batch_idx", "cache_leftpad", "block_table", "alibi_slopes", "softmax_scale")
    whole = call | dict.fromkeys(others) | {"softcap": 0.0, "rotary_interleaved": True}
    out, _, k_cache, _ = expected(whole)
    found = flash_attn.flash_attn_with_kvcache(**call)
    assert found.dtype == np.float16
    np.testing.assert_allclose(found, out, 0.02, 0.02)
    np.testing.assert_allclose(caches[0], k_cache, 1e-3, 1e-3)


# --- rules: nothing is written where one is broken ----------------------------------------------


def valid():
    pages = np.ones((5, 4, 2, 8), F4)
    call = {"q": np.ones((2, 1, 4, 8), F4), "k_cache": pages, "v_cache": pages.copy()}
    call |= {"k": np.zeros((2, 1, 2, 8), F4), "v": np.zeros((2, 1, 2, 8), F4)}
    angles = np.ones((8, 2), F4)
    call |= {"rotary_cos": angles, "rotary_sin": angles, "cache_seqlens": np.array([3, 4])}
    return call | {"block_table": np.array([[0, -1], [3, 2]])}


def ones(*shape, dtype=F4):
    return np.ones(shape, dtype)


def read_only(*shape):
    return np.broadcast_to(F4(1), shape)


RULES = [
    ({"k": None}, "k and v must be given together, got v alone"),
    ({"cache_seqlens": None}, "cache_seqlens must be given with k and v, got None"),
    ({"cache_seqlens": [3, 8]}, "cache_seqlens must leave room for 1 rows of 8, got 8"),
    ({"cache_seqlens": [3, 9]}, "cache_seqlens must lie between 0 and 8, got 9"),
    ({"cache_seqlens": [-1, 4]}, "cache_seqlens must lie between 0 and 8, got -1"),
    ({"cache_seqlens": [4, 4]}, "block_table must hold pages from 0 to 4 where there are keys, go"),
    ({"block_table": [[0, 7], [9, 2]]}, "block_table must hold pages from 0 to 4 where there are"),
    ({"block_table": [[0, 7]]}, "block_table must have shape (2, max_pages), got (1, 2)"),
    ({"block_table": [[3, 2], [1, 0]], "cache_seqlens": 8}, "cache_seqlens must leave room for 1"),
    ({"block_table": [[2, 2], [2, 2]], "cache_seqlens": 2}, "k and v must go to rows of their own"),
    ({"cache_batch_idx": [0, 1]}, "cache_batch_idx must be None with block_table, got both"),
    (
        {"block_table": None, "cache_batch_idx": [0, 5], "cache_seqlens": 1},
        "cache_batch_idx must li",
    ),
    (
        {"block_table": None, "cache_batch_idx": 1, "cache_seqlens": 1},
        "cache_batch_idx must have s",
    ),
    (
        {"block_table": None, "cache_batch_idx": [2, 2], "cache_seqlens": 1},
        "k and v must go to row",
    ),
    ({"cache_leftpad": [5, 0]}, "cache_leftpad must lie between 0 and 4, got 5"),
    ({"k": ones(2, 1, 3, 8)}, "k must have shape (2, 1, 2, 8), got (2, 1, 3, 8)"),
    ({"v": ones(2, 2, 2, 8)}, "v must have shape (2, 1, 2, 8), got (2, 2, 2, 8)"),
    (
        {"k": ones(2, 1, 2, 8, dtype=float)},
        "k must have the dtype of k_cache, float32, got float64",
    ),
    ({"k": ones(3, 1, 2, 8), "v": ones(3, 1, 2, 8)}, "q and k must have the same batch, got 2 and"),
    ({"k_cache": read_only(5, 4, 2, 8)}, "k_cache must be writeable, got a read-only array"),
    ({"v_cache": ones(5, 4, 2, 8).tolist()}, "v_cache must be an array of NumPy or a tensor, to b"),
    (
        {"v_cache": ones(6, 4, 2, 8)},
        "k_cache and v_cache must have the same num_pages and page_siz",
    ),
    ({"q": ones(2, 1, 3, 8)}, "q heads must be a multiple of k_cache heads, got 3 and 2"),
    ({"q": ones(2, 1, 4, 8, dtype="f2")}, "rotary_cos must have the dtype of what it turns, float"),
    ({"rotary_sin": None}, "rotary_cos and rotary_sin must be given together, got one"),
    (
        {"rotary_cos": ones(4, 2), "rotary_sin": ones(4, 2)},
        "rotary_cos must have a row for each po",
    ),
    (
        {"rotary_cos": ones(8, 5), "rotary_sin": ones(8, 5)},
        "rotary_cos and rotary_sin must have th",
    ),
    ({"alibi_slopes": ones(3)}, "alibi_slopes must have shape (4,)"),
    ({"softmax_scale": np.nan}, "softmax_scale must be finite"),
    ({"window_size": None}, "window_size must be a pair of ints"),
    ({"return_softmax_lse": 1}, "return_softmax_lse must be a bool"),
]


@pytest.mark.parametrize(("change", "message"), RULES, ids=lambda value: "")
def test_rule(change, message):
    call = valid() | change
    with pytest.raises(RuntimeError) as caught:
        flash_attn.flash_attn_with_kvcache(**call)
    assert str(caught.value).startswith(message)
    for name in ("k_cache", "v_cache"):
        assert np.all(np.asarray(call[name]) == 1)


def test_the_valid_call_writes():
    call = valid()
    flash_attn.flash_attn_with_kvcache(**call)
    for cache in (call["k_cache"], call["v_cache"]):
        assert [tuple(place) for place in np.argwhere(cache[..., 0, 0] == 0)] == [(0, 3), (2, 0)]


def test_rows_without_keys(rng):
    q, cache = normal(rng, 2, 3, 2, DIM), normal(rng, 2, 4, 2, DIM)
    out, lse = flash_attn.flash_attn_with_kvcache(
        q, cache, cache, cache_seqlens=[0, 2], causal=True, return_softmax_lse=True
    )
    assert not out[0].any()
    assert not out[1, 0].any()
    assert (lse[0] == np.inf).all()
    assert (np.isinf(lse[1]) == [True, False, False]).all()
