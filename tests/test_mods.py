"""Ready-made modifiers mean the same on arrays, scalars and registers, and compile to good code."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest
from modifier_kernel import builder, needs_kernels, run_on_registers, traced

from fastattn import mods
from fastattn.cpu import compile
from fastattn.modifier import evaluate
from fastattn.trace import VOCABULARY

DTYPES = ("float32", "float64")
BATCH, HEADS, SEQLEN = 3, 4, 77  # 77: the last register of aux[j] is not whole
SOME = np.random.default_rng(1)
IDS = np.sort(SOME.integers(0, 9, (BATCH, SEQLEN)))
SLOPES = 2.0 ** -np.arange(1, HEADS + 1)
WEIGHT = SOME.standard_normal((32, HEADS)).astype(np.float32)

# name: (modifier, aux, the mask or the change of the score, from b, h, i, j alone)
MASKS = {
    "causal": (mods.causal, (), lambda b, h, i, j: j <= i),
    "window": (mods.sliding_window(5, 2), (), lambda b, h, i, j: i - 5 <= j <= i + 2),
    "left": (mods.sliding_window(5, None), (), lambda b, h, i, j: i - 5 <= j),
    "unlimited": (mods.sliding_window(None, None), (), lambda b, h, i, j: True),
    "dilated": (
        mods.dilated_window(2, 3, 4),
        (),
        lambda b, h, i, j: j in range(i - 8, i + 13, 4),
    ),
    "prefix": (mods.prefix_lm(20), (), lambda b, h, i, j: j < 20 or j <= i),
    "prefix-number": (mods.prefix_lm(), (20,), lambda b, h, i, j: j < 20 or j <= i),
    "prefix-batch": (
        mods.prefix_lm(slot=1),
        (0, np.array([3, 40, 2**40])),
        lambda b, h, i, j: j < (3, 40, SEQLEN)[b] or j <= i,
    ),
    "document": (mods.document_mask(), (IDS[0],), lambda b, h, i, j: IDS[0, i] == IDS[0, j]),
    "document-batch": (
        mods.document_mask(query=0, key=1),
        (IDS, IDS.astype(np.int32)),
        lambda b, h, i, j: IDS[b, i] == IDS[b, j],
    ),
    "and": (
        mods.and_masks(mods.causal, mods.document_mask(), mods.sliding_window(9, 0)),
        (IDS,),
        lambda b, h, i, j: IDS[b, i] == IDS[b, j] and i - 9 <= j <= i,
    ),
    "or": (
        mods.or_masks(mods.sliding_window(0, 0), mods.document_mask()),
        (IDS,),
        lambda b, h, i, j: IDS[b, i] == IDS[b, j],
    ),
    "and-none": (mods.and_masks(), (), lambda b, h, i, j: True),
    "or-none": (mods.or_masks(), (), lambda b, h, i, j: False),
}
SCORES = {
    "softcap": (mods.softcap(3.0), (), lambda s, b, h, i, j: 3 * math.tanh(s / 3)),
    "alibi": (mods.alibi(), (SLOPES,), lambda s, b, h, i, j: s - SLOPES[h] * np.abs(i - j)),
    "alibi-batch": (
        mods.alibi(),
        (np.stack([SLOPES, 2 * SLOPES, 3 * SLOPES]),),
        lambda s, b, h, i, j: s - (b + 1) * SLOPES[h] * np.abs(i - j),
    ),
    "relative": (
        mods.relative_bias(),
        (np.stack([SOME.standard_normal(2 * SEQLEN)] * HEADS), SEQLEN),
        None,
    ),
    "t5": (mods.t5_bias(), mods.t5_table(WEIGHT, SEQLEN, SEQLEN), None),
}
PLACES = [(b, h, i) for b, h, i in [(0, 0, 0), (1, 3, 40), (2, 1, 76)]]


@pytest.mark.parametrize("name", MASKS)
def test_masks_on_arrays_and_scalars(name):
    function, aux, wanted = MASKS[name]
    modifier, arrays = traced(function, "mask_mod", aux)
    j = np.arange(SEQLEN)
    for b, h, i in PLACES:
        exact = [wanted(b, h, i, k) for k in range(SEQLEN)]
        np.testing.assert_array_equal(function(b, h, np.int64(i), j, arrays), exact)
        assert [bool(function(b, h, i, k, arrays)) for k in range(SEQLEN)] == exact
        steps = evaluate(modifier, np.dtype("float32"), arrays, b, h, i, j)
        np.testing.assert_array_equal(np.broadcast_to(steps, j.shape), exact)


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", MASKS)
def test_masks_on_registers(name, dtype):
    function, aux, wanted = MASKS[name]
    modifier, arrays = traced(function, "mask_mod", aux)
    for b, h, i in PLACES:
        for first in (0, 13):
            exact = [wanted(b, h, i, k) for k in range(first, SEQLEN)]
            score = np.zeros(SEQLEN - first)
            got = run_on_registers(modifier, dtype, arrays, b, h, i, first, score)
            np.testing.assert_array_equal(got, exact)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SCORES)
def test_scores_on_arrays_and_scalars(name, dtype, rng):
    function, aux, wanted = SCORES[name]
    modifier, arrays = traced(function, "score_mod", aux)
    score = (4 * rng.standard_normal(SEQLEN)).astype(dtype)
    j = np.arange(SEQLEN)
    rtol = 8 * np.finfo(dtype).eps
    for b, h, i in PLACES:
        steps = evaluate(modifier, np.dtype(dtype), arrays, b, h, i, j, score)
        assert steps.dtype == dtype
        close = {"rtol": rtol, "atol": rtol * max(1, np.abs(score).max())}
        on_array = function(score, b, h, np.int64(i), j, arrays)
        np.testing.assert_allclose(on_array, steps, **close)
        scalars = [function(s, b, h, i, k, arrays) for k, s in enumerate(score)]
        np.testing.assert_allclose(scalars, steps, **close)
        if wanted is not None:
            exact = [wanted(float(s), b, h, i, k) for k, s in enumerate(score)]
            np.testing.assert_allclose(steps, exact, **close)


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SCORES)
def test_scores_on_registers(name, dtype, rng):
    function, aux, _ = SCORES[name]
    modifier, arrays = traced(function, "score_mod", aux)
    for b, h, i in PLACES:
        for first in (0, 13):
            score = (4 * rng.standard_normal(SEQLEN - first)).astype(dtype)
            j = np.arange(first, SEQLEN)
            exact = evaluate(modifier, np.dtype(dtype), arrays, b, h, i, j, score)
            got = run_on_registers(modifier, dtype, arrays, b, h, i, first, score)
            rtol = 4 * np.finfo(dtype).eps if name == "softcap" else 0
            np.testing.assert_allclose(got, exact, rtol=rtol, atol=0)


def test_t5_buckets_are_those_of_the_paper():
    # The published layout of 32 buckets and distances up to 128, both directions.
    near = mods.t5_buckets(np.arange(-8, 9), 32)
    np.testing.assert_array_equal(near, [*range(8, 0, -1), 0, *range(17, 25)])
    far = np.array([16, 32, 64, 127, 128, 10_000])
    np.testing.assert_array_equal(mods.t5_buckets(-far, 32), [10, 12, 14, 15, 15, 15])
    np.testing.assert_array_equal(mods.t5_buckets(far, 32, False), 0)
    np.testing.assert_array_equal(mods.t5_buckets(-far, 32, False)[[0, 3, 4]], [16, 31, 31])


def test_t5_buckets_are_those_of_transformers():
    pytest.importorskip("torch")
    t5 = pytest.importorskip("transformers.models.t5.modeling_t5")
    import torch

    distance = np.arange(-300, 301)
    for both in (True, False):
        for buckets, most in ((32, 128), (64, 200)):
            theirs = t5.T5Attention._relative_position_bucket(
                torch.from_numpy(distance), both, buckets, most
            )
            ours = mods.t5_buckets(distance, buckets, both, most)
            np.testing.assert_array_equal(ours, theirs.numpy())


def test_t5_table_holds_every_distance():
    table, zero = mods.t5_table(WEIGHT, 5, 9, offset=3)
    assert table.shape == (HEADS, 13)
    for i in range(5):
        for j in range(9):
            bucket = mods.t5_buckets(np.array(j - (i + 3)), 32)
            np.testing.assert_array_equal(table[:, j - i + zero], WEIGHT[bucket])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: mods.sliding_window(-1, 0), "left must be an int >= 0, got -1"),
        (lambda: mods.sliding_window(0, -2), "right must be an int >= 0, got -2"),
        (lambda: mods.dilated_window(1, 1, 0), "dilation must be an int >= 1, got 0"),
        (lambda: mods.softcap(0.0), "cap must be positive and finite, got 0.0"),
        (lambda: mods.softcap(np.inf), "cap must be positive and finite, got inf"),
    ],
)
def test_ready_made_check_their_numbers(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_window_has_whole_radii():
    with pytest.raises(TypeError, match="left must be an int >= 0, got float"):
        mods.sliding_window(1.5, None)


TARGETS = {
    "avx512": ("x86_64-unknown-linux-gnu", "x86-64-v4"),
    "avx2": ("x86_64-unknown-linux-gnu", "x86-64-v3"),
    "neon": ("aarch64-unknown-linux-gnu", "generic"),
}
# A gather; a masked store of AVX2 or of AVX-512.
UNWANTED = re.compile(
    r"gather|maskmov\w*\s+%[xyz]mm\d+, *%[xyz]mm\d+, *[^%]|vmovup[sd]\s.*\)\s*\{%k"
)


def test_the_pattern_sees_what_is_unwanted():
    for line in (
        "\tvgatherdps\t%ymm2, (%rax,%ymm1,4), %ymm0",
        "\tvmaskmovps\t%ymm1, %ymm0, (%rdi,%rax)",
        "\tvmovups\t%zmm0, 64(%rdi){%k1}",
        "\tvmovups\t%zmm0, 64(%rdi) {%k1}",
    ):
        assert UNWANTED.search(line)
    for line in (
        "\tvmaskmovps\t(%rdi,%rax), %ymm0, %ymm1",
        "\tvmovups\t64(%rdi), %zmm0 {%k1} {z}",
        "\tvmovups\t%zmm0, 64(%rdi)",
    ):
        assert not UNWANTED.search(line)


def hides(score, b, h, i, j, aux):
    return mods.where(aux[0][j] & (j <= i), score, -np.inf)


@needs_kernels
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    "name", ["causal", "dilated", "prefix-batch", "document-batch", *SCORES, "where"]
)
def test_no_gather_no_masked_store_no_symbol(name, target):
    function, aux, _ = {**MASKS, **SCORES, "where": (hides, (IDS[0] > 3,), None)}[name]
    modifier, _ = traced(function, "mask_mod" if name in MASKS else "score_mod", aux)
    goal = compile.Target(*TARGETS[target], "")
    build = builder(modifier, "float32")
    machine, module = compile.optimise(*compile.translate(build(goal.unit)), goal)
    assert not UNWANTED.findall(machine.emit_assembly(module))
    outside = [f.name for f in module.functions if f.is_declaration]
    assert all(name.startswith("llvm.") for name in outside)


def test_star_import_brings_the_modifiers_and_the_words():
    public = {
        name
        for name, value in vars(mods).items()
        if getattr(value, "__module__", "") == mods.__name__ and not name.startswith("_")
    }
    assert set(mods.__all__) == public
    named = VOCABULARY.partition("fastattn.mods: ")[2].removesuffix(".").split(", ")
    assert set(named) < public
