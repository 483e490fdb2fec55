"""Each word of the vocabulary means the same on registers as in NumPy."""

from __future__ import annotations

import random

import numpy as np
import pytest
from modifier_kernel import needs_kernels, run_on_registers, traced

from fastattn import mods
from fastattn.modifier import evaluate

DTYPES = ("float32", "float64")
BATCH, SEQLEN = 3, 77  # 77: the last register of aux[j] is not whole
SOME = np.random.default_rng(1)
BIAS = SOME.standard_normal((SEQLEN, SEQLEN))
PLACES = [(0, 0, 0), (1, 3, 40), (2, 1, 76)]

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
@pytest.mark.parametrize(("name", "most"), [("exp", 1.1), ("log", 0.8), ("tanh", 2.6)])
def test_elementary_functions_in_float32(name, most):
    modifier, _ = traced(lambda s, b, h, i, j, aux: getattr(mods, name)(s), "score_mod", ())
    # every 2003rd of all float32 bit patterns; halves and doubles exactly in the kernel's test
    x = np.arange(0, 1 << 32, 2003, dtype=np.uint64).astype(np.uint32).view(np.float32)
    x = x[~(np.abs(x) > 1e38) & ~((np.abs(x) < 1e-37) & (x != 0))]
    _check_elementary(name, modifier, x, most, np.float64)


@needs_kernels
@pytest.mark.parametrize(("name", "most"), [("exp", 1.1), ("log", 0.8), ("tanh", 2.6)])
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
    assert (error <= most).all()


def random_integer(draw, values, depth):
    """An integer expression of the values (score, b, h, i, j, aux)."""
    _, b, h, i, j, aux = values
    if depth == 0 or draw.random() < 0.1:
        return draw.choice((b, h, i, j, j, aux[0][b, j], aux[4][b, i], aux[2], draw.randint(-9, 9)))
    x, y = (random_integer(draw, values, depth - 1) for _ in range(2))
    constant = draw.choice((-7, -3, -1, 1, 2, 5, 8))
    truth = random_truth(draw, values, depth - 1)
    choices = {
        "add": lambda: x + y,
        "sub": lambda: x - y,
        "minimum": lambda: mods.minimum(x, y),
        "maximum": lambda: mods.maximum(x, y),
        "where": lambda: mods.where(truth, x, y),
        "abs": lambda: mods.abs(x),
        "mod": lambda: x % constant,
        "floordiv": lambda: x // constant,
    }
    return choices[draw.choice(sorted(choices))]()


def random_truth(draw, values, depth):
    """A truth value."""
    *_, i, j, aux = values
    if depth == 0 or draw.random() < 0.1:
        return draw.choice((aux[3][j], aux[3][i], j <= i, draw.random() < 0.5))
    x, y = (random_truth(draw, values, depth - 1) for _ in range(2))
    kind = draw.choice((random_integer, random_float))
    left, right = (kind(draw, values, depth - 1) for _ in range(2))
    choices = {
        "and": lambda: x & y,
        "or": lambda: x | y,
        "xor": lambda: x ^ y,
        "not": lambda: mods.logical_not(x),
        "lt": lambda: left < right,
        "le": lambda: left <= right,
        "eq": lambda: left == right,
        "ne": lambda: left != right,
    }
    return choices[draw.choice(sorted(choices))]()


def random_float(draw, values, depth):
    """A float expression."""
    score, b, _, i, j, aux = values
    if depth == 0 or draw.random() < 0.1:
        return draw.choice((score, score, aux[1][j], aux[1][i], draw.uniform(-3, 3), -np.inf))
    x, y = (random_float(draw, values, depth - 1) for _ in range(2))
    n, m = (random_integer(draw, values, depth - 1) + 0 * b for _ in range(2))
    truth = random_truth(draw, values, depth - 1)
    choices = {
        "add": lambda: x + y,
        "sub": lambda: x - y,
        "mul": lambda: x * y,
        "div": lambda: x / (y + 0 * score),
        "minimum": lambda: mods.minimum(x, y),
        "maximum": lambda: mods.maximum(x, y),
        "where": lambda: mods.where(truth, x, y),
        "floor": lambda: mods.floor(x),
        "mixed": lambda: x + n,
        "run": lambda: aux[1][j + draw.randint(-5, 5)],
        "gather": lambda: aux[5][n, m + 0 * j],
    }
    return choices[draw.choice(sorted(choices))]()


def check_random(seed):
    def modifier(*values):
        return random_float(random.Random(seed), values, 3)

    steps, arrays = traced(modifier, "score_mod", AUX)
    rng = np.random.default_rng(seed)
    for dtype in DTYPES:
        for b, h, i, first in ((0, 0, 0, 0), (2, 3, 70, 13)):
            score = (4 * rng.standard_normal(SEQLEN - first)).astype(dtype)
            j = np.arange(first, SEQLEN)
            exact = evaluate(steps, np.dtype(dtype), arrays, b, h, i, j, score)
            got = run_on_registers(steps, dtype, arrays, b, h, i, first, score)
            np.testing.assert_array_equal(got, np.broadcast_to(exact, got.shape))


@needs_kernels
@pytest.mark.parametrize("seed", range(10))
def test_random_expressions(seed):
    check_random(seed)


@needs_kernels
@pytest.mark.slow
@pytest.mark.parametrize("hundred", range(1, 6))
def test_many_random_expressions(hundred):
    for seed in range(100 * hundred, 100 * hundred + 100):
        check_random(seed)
