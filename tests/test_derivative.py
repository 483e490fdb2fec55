"""The derivative of a score_mod, word by word, against finite differences."""

from __future__ import annotations

import numpy as np
import pytest

from fastattn import mods
from fastattn.derivative import derivative, is_one
from fastattn.modifier import evaluate
from fastattn.trace import trace

ROW, KEY = np.arange(5)[:, None], np.arange(7)
SCORE = np.random.default_rng(0).standard_normal((5, 7))

WORDS = {
    "abs": lambda s, b, h, i, j, aux: abs(s - 0.3) * 2,
    "add": lambda s, b, h, i, j, aux: s + s + j,
    "and": lambda s, b, h, i, j, aux: mods.where((s > 0) & (i > 1), s * 3, 1 - s),
    "div": lambda s, b, h, i, j, aux: (s + 1) / (s * s + 2) + s / 3 - 2 / (s + 9),
    "exp": lambda s, b, h, i, j, aux: mods.exp(s / 2 + i),
    "floor": lambda s, b, h, i, j, aux: mods.floor(s) * s,
    "log": lambda s, b, h, i, j, aux: mods.log(s * s + 1),
    "maximum": lambda s, b, h, i, j, aux: mods.maximum(s * 2, 0.1) + mods.minimum(0.2, s),
    "minimum": lambda s, b, h, i, j, aux: mods.minimum(s * 2, s * s) * j,
    "mul": lambda s, b, h, i, j, aux: s * s * aux[0][i] * 0.5,
    "neg": lambda s, b, h, i, j, aux: -s * 3,
    "power": lambda s, b, h, i, j, aux: s**3 - s**2,
    "sqrt": lambda s, b, h, i, j, aux: mods.sqrt(s * s + j + 1),
    "sub": lambda s, b, h, i, j, aux: 1 - s - (s - 2) * 4,
    "tanh": lambda s, b, h, i, j, aux: mods.tanh(s / 2) * 5,
    "where": lambda s, b, h, i, j, aux: mods.where(i > j, mods.sqrt(s), s * j),
    "none": lambda s, b, h, i, j, aux: i - j * 0.5,
}


@pytest.mark.parametrize("word", WORDS)
def test_it_is_a_finite_difference(word):
    aux = (np.linspace(-1, 2, 5),)
    modifier = trace(WORDS[word], "score_mod", (("float64", 1),))
    score = abs(SCORE) if word == "where" else SCORE

    def run(which, s):
        return evaluate(which, np.dtype(float), aux, 0, 0, ROW, KEY, s)

    step = 1e-6
    difference = (run(modifier, score + step) - run(modifier, score - step)) / (2 * step)
    found = np.broadcast_to(run(derivative(modifier), score), score.shape)
    np.testing.assert_allclose(found, difference, rtol=1e-7, atol=1e-8)


def test_a_branch_not_taken_adds_nothing():
    modifier = trace(lambda s, b, h, i, j, aux: mods.where(s > 0, mods.log(s), 2 * s), "score_mod")
    found = evaluate(derivative(modifier), np.dtype(float), (), 0, 0, 0, 0, np.array([-1.0, 0, 4]))
    np.testing.assert_array_equal(found, [2, 2, 0.25])


@pytest.mark.parametrize("function", [WORDS["add"], lambda s, b, h, i, j, aux: s - abs(i - j) * 3])
def test_what_only_adds_is_known(function):
    expected = function is not WORDS["add"]
    assert is_one(derivative(trace(function, "score_mod"))) == expected
