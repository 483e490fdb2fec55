"""attention() on dask arrays: the same as in one call, whatever the chunks, of no idle task."""

from __future__ import annotations

import numpy as np
import oracle
import pytest
from cases import CASES, Case
from dask_arrays import chunked, computed, covering, da, tasks
from modifier_cases import modified
from test_attention import judged

import fastattn
import fastattn.dask as lazy
from fastattn import create_block_mask
from fastattn.dask.layout import Layout

F4 = np.float32
FEW = covering([case for case in CASES if case.seqlen_k <= 400])


def attend(case, rng, backend, **flags):
    """Return (out, lse) of a case in chunks at random, all axes cut."""
    arrays = (chunked(a, rng, 4, 2) for a in case.arrays())
    given = case.flags() | flags
    for name in ("mask", "bias"):
        if name in given and rng.random() < 0.5:
            given[name] = chunked(np.asarray(given[name]), rng)
    return computed(*lazy.attention(*arrays, **given, return_lse=True, backend=backend))


@pytest.fixture(autouse=True)
def longest_run(monkeypatch, rng):
    """Tasks go through one or several chunks of keys, as those do that read them themselves."""
    monkeypatch.setattr(Layout, "_longest_run", lambda self: int(rng.integers(1, 4)))


@pytest.mark.parametrize("case", FEW, ids=str)
def test_error_is_that_of_one_call(case, backend):
    rng = np.random.default_rng(case.seqlen_q * 1000 + case.seqlen_k)
    found = attend(case, rng, backend)
    exact, formula = judged(case)
    # Each level of merging rounds anew.
    for ours, truth, plain in zip(found, exact, formula, strict=True):
        oracle.assert_within_budget(ours, truth, plain, floor=8 + case.floor())


HARD = [
    Case("all", 70, 90, batch=6, heads_q=4, heads_kv=2, causal=True, chunk=13, dropout_p=0.3),
    Case("all", 70, 90, batch=6, heads_q=4, heads_kv=2, alibi="bh", window=(30, 9), sinks=True),
    Case("all", 33, 90, batch=6, heads_q=5, heads_kv=1, mask="b1qk", bias="h1k", dropout_p=0.5),
]


@pytest.mark.parametrize("lengths", ["", "q_len kv_len kv_start align", "one kv_start"])
@pytest.mark.parametrize("case", HARD, ids=str)
def test_every_chunking_of_a_batch_of_rank_2(case, lengths, backend, rng):
    """What depends on the places of entry, head, row and key is right in any block."""
    q, k, v = (a.reshape(2, 3, *a.shape[1:]) for a in case.arrays())
    flags = Case(**{**vars(case), "lengths": lengths}).flags()
    for name, value in flags.items():
        if np.ndim(value) and np.shape(value)[0] == 6:
            flags[name] = np.reshape(value, (2, 3, *np.shape(value)[1:]))
    k, v = k[:, :1], v[:1]  # they serve several entries
    expected = fastattn.attention(q, k, v, **flags, return_lse=True, backend=backend)
    for most in (1, 2, 4):
        arrays = (chunked(a, rng, most) for a in (q, k, v))
        found = computed(*lazy.attention(*arrays, **flags, return_lse=True, backend=backend))
        for ours, theirs in zip(found, expected, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_halves_are_rounded_once(dtype, backend, rng):
    case = Case("half", 40, 300, heads_q=2, dtype=dtype)
    (out,) = computed(lazy.attention(*(chunked(a, rng, 6) for a in case.arrays()), backend=backend))
    wide = (chunked(a.astype(F4), rng, 6) for a in case.arrays())
    exact = computed(lazy.attention(*wide, backend=backend))[0]
    # At most the bits that parts merged in another order differ by lie between the two roundings.
    assert np.mean(out != exact.astype(out.dtype)) < 0.01


MODIFIED = [
    *({"mask": name} for name in ("prefix-batch", "document", "every-index", "constant")),
    *({"score": name} for name in ("alibi", "t5", "hides", "every-index")),
    {"mask": "document", "score": "alibi-heads"},
    {"mask": "every-index", "score": "every-index", "block": (10, 7)},
    {"mask": "causal", "block": (16, 16)},
    {"mask": "document", "block": (1, 35)},
]


@pytest.mark.parametrize("names", MODIFIED, ids=lambda names: "-".join(map(str, names.values())))
def test_modifiers_see_the_indices_of_the_whole(names, rng):
    case = Case("mod", 60, 70, batch=3, heads_q=4, heads_kv=2, lengths="kv_len")
    flags = case.flags() | modified(case, **names)[0]
    expected = fastattn.attention(*case.arrays(), **flags, return_lse=True, backend="numpy")
    for most in (2, 5):
        arrays = (chunked(a, rng, most) for a in case.arrays())
        found = computed(*lazy.attention(*arrays, **flags, return_lse=True, backend="numpy"))
        for ours, theirs in zip(found, expected, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=2e-6)


def test_modifiers_of_all_parts_share_a_kernel(one_each, rng):
    case = Case("mod", 60, 70, batch=3, heads_q=4, heads_kv=2)
    flags = modified(case, mask="every-index", score="every-index")[0]
    arrays = [chunked(a, rng, 4) for a in case.arrays()]
    calls = [lazy.attention(*arrays, **flags) for _ in range(2)]
    assert calls[0].name == calls[1].name  # also where the function is made anew in every call
    parts = {k: task for k, task in calls[0].dask.items() if k[0].startswith("attention-part")}
    kernels = {task.args[0].arguments(key[1:])[1]["mask_mod"] for key, task in parts.items()}
    assert len(parts) > 4
    assert len(kernels) == 1


# --- tasks ----------------------------------------------------------------------------------------


@pytest.fixture
def one_each(monkeypatch):
    """A task for each pair of chunks, as where keys are computed."""
    monkeypatch.setattr(Layout, "_longest_run", lambda self: 1)


def zeros(*shape, chunks, dtype=F4):
    return da.zeros(shape, chunks=chunks, dtype=dtype)


def test_pairs_that_nothing_sees_make_no_task(one_each):
    q = zeros(2, 80, 8, chunks=(1, 10, 8))
    out = lazy.attention(q, q, q, causal=True)
    assert tasks(out, "attention-part") == 2 * (8 * 9 // 2)
    assert tasks(out, "attention-merge") == 2 * (7 * 8 // 2)
    assert tasks(lazy.attention(q, q, q, window=(11, 0)), "attention-part") == 2 * (3 * 8 - 3)
    assert tasks(lazy.attention(q, q, q, chunk=20), "attention-part") == 2 * 16
    assert tasks(lazy.attention(q, q, q, kv_len=25, kv_start=10), "attention-part") == 2 * 16
    assert tasks(lazy.attention(q, q, q, kv_len=25, q_len=5), "attention-part") == 2 * (3 + 7)


def test_masks_in_memory_make_no_task_for_what_they_hide(one_each):
    q = zeros(2, 80, 8, chunks=(1, 10, 8))
    mask = np.zeros((2, 80, 80), bool)
    mask[1, 3, 17] = True
    assert tasks(lazy.attention(q, q, q, mask=mask), "attention-part") == 16  # 15 of them empty
    block_mask = create_block_mask(lambda b, h, i, j, aux: i // 20 == j // 20, 1, 1, 80, 80)
    assert tasks(lazy.attention(q, q, q, block_mask=block_mask), "attention-part") == 2 * 8 * 8
    fine = create_block_mask(
        lambda b, h, i, j, aux: i // 20 == j // 20, 1, 1, 80, 80, block=(10, 5)
    )
    assert tasks(lazy.attention(q, q, q, block_mask=fine), "attention-part") == 2 * 8 * 2


def test_a_window_makes_tasks_in_proportion(one_each):
    q = zeros(1, 131072, 64, chunks=(1, 1024, 64))
    out = lazy.attention(q, q, q, causal=True, window=(1024, None))
    assert tasks(out, "attention-part") == 2 * 128 - 1


def test_equal_calls_share_their_tasks(one_each, rng):
    q = chunked(rng.standard_normal((2, 30, 8)), rng)
    flags = {"alibi": np.array([0.5, 1.0]), "dropout_p": 0.5}
    a, b = (lazy.attention(q, q, q, **flags, dropout_seed=3) for _ in range(2))
    with_lse, lse = lazy.attention(q, q, q, **flags, dropout_seed=3, return_lse=True)
    assert a.name == b.name == with_lse.name
    assert {*a.dask} <= {*with_lse.dask, *lse.dask}
    for other in ({"dropout_seed": 4}, {"dropout_seed": 3, "alibi": np.array([0.5, 2.0])}):
        assert lazy.attention(q, q, q, **(flags | other)).name != a.name
    assert (
        lazy.attention(q, q, q, dropout_p=0.5).name != lazy.attention(q, q, q, dropout_p=0.5).name
    )


def test_rank_2_is_one_head(rng):
    q, k = rng.standard_normal((30, 8)), rng.standard_normal((40, 8))
    expected = fastattn.attention(q, k, k, causal=True, return_lse=True)
    found = lazy.attention(*(chunked(a, rng) for a in (q, k, k)), causal=True, return_lse=True)
    for ours, theirs in zip(computed(*found), expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-12)


@pytest.mark.parametrize("empty", ["batch", "heads_q", "seqlen_q", "seqlen_k", "head_dim"])
def test_nothing_along_an_axis(empty, backend, rng):
    sizes = {"batch": 2, "heads_q": 2, "seqlen_q": 5, "seqlen_k": 7, "head_dim": 3} | {empty: 0}
    case = Case("empty", **sizes, heads_kv=sizes["heads_q"], head_dim_v=4)
    flags = {"sinks": np.arange(sizes["heads_q"], dtype=F4), "return_lse": True}
    expected = fastattn.attention(*case.arrays(), **flags, backend=backend)
    arrays = (chunked(a, rng) for a in case.arrays())
    for ours, theirs in zip(computed(*lazy.attention(*arrays, **flags)), expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5)


def test_hidden_keys_add_nothing_whatever_they_hold(backend, rng):
    case = Case("hidden", 40, 60, causal=True, align="top_left", heads_q=2)
    q, k, v = case.arrays()
    expected = fastattn.attention(q, k, v, causal=True, align="top_left", backend=backend)
    k[..., 40:, :] = v[..., 40:, :] = np.nan
    k[..., 25, :] = np.nan  # what rows from 25 on see is no number
    lazy_out = lazy.attention(
        *(chunked(a, rng, 6) for a in (q, k, v)), causal=True, align="top_left", backend=backend
    )
    (out,) = computed(lazy_out)
    np.testing.assert_allclose(out[..., :25, :], expected[..., :25, :], rtol=1e-5, atol=1e-6)
    assert np.isnan(out[..., 25:, :]).all()


def test_any_scheduler_gives_the_same_bits(backend, rng):
    case = Case("bits", 200, 300, 32, heads_q=4, heads_kv=2, causal=True, dropout_p=0.2, sinks=True)
    arrays = [chunked(a, rng, 5) for a in case.arrays()]
    pair = lazy.attention(*arrays, **case.flags(), return_lse=True, backend=backend)
    expected = computed(*pair)
    for _ in range(5):
        for ours, theirs in zip(computed(*pair, scheduler="threads"), expected, strict=True):
            np.testing.assert_array_equal(ours, theirs)


def test_a_task_uses_one_thread(rng, monkeypatch):
    seen = []
    monkeypatch.setattr(
        "fastattn.dask.tasks.attend",
        lambda part, q, k, v, *rest: seen.append(fastattn.get_num_threads()) or (q, q[..., 0]),
    )
    q = chunked(rng.standard_normal((2, 30, 8)), rng)
    with fastattn.num_threads(8):
        computed(lazy.attention(q, q, q))
    assert {*seen} == {1}
