"""Calls with lengths and pages of a layout that has been seen before: looked at each time."""

from __future__ import annotations

import numpy as np
import pytest

import fastattn
import fastattn.flash_attn as flash_attn
from fastattn import check, paging, repeat

pytest.importorskip("numba")
pytestmark = pytest.mark.unguarded
F4 = np.float32


@pytest.fixture(autouse=True)
def forget():
    repeat.forget()
    yield
    repeat.forget()


def normal(rng, *shape):
    return rng.standard_normal(shape, dtype=F4)


def the_long_way(q, k, v, **options):
    """The same, with rows of each batch entry: such calls are not kept."""
    return fastattn.attention(q, k, v, **options, q_len=q.shape[-2])


@pytest.fixture
def paged(rng):
    """(q, k, v, table): two entries of up to 320 keys on pages of 16."""
    q, k, v = normal(rng, 2, 4, 2, 8), normal(rng, 50, 2, 16, 8), normal(rng, 50, 2, 16, 8)
    return q, k, v, rng.permutation(50)[:40].reshape(2, 20)


LENGTHS = [([3, 9], None), ([320, 0], None), ([256, 17], [3, 17]), ([300, 300], [299, 300]), (5, 5)]


@pytest.mark.parametrize("dtype", ["int32", "uint64"])
def test_pages_at_other_places_and_of_other_lengths(paged, rng, dtype):
    q, k, v, table = paged
    for lengths, start in LENGTHS * 2:
        table = rng.permuted(table, axis=1).astype(dtype)
        call = {"block_table": table, "kv_len": lengths, "kv_start": start, "causal": True}
        found = fastattn.attention(q, k, v, **call)
        assert found.tobytes() == the_long_way(q, k, v, **call).tobytes()


def test_what_is_kept_is_answered_without_check(paged, monkeypatch):
    q, k, v, table = paged
    call = {"block_table": table, "causal": True}
    fastattn.attention(q, k, v, kv_len=[17, 30], **call)
    longer = the_long_way(q, k, v, kv_len=[255, 256], **call)
    assert len(repeat._known) == 1
    monkeypatch.setattr(fastattn.api, "check", None)
    found = fastattn.attention(q, k, v, kv_len=np.array([255, 256]), **call)
    assert found.tobytes() == longer.tobytes()
    with pytest.raises(TypeError, match="not callable"):  # more keys than it was planned for
        fastattn.attention(q, k, v, kv_len=np.array([255, 257]), **call)


@pytest.mark.parametrize("on_pages", [True, False])
def test_results_in_memory_of_the_caller(paged, rng, on_pages):
    q, k, v, table = paged
    call = {"block_table": table} if on_pages else {}
    if not on_pages:
        k, v = normal(rng, 2, 2, 320, 8), normal(rng, 2, 2, 320, 8)
    out = np.empty_like(q)
    for lengths in ([255, 1], [256, 3], [250, 0]):
        call["kv_len"] = np.array(lengths)
        out.fill(np.nan)
        assert fastattn.attention(q, k, v, **call, out=out) is out
        np.testing.assert_array_equal(out, the_long_way(q, k, v, **call))
        with pytest.raises(ValueError, match="out must not overlap q"):
            fastattn.attention(q, k, v, **call, out=q)
    assert len(repeat._known) == 1


def test_lengths_of_each_entry_without_pages(rng):
    q, k, v = normal(rng, 3, 4, 2, 8), normal(rng, 3, 2, 40, 8), normal(rng, 3, 2, 40, 8)
    for lengths in ([1, 2, 3], [40, 0, 7], 9, [5, 5, 5]):
        found = fastattn.attention(q, k, v, kv_len=lengths, window=(3, 0))
        assert found.tobytes() == the_long_way(q, k, v, kv_len=lengths, window=(3, 0)).tobytes()
    assert len(repeat._known) == 1  # that of 9, which are views of all keys, is not


WRONG = [
    ({"kv_len": [3, 321]}, "kv_len must lie between 0 and 320, got 321"),
    ({"kv_len": [3, -1]}, "kv_len must lie between 0 and 320, got -1"),
    ({"kv_len": [3.0, 1.0]}, "kv_len must be an int or an array of ints, got float64"),
    ({"kv_len": [3, 2, 1]}, "kv_len must be an int or broadcast to the leading dimensions"),
    ({"kv_start": [4, 0]}, "kv_start must lie between 0 and 3, got 4"),
    ({"block_table": np.full((2, 20), 50)}, "block_table must hold pages from 0 to 49 where there"),
    ({"block_table": np.zeros((2, 20))}, "block_table must be an array of ints of shape"),
    ({"block_table": np.zeros((3, 20), int)}, "block_table must broadcast to the leading dimens"),
]


@pytest.mark.parametrize(("change", "message"), WRONG, ids=lambda value: "")
def test_the_same_rules(paged, change, message):
    q, k, v, table = paged
    call = {"block_table": table, "kv_len": [3, 17]}
    fastattn.attention(q, k, v, **call)
    with pytest.raises((TypeError, ValueError), match=message):
        fastattn.attention(q, k, v, **call | change)


def test_a_page_that_is_none_where_there_are_no_keys(paged):
    q, k, v, table = paged
    call = {"kv_len": [3, 300], "kv_start": [0, 290]}
    right = fastattn.attention(q, k, v, block_table=table, **call)
    spoiled = table.copy()
    spoiled[0, 1:], spoiled[1, :18] = -1, 99
    found = fastattn.attention(q, k, v, block_table=spoiled, **call)
    assert found.tobytes() == right.tobytes()


def test_a_cache_that_grows_has_one_plan_for_many_calls(rng, monkeypatch):
    caches = [normal(rng, 2, 300, 2, 8) for _ in range(2)]
    wanted = [cache.copy() for cache in caches]
    looked = []
    monkeypatch.setattr(
        "fastattn.flash_attn.kvcache.check",
        lambda *a, **k: looked.append(1) or check.check(*a, **k),
    )
    for n in range(250, 260):
        q, *new = (normal(rng, 2, 1, heads, 8) for heads in (4, 2, 2))
        found = flash_attn.flash_attn_with_kvcache(q, *caches, *new, cache_seqlens=[n, 1])
        for cache, rows in zip(wanted, new, strict=True):
            cache[0, n], cache[1, 1] = rows[0, 0], rows[1, 0]
        for cache, right in zip(caches, wanted, strict=True):
            np.testing.assert_array_equal(cache, right)
        right = flash_attn.flash_attn_with_kvcache(
            q, *wanted, cache_seqlens=[n + 1, 2], return_softmax_lse=True
        )[0]
        np.testing.assert_array_equal(found, right)
    # Both sides of a step of keys; the calls with lse all look.
    assert len(looked) - 10 == len({-(-(n + 1) // paging.STEP) for n in range(250, 260)}) == 2


def test_a_row_that_is_not_aligned_is_written_once(rng):
    caches = [normal(rng, 1, 9, 2, 8) for _ in range(2)]
    raw = np.empty(2 * 8 * 4 + 1, np.uint8)
    odd = raw[1:].view(F4).reshape(1, 1, 2, 8)
    odd[...] = normal(rng, 1, 1, 2, 8)
    for n in (3, 4):
        even = flash_attn.flash_attn_with_kvcache(odd.copy(), *caches, odd, odd, cache_seqlens=n)
        found = flash_attn.flash_attn_with_kvcache(odd, *caches, odd, odd, cache_seqlens=n)
        np.testing.assert_array_equal(found, even)
        np.testing.assert_array_equal(caches[0][0, n], odd[0, 0])
