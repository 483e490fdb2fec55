"""Modifiers mean the same on arrays, scalars and registers, and fail in the user's own line."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest
from modifier_kernel import builder, run_on_registers

from fastattn import mods
from fastattn.cpu import compile
from fastattn.modifier import aux_arrays, aux_types, evaluate
from fastattn.trace import VOCABULARY, trace

DTYPES = ("float32", "float64")
BATCH, HEADS, SEQLEN = 3, 4, 77  # 77: the last register of aux[j] is not whole
SOME = np.random.default_rng(1)
IDS = np.sort(SOME.integers(0, 9, (BATCH, SEQLEN)))
SLOPES = 2.0 ** -np.arange(1, HEADS + 1)
BIAS = SOME.standard_normal((SEQLEN, SEQLEN))
WEIGHT = SOME.standard_normal((32, HEADS)).astype(np.float32)

needs_kernels = pytest.mark.skipif(
    bool(compile.unavailable(("none",))), reason="no compiled kernels here"
)

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


def traced(function, argument, aux):
    """Return (modifier, arrays)."""
    arrays = aux_arrays(aux)
    return trace(function, argument, aux_types(arrays)), arrays


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
    table, offset = mods.t5_table(WEIGHT, 5, 9, first_query=4)
    assert table.shape == (HEADS, 13)
    for i in range(5):
        for j in range(9):
            bucket = mods.t5_buckets(np.array(j - (i + 4)), 32)
            np.testing.assert_array_equal(table[:, j - i + offset], WEIGHT[bucket])


# Each word of the vocabulary, on everything that it may meet. s is the score; x an int aux array of
# (batch, seqlen), y a float one of (seqlen,), n an integer, t truth values.
X = SOME.integers(-6, 7, (BATCH, SEQLEN))
Y = SOME.standard_normal(SEQLEN) * 10
Y[:4] = np.nan, np.inf, -np.inf, -0.0
AUX = (X, Y, np.int64(-3), X[0] > 0, X.astype(np.int32), BIAS, np.int64(0))
WORDS = {
    "abs": lambda s, b, h, i, j, aux: mods.abs(s) + abs(i - j) + abs(aux[0][b, j]) + abs(h - 3),
    "floor": lambda s, b, h, i, j, aux: mods.floor(s) + mods.floor(i / 3) + mods.floor(j),
    "sqrt": lambda s, b, h, i, j, aux: mods.sqrt(s) + mods.sqrt(h),
    "minimum": lambda s, b, h, i, j, aux: mods.minimum(s, aux[1][j]) + mods.minimum(i, j),
    "maximum": lambda s, b, h, i, j, aux: mods.maximum(aux[1][j], s) + mods.maximum(j, 9),
    "minimum-nan": lambda s, b, h, i, j, aux: mods.minimum(aux[1][j], 0.5),
    "where": lambda s, b, h, i, j, aux: mods.where(aux[3][j] & (j < 50), s, -np.inf),
    "where-bool": lambda s, b, h, i, j, aux: mods.where(mods.where(s > 0, j < i, j > i), s, 1),
    "where-number": lambda s, b, h, i, j, aux: mods.where(aux[0][b, j], s, 0),
    "where-scalar": lambda s, b, h, i, j, aux: mods.where(i > 20, mods.where(h > 1, 1, 2), s),
    "logical_not": lambda s, b, h, i, j, aux: mods.where(mods.logical_not(aux[0][b, j]), s, 1),
    "arithmetic": lambda s, b, h, i, j, aux: (2 - s) * 3.5 / (aux[1][j] - 1) + -s - (-j) + +i,
    "powers": lambda s, b, h, i, j, aux: s**3 + (i - j) ** 2 + s**1 + h**7,
    "floordiv": lambda s, b, h, i, j, aux: (i - j) // 4 + (j - i) // -3 + aux[0][b, j] // aux[2],
    "mod": lambda s, b, h, i, j, aux: (i - j) % 4 + (j - i) % -3 + aux[0][b, j] % aux[2] + i % 7,
    "divide-by-0": lambda s, b, h, i, j, aux: j // aux[6] + j % aux[6] + 5 // aux[0][b, j] + s / 0,
    "divide-by-ints": lambda s, b, h, i, j, aux: 9 % aux[4][b, j] + j // aux[4][b, j] + 1 / (j + 1),
    "comparisons": lambda s, b, h, i, j, aux: (
        (s < 1) + 2 * (s <= aux[1][j]) + 4 * (aux[1][j] > 0) + 8 * (j >= i) + 16 * (b == 1)
    ),
    "nan-comparisons": lambda s, b, h, i, j, aux: (
        (aux[1][j] == aux[1][j]) + 2.0 * (aux[1][j] != aux[1][j]) + 4 * (aux[1][j] <= np.inf)
    ),
    "logic": lambda s, b, h, i, j, aux: mods.where(
        (aux[3][j] | (j > 70)) & ~(j == i) ^ (aux[3][i] & True), s, 0
    ),
    "bits": lambda s, b, h, i, j, aux: (j & 5) + (aux[0][b, j] | 8) + (i ^ j) + ~aux[4][b, j],
    "numpy-numbers": lambda s, b, h, i, j, aux: np.float32(2) * s + np.int64(3) * j - np.float64(1),
    "extremes": lambda s, b, h, i, j, aux: mods.where(
        (j < 2**62) & (j - 2**40 < 0) & (j + 2**40 > 0), s, -1e300
    ),
    "big-products": lambda s, b, h, i, j, aux: ((i * 100_003 + 7) * (j * 65_537)) % 1009,
    "run": lambda s, b, h, i, j, aux: aux[1][j + 2] + aux[1][i - j] + aux[1][j - i + aux[2]],
    "two-dims": lambda s, b, h, i, j, aux: (
        aux[5][i, j] + aux[5][j, i] + aux[5][j, j] + aux[5][h][j]
    ),
    "gather": lambda s, b, h, i, j, aux: aux[1][4 + (j * 3) % 50] + aux[1][abs(aux[0][b, j]) + 4],
    "beyond": lambda s, b, h, i, j, aux: aux[5][i + 1000, j - 1000] + aux[5][i - 1000, 500 - j],
    "elementary": lambda s, b, h, i, j, aux: mods.exp(s) + mods.log(j + 1) + mods.tanh(h),
    "constant": lambda s, b, h, i, j, aux: 3,
    "input": lambda s, b, h, i, j, aux: j,
}


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", WORDS)
def test_words_on_registers(name, dtype, rng):
    modifier, arrays = traced(WORDS[name], "score_mod", AUX)
    for b, h, i in PLACES:
        for first in (0, 13):
            score = (4 * rng.standard_normal(SEQLEN - first)).astype(dtype)
            j = np.arange(first, SEQLEN)
            exact = evaluate(modifier, np.dtype(dtype), arrays, b, h, i, j, score)
            got = run_on_registers(modifier, dtype, arrays, b, h, i, first, score)
            rtol = 4 * np.finfo(dtype).eps if name == "elementary" else 0
            np.testing.assert_allclose(got, np.broadcast_to(exact, got.shape), rtol=rtol, atol=0)


@pytest.mark.parametrize("name", sorted(set(WORDS) - {"run", "beyond", "constant", "input"}))
def test_words_are_numpys(name, rng):
    """The recorded steps give what the function itself gives on arrays."""
    modifier, arrays = traced(WORDS[name], "score_mod", AUX)
    score, j = 4 * rng.standard_normal(SEQLEN), np.arange(SEQLEN)
    for b, h, i in PLACES:
        with np.errstate(all="ignore"):
            plain = WORDS[name](score, np.int64(b), np.int64(h), np.int64(i), j, arrays)
        steps = evaluate(modifier, np.dtype("float64"), arrays, b, h, i, j, score)
        np.testing.assert_allclose(steps, plain, rtol=1e-15, atol=0)


@needs_kernels
def test_aux_layouts(rng):
    """Any strides: broadcast, reversed, every second element, transposed."""
    base = rng.standard_normal((2 * SEQLEN, 2 * SEQLEN)).astype(np.float32)
    score, j = np.zeros(SEQLEN, np.float32), np.arange(SEQLEN)
    views = (base[0, ::-1], base[0, ::2], base[3, :5], np.broadcast_to(base[0, :1], SEQLEN))
    modifier, arrays = traced(
        lambda s, b, h, i, j, aux: s + aux[0][j] + aux[1][i - j] + aux[2][j] + aux[3][j],
        "score_mod",
        views,
    )
    assert all(np.shares_memory(array, base) for array in arrays)
    for i in (0, 40, 76):
        exact = evaluate(modifier, np.dtype("float32"), arrays, 0, 0, i, j, score)
        got = run_on_registers(modifier, "float32", arrays, 0, 0, i, 0, score)
        np.testing.assert_array_equal(got, exact)


@needs_kernels
def test_int64_ids_are_compared_whole():
    ids = (np.arange(SEQLEN) % 3) << 32  # alike in their low 32 bits
    modifier, arrays = traced(mods.document_mask(), "mask_mod", (ids,))
    got = run_on_registers(modifier, "float32", arrays, 0, 0, 4, 0, np.zeros(SEQLEN))
    np.testing.assert_array_equal(got, ids == ids[4])


@needs_kernels
@pytest.mark.parametrize(("name", "most"), [("exp", 1.1), ("log", 0.8), ("tanh", 2.5)])
def test_elementary_functions_in_float32(name, most):
    modifier, _ = traced(lambda s, b, h, i, j, aux: getattr(mods, name)(s), "score_mod", ())
    # every 2003rd of all float32 bit patterns; halves and doubles exactly in the kernel's test
    x = np.arange(0, 1 << 32, 2003, dtype=np.uint64).astype(np.uint32).view(np.float32)
    x = x[~(np.abs(x) > 1e38) & ~((np.abs(x) < 1e-37) & (x != 0))]
    _check_elementary(name, modifier, x, most, np.float64)


@needs_kernels
@pytest.mark.parametrize(("name", "most"), [("exp", 1.1), ("log", 0.8), ("tanh", 2.5)])
def test_elementary_functions_in_float64(name, most, rng):
    modifier, _ = traced(lambda s, b, h, i, j, aux: getattr(mods, name)(s), "score_mod", ())
    x = rng.standard_normal(200_000) * 10 ** rng.uniform(-9, 2.85, 200_000)
    edges = [
        0.0,
        -0.0,
        np.inf,
        -np.inf,
        np.nan,
        1.0,
        -1.0,
        709.78,
        709.79,
        -745.13,
        -745.14,
        -710.0,
    ]
    _check_elementary(name, modifier, np.concatenate([x, edges]), most, np.longdouble)


def _check_elementary(name, modifier, x, most, wide):
    if np.finfo(wide).eps >= np.finfo(x.dtype).eps:
        pytest.skip("no wider float here")
    with np.errstate(all="ignore"):
        got = run_on_registers(modifier, x.dtype.name, (), 0, 0, 0, 0, x)
        exact = getattr(np, name)(x.astype(wide))
        nearest = exact.astype(x.dtype)
        finite = np.isfinite(nearest)
        error = np.abs(got[finite] - exact[finite]) / np.spacing(np.abs(nearest[finite]))
    np.testing.assert_array_equal(got[~finite], nearest[~finite])
    np.testing.assert_array_equal(np.signbit(got[finite]), np.signbit(nearest[finite]))
    assert error.max() <= most


def test_a_closure_made_anew_is_the_same_modifier():
    one, two = (trace(mods.sliding_window(256, 0), "mask_mod") for _ in range(2))
    assert one == two
    assert hash(one) == hash(two)
    assert repr(one) == repr(two)
    assert one != trace(mods.sliding_window(255, 0), "mask_mod")
    nan = [trace(lambda s, b, h, i, j, aux: s * np.nan, "score_mod") for _ in range(2)]
    assert nan[0] == nan[1]


def test_steps_that_nothing_needs_are_dropped():
    def wasteful(score, b, h, i, j, aux):
        _ = aux[0][b, j] * 3
        return score

    modifier = trace(wasteful, "score_mod", (("float32", 2),))
    assert len(modifier.steps) == 1
    assert not modifier.uses("b")


def test_helpers_loops_and_keywords_are_python():
    def helper(x, times=2):
        for _ in range(times):
            x = x + 1
        return x

    def modifier(score, b, h, i, j, aux, extra=5):
        return helper(score, times=3) + extra

    steps = trace(modifier, "score_mod")
    assert evaluate(steps, np.dtype("float64"), (), 0, 0, 0, 0, 1.0) == 9


# What a modifier must not do, and what the message says beside the line.
BAD = {
    "math.tanh(score)": (TypeError, "the module math"),
    "np.tanh(score)": (TypeError, "ufunc"),
    "np.where(j <= i, score, 0)": (TypeError, "NumPy's functions"),
    "score if j <= i else 0": (TypeError, "use where"),
    "score * (i < j < i + 3)": (TypeError, "use where"),
    "score + max(i, j)": (TypeError, "maximum"),
    "score.astype(int)": (TypeError, "no attribute 'astype'"),
    "score << 1": (TypeError, "unsupported operand"),
    "score % 2": (TypeError, "write floor"),
    "~score": (TypeError, "got a float"),
    "score ** 0.5": (TypeError, "constant integer n"),
    "score ** j": (TypeError, "constant integer n"),
    "score + BIAS[j]": (TypeError, "NumPy's functions"),
    "score + BIAS": (TypeError, "not in aux"),
    "score + [1, 2][j]": (TypeError, "only the arrays of aux"),
    "score + 'a'": (TypeError, "str is neither"),
    "score + 2**70": (TypeError, "64 bits"),
    "score + aux[7][j]": (ValueError, "aux has length 2"),
    "score + aux[0][j, j]": (ValueError, "rank, 1, got 2 indices"),
    "score + aux[0][-1]": (ValueError, "at least 0"),
    "score + aux[0][score]": (TypeError, "an index must be an integer"),
    "score + aux[0][:2]": (TypeError, "no slice"),
    "score + aux[0]": (TypeError, "has rank 1, got 0 indices"),
    "score + sum(aux[0])": (TypeError, "looped over"),
}


@pytest.mark.parametrize("text", BAD)
def test_what_a_modifier_must_not_do(text, tmp_path):
    error, reason = BAD[text]
    path = tmp_path / "user.py"
    path.write_text(f"def modifier(score, b, h, i, j, aux):\n    k = j + 1\n    return {text}\n")
    space = {"np": np, "math": math, "BIAS": BIAS}
    exec(compile_source(path), space)
    with pytest.raises(error, match=re.escape(reason)) as caught:
        trace(space["modifier"], "score_mod", (("float32", 1), ("int64", 2)))
    message = str(caught.value)
    assert message.startswith("score_mod must use only what every backend can run, got")
    assert f"{path}:3: return {text}" in message
    assert VOCABULARY in message


def compile_source(path):
    import builtins

    return builtins.compile(path.read_text(), str(path), "exec")


def test_the_line_named_is_in_the_modifiers_file_or_in_the_modifier():
    def helper(x):
        return math.exp(x)

    def modifier(score, b, h, i, j, aux):
        return helper(score)

    with pytest.raises(TypeError, match=re.escape("return math.exp(x)")):
        trace(modifier, "score_mod")


@pytest.mark.parametrize(
    ("function", "argument", "message"),
    [
        (3, "score_mod", "must be a function of (score, b, h, i, j, aux), got int"),
        (lambda s, b, h, i, j: s, "score_mod", "must be a function of (score, b, h, i, j, aux)"),
        (mods.alibi(), "mask_mod", "must be a function of (b, h, i, j, aux), got alibi(score"),
        (lambda b, h, i, j, aux: None, "mask_mod", "mask_mod must return its result, got None"),
        (lambda b, h, i, j, aux: j - i, "mask_mod", "mask_mod must return bool"),
        (lambda *args: "text", "score_mod", "score_mod must return its result, got 'text'"),
    ],
)
def test_signature_and_result(function, argument, message):
    with pytest.raises(TypeError, match=re.escape(message)):
        trace(function, argument)


def test_other_errors_of_a_modifier_are_its_own():
    with pytest.raises(NameError, match="nowhere"):
        trace(lambda *args: nowhere, "score_mod")  # noqa: F821


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: mods.sliding_window(-1, 0), "left must be at least 0"),
        (lambda: mods.sliding_window(0, -2), "right must be at least 0"),
        (lambda: mods.dilated_window(1, 1, 0), "dilation must be at least 1, got 0"),
        (lambda: mods.softcap(0.0), "cap must be positive and finite, got 0.0"),
        (lambda: mods.softcap(np.inf), "cap must be positive and finite, got inf"),
    ],
)
def test_ready_made_check_their_numbers(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        (True, "bool"),
        (3, "int64"),
        (2.5, "float64"),
        (np.zeros(3, np.uint8), "int32"),
        (np.zeros(3, np.uint32), "int64"),
        (np.zeros(3, np.float16), "float32"),
        (np.zeros(3, ">f4"), "float32"),
        (np.zeros(3, "i4,f8")["f1"], "float64"),  # strides that are no whole number of elements
        (np.zeros((0, 4), np.int32), "int32"),
    ],
)
def test_aux_arrays(value, dtype):
    (array,) = aux_arrays((value,))
    assert array.dtype == np.dtype(dtype)
    assert array.ndim == np.ndim(value)
    assert array.size > 0
    assert all(stride % array.itemsize == 0 for stride in array.strides)


@pytest.mark.parametrize(
    ("aux", "message"),
    [
        (np.zeros(3), "aux must be a tuple of arrays and numbers, got ndarray"),
        (("a",), "aux[0] must be an array or a number, got str"),
        ((1, [1, 2]), "aux[1] must be an array or a number, got list"),
        ((np.zeros(3, complex),), "aux[0] must be bool, an integer"),
        ((np.zeros(3, np.uint64),), "aux[0] must be bool, an integer"),
        ((np.array(["a"]),), "aux[0] must be bool, an integer"),
    ],
)
def test_aux_that_is_refused(aux, message):
    with pytest.raises(TypeError, match=re.escape(message)):
        aux_arrays(aux)


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


@needs_kernels
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", [*MASKS, *SCORES, "where"])
def test_no_gather_no_masked_store_no_symbol(name, target):
    function, aux, _ = {**MASKS, **SCORES, "where": (WORDS["where"], AUX, None)}[name]
    modifier, _ = traced(function, "mask_mod" if name in MASKS else "score_mod", aux)
    goal = compile.Target(*TARGETS[target], "")
    function = builder(modifier, "float32")(goal.unit)
    text = compile.assembly(function, goal)
    assert not UNWANTED.findall(text)
    compile.compile_object(function, goal)  # needs no symbol from outside
