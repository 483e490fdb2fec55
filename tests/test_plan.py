"""Dispatch, block sizes and threads as truth tables: no arrays, nothing is run."""

from __future__ import annotations

from dataclasses import replace

import pytest

import fastattn
import fastattn.plan as planning
from fastattn import repeat
from fastattn.cpu import run as cpu_run
from fastattn.modifier import Modifier
from fastattn.plan import BLOCK_M, BLOCK_N, MC, NOT_THERE, SPLIT_N, block_m_for, plan
from fastattn.problem import Problem, Variant, flop_text

REASON = "numba is not installed: pip install numba"


def problem(seqlen_q=512, seqlen_k=512, *, batch=1, heads=8, heads_kv=None, **more):
    sizes = {"batch": batch, "heads_q": heads, "heads_kv": heads_kv or heads}
    sizes |= {"seqlen_q": seqlen_q, "seqlen_k": seqlen_k, "head_dim": 64, "head_dim_v": 64}
    rest = {"scale": 0.125, "offset": seqlen_k - seqlen_q, "left": None, "right": None}
    dtype = more.pop("dtype", "float32")
    variant = Variant(dtype, more.pop("storage", dtype))
    return Problem(variant, **(sizes | rest | more))


@pytest.fixture(autouse=True)
def forget_plans():
    planning._plan.cache_clear()
    repeat.forget()
    yield
    planning._plan.cache_clear()
    repeat.forget()


@pytest.fixture
def with_cpu(monkeypatch):
    """Any kernel can be had, whatever is installed here."""
    monkeypatch.setattr(cpu_run, "unavailable", lambda variant: "")
    monkeypatch.setattr(cpu_run, "can_split", lambda variant: True)


@pytest.fixture
def without_cpu(monkeypatch):
    monkeypatch.setattr(cpu_run, "unavailable", lambda variant: REASON)


def on(threads, *args, **kwargs):
    with fastattn.num_threads(threads):
        return plan(*args, **kwargs)


# --- which backend ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "chosen", "reason", "rejected"),
    [
        ("auto", "cpu", "the compiled kernel is the fastest here", "numpy"),
        ("cpu", "cpu", "asked for by name", "numpy"),
        ("numpy", "numpy", "asked for by name", "cpu"),
    ],
)
def test_backend_where_kernels_can_be_had(with_cpu, asked, chosen, reason, rejected):
    result = plan(problem(), asked)
    assert (result.backend, result.reason) == (chosen, reason)
    assert [name for name, _ in result.rejected] == [rejected, "cuda"]


def test_backend_where_they_cannot(without_cpu):
    result = plan(problem(), "auto")
    assert (result.backend, result.reason) == ("numpy", "the fallback that always answers")
    assert result.rejected == (("cpu", REASON), NOT_THERE)
    rejected = plan(problem(), "numpy").rejected
    assert rejected == (("cpu", "backend='numpy' was asked for"), NOT_THERE)
    with pytest.raises(ImportError) as error:
        plan(problem(), "cpu")
    text = f"backend='cpu' cannot run here: {REASON}. backend='auto' falls back to NumPy."
    assert str(error.value) == text


def test_asking_for_numpy_does_not_look_for_kernels(monkeypatch):
    monkeypatch.setattr(cpu_run, "unavailable", lambda variant: pytest.fail("looked"))
    assert plan(problem(), "numpy").backend == "numpy"


# --- blocks -------------------------------------------------------------------------------------

THREADS = [1, 2, 3, 8, 64, 128]
ROWS = [1, 2, 47, 48, 49, 95, 96, 97, 767, 768, 769, 1000, 8192, 100_003]


@pytest.mark.parametrize("threads", THREADS)
@pytest.mark.parametrize("heads", [1, 7, 32, 1000])
def test_block_m_is_bounded(threads, heads):
    for rows in ROWS:
        block_m = block_m_for(rows, heads, threads)
        assert 1 <= block_m <= min(BLOCK_M, rows)
        # whole strips of MC rows, unless one block takes all rows or nothing had to be cut
        assert block_m in (rows, BLOCK_M) or block_m % MC == 0
        assert block_m >= min(rows, MC)
    assert block_m_for(0, heads, threads) == 1


@pytest.mark.parametrize(
    ("rows", "block_m"), [(768, 768), (769, 432), (1024, 528), (1536, 768), (1600, 576)]
)
def test_parts_are_even(rows, block_m):
    assert block_m_for(rows, 8, 1) == block_m


@pytest.mark.parametrize(
    ("head_dim", "head_dim_v", "dtype", "block_m"),
    [
        (256, 256, "float32", 768),
        (512, 512, "float32", 480),
        (256, 256, "float64", 480),
        (16, 1024, "float32", 336),
        (50_000, 9, "float32", MC),
    ],
)
def test_wide_rows_are_fewer(head_dim, head_dim_v, dtype, block_m, with_cpu):
    """The scratch of a thread is bounded: its rows take 3 MiB, or are MC."""
    of_rows = problem(6000, 100, head_dim=head_dim, head_dim_v=head_dim_v, dtype=dtype)
    assert on(1, of_rows).block_m == block_m


def test_smaller_plans_are_of_whole_strips(with_cpu):
    chosen = on(1, problem(760, 5000))
    while chosen is not None:
        assert chosen.block_m in (760, 384, 192, 96, MC)
        chosen = planning.smaller(chosen)


def test_blocks_that_fix_the_bits_depend_on_the_dtype_only(with_cpu):
    for dtype, storage in (("float32", "float32"), ("float64", "float64"), ("float32", "float16")):
        plans = [
            on(threads, problem(m, n, batch=batch, heads_kv=2, dtype=dtype, storage=storage))
            for threads in (1, 2, 64)
            for m, n, batch in ((1, 1, 1), (1, 5000, 1), (700, 700, 3), (5000, 40, 2))
        ]
        assert {(p.block_n, p.split_n) for p in plans} == {(BLOCK_N[dtype], SPLIT_N)}
        assert SPLIT_N % BLOCK_N[dtype] == 0


@pytest.mark.parametrize(
    ("threads", "heads", "sizes", "splits"),
    [
        (1, 1, (1, 100_000), 1),  # nobody to share with
        (2, 1, (1, 100_000), 98),
        (2, 8, (1, 100_000), 1),  # heads enough
        (8, 8, (1, 1024), 1),  # one run of keys
        (8, 7, (1, 4097), 5),
        (2, 8, (8192, 8192), 1),  # queries enough
        (64, 8, (8192, 8192), 1),
    ],
)
def test_splits_along_the_keys(with_cpu, threads, heads, sizes, splits):
    assert on(threads, problem(*sizes, heads=heads)).num_splits == splits


# --- threads ------------------------------------------------------------------------------------


@pytest.mark.parametrize("threads", THREADS)
def test_small_work_stays_on_one_thread(with_cpu, threads):
    for sizes in ((1, 1), (1, 64), (16, 16)):
        assert on(threads, problem(*sizes)).num_threads == 1


@pytest.mark.parametrize("threads", [1, 2, 64, 128])
@pytest.mark.parametrize(
    "sizes",
    [
        {"seqlen_q": 8192, "seqlen_k": 8192, "heads": 1},
        {"seqlen_q": 512, "seqlen_k": 512, "heads": 128},
        {"seqlen_q": 1, "seqlen_k": 131_072, "heads": 32, "heads_kv": 8},
        {"seqlen_q": 128, "seqlen_k": 128, "heads": 12, "batch": 64},
        {"seqlen_q": 12_345, "seqlen_k": 12_345, "heads": 3, "right": 0},
    ],
    ids=str,
)
def test_every_thread_gets_work_where_there_is_enough(with_cpu, threads, sizes):
    result = on(threads, problem(**sizes))
    assert result.num_threads == threads
    assert result.work_items >= threads
    if threads > 1:  # and no thread much more than the others: the last item is a small part
        assert result.work_items >= 2 * threads


def test_starting_threads_is_part_of_the_work(with_cpu):
    """The last of 128 would begin when the others have nearly done."""
    small = problem(128, 128, heads=12, batch=8)
    assert on(8, small).num_threads == 8
    assert 32 < on(128, small).num_threads < 80


def test_reading_keys_is_work(with_cpu):
    """One query against many keys: few multiplications, and two threads read faster than one."""
    assert on(2, problem(1, 1024, heads=12)).num_threads == 2
    assert on(2, replace(problem(1, 1024, heads=12), left=100)).num_threads == 1


@pytest.mark.parametrize("threads", THREADS)
def test_never_more_threads_than_items_or_than_allowed(with_cpu, threads):
    for m in (1, 2, 33, 512, 4096):
        for n in (1, 100, 1025, 8192):
            for heads in (1, 3, 32):
                result = on(threads, problem(m, n, heads=heads))
                assert 1 <= result.num_threads <= min(threads, result.work_items)
                rows, blocks = m, -(-m // result.block_m)
                assert result.work_items == heads * blocks * result.num_splits
                assert result.block_m <= rows


def test_a_plan_follows_the_number_of_threads(with_cpu):
    large = problem(4096, 4096)
    assert [on(n, large).num_threads for n in (3, 1, 3)] == [3, 1, 3]
    assert on(2, large) is on(2, large)  # made once


def test_work_counts_visible_pairs(with_cpu):
    full = problem(1000, 1000)
    assert full.visible_pairs == 1_000_000
    assert replace(full, right=0).visible_pairs == 500_500
    assert replace(full, left=0, right=0).visible_pairs == 1000
    assert replace(full, offset=-1000, right=0).visible_pairs == 0
    assert replace(full, chunk=100).visible_pairs == 100_000
    assert replace(full, chunk=300, right=0).visible_pairs == 3 * 45_150 + 5050
    assert full.flop == 2 * 8 * 1_000_000 * 128


def test_work_leaves_out_the_blocks_that_a_block_mask_skips(with_cpu):
    masked = replace(problem(1000, 1000), block_mask_m=64, block_mask_n=64, block_mask_pairs=9000)
    assert masked.visible_pairs == 9000
    assert masked.flop == 2 * 8 * 9000 * 128
    assert replace(masked, left=0, right=0).visible_pairs == 1000
    sparse, dense = replace(masked, block_mask_pairs=90), replace(masked, block_mask_pairs=10**6)
    assert [on(64, p).num_threads for p in (sparse, dense)] == [1, 64]


# --- explain ------------------------------------------------------------------------------------


def test_text_of_a_plan(with_cpu):
    text = str(on(2, problem(1, 4096, heads=32, heads_kv=8)))
    assert text.splitlines() == [
        "backend     cpu: the compiled kernel is the fastest here",
        "not numpy   slower: its scores and probabilities go through memory",
        f"not cuda    {NOT_THERE[1]}",
        "problem     1 x 32 heads over 8, 1 queries x 4096 keys, head_dim 64/64, float32",
        "work        33.6 Mflop over 4096 visible pairs a head",
        f"blocks      block_m 4, block_n 256, mc {MC}, split_n 1024",
        "threads     2 for 8 work items",
    ]
    split = str(on(2, problem(1, 4096, heads=4, storage="bfloat16"))).splitlines()
    assert split[3].endswith("head_dim 64/64, bfloat16")
    assert split[-1] == "threads     2 for 16 work items, 4 along the keys"
    assert "backend     numpy: asked for by name" in str(plan(problem(), "numpy"))


def test_text_counts_in_fitting_units():
    counts = {0: "0 flop", 999: "999 flop", 8192: "8.19 kflop", 2_147_483_648: "2.15 Gflop"}
    assert {flop: flop_text(flop) for flop in counts} == counts
    assert str(plan(problem(1, 1, heads=1), "numpy")).splitlines()[-3:] == [
        "work        256 flop over 1 visible pairs a head",
        "blocks      block_m 256, block_n 1024",
        "threads     as NumPy's BLAS library decides",
    ]


def test_text_says_if_kernels_are_not_kept(with_cpu, monkeypatch, tmp_path):
    kept = "note        every process compiles this kernel anew: "
    monkeypatch.setenv("FASTATTN_CACHE", "0")
    assert str(plan(problem())).splitlines()[-1] == kept + "FASTATTN_CACHE=0 turns the cache off"
    planning._plan.cache_clear()
    repeat.forget()
    tmp_path.chmod(0o702)
    monkeypatch.setenv("FASTATTN_CACHE", str(tmp_path))
    line = str(plan(problem())).splitlines()[-1]
    assert line == kept + f"others can write {tmp_path}: chmod go-w"


def test_text_of_modifiers_and_block_masks(with_cpu):
    steps = (("score", "float"), ("neg", "float", 0))
    change, hide = Modifier("score_mod", steps, ()), Modifier("mask_mod", (("b", "int"),), ())
    one = problem(100, 200)
    both = replace(one, variant=replace(one.variant, score_mod=change, mask_mod=hide))
    lines = str(plan(both)).splitlines()
    assert lines[4] == "modifiers   score_mod: 2 operations, mask_mod: 1 operations"
    masked = replace(both, block_mask_m=64, block_mask_n=32, block_mask_pairs=5000)
    lines = str(plan(masked)).splitlines()
    assert lines[5] == "block mask  64 x 32, 75.0 % of the pairs skipped"
    assert lines[6].endswith("10.2 Mflop over 5000 visible pairs a head")
    assert "modifiers" not in str(plan(one))


def test_text_without_kernels(without_cpu):
    text = str(plan(problem()))
    assert "backend     numpy: the fallback that always answers" in text
    assert f"not cpu     {REASON}" in text
