"""fastattn.plot: what is drawn, and where."""

from __future__ import annotations

import sys

import numpy as np
import pytest

import fastattn
from fastattn import plot


@pytest.fixture(autouse=True)
def figures():
    """Drawn without a screen, and closed after the test."""
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    yield plt
    plt.close("all")


def drawn(ax):
    return np.asarray(ax.images[0].get_array())


def ticks(axis):
    return [label.get_text() for label in axis.get_ticklabels()]


@pytest.mark.parametrize("head", [1, (0, 1), (1, 2)], ids=str)
def test_attention_draws_the_probabilities_of_a_head(head, rng):
    q, k = rng.standard_normal((2, 2, 3, 7, 4)).astype(np.float32)
    weights = fastattn.attention_weights(q, k, causal=True)
    index = head if isinstance(head, tuple) else (0, head)
    ax = plot.attention(q, k, head=head, causal=True)
    np.testing.assert_array_equal(drawn(ax), weights[index])
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("key", "query")


def test_texts_of_a_slice_are_along_the_axes(rng):
    q, k = rng.standard_normal((5, 4)), rng.standard_normal((8, 4))
    parts = {"rows": slice(1, 4), "columns": slice(None, None, 3)}
    ax = plot.attention(q, k, tokens="abcde", key_tokens="ABCDEFGH", **parts)
    np.testing.assert_array_equal(drawn(ax), fastattn.attention_weights(q, k)[1:4, ::3])
    assert ticks(ax.yaxis) == ["b", "c", "d"]
    assert ticks(ax.xaxis) == ["A", "D", "G"]


def test_keys_have_the_texts_of_the_queries_they_are(rng, figures):
    q = rng.standard_normal((3, 4))
    ax = plot.attention(q, q, tokens=["the", "cat", "sat"], ax=figures.subplots()[1])
    assert ticks(ax.xaxis) == ticks(ax.yaxis) == ["the", "cat", "sat"]
    longer = plot.attention(q, rng.standard_normal((4, 4)), tokens=["the", "cat", "sat"])
    assert ticks(longer.xaxis) != ["the", "cat", "sat"]


def test_mask_draws_what_is_seen(rng):
    np.testing.assert_array_equal(drawn(plot.mask(5, 8, causal=True)), np.tri(5, 8, 3))
    seen = rng.random((6, 6)) < 0.5
    ax = plot.mask(6, mask=seen, rows=slice(2, None), tokens="abcdef")
    np.testing.assert_array_equal(drawn(ax), seen[2:])
    assert ticks(ax.yaxis) == list("cdef")
    windows = np.tri(4, 4, 1) - np.tri(4, 4, -2)
    slopes = plot.mask(4, window=(1, 1), heads=2, head=1, alibi=[1.0, 2.0])
    np.testing.assert_array_equal(drawn(slopes), windows)


def test_modifier_is_drawn():
    ax = plot.mask(6, mask_mod=lambda b, h, i, j, aux: (i + h) % 2 == j % 2, heads=2, head=1)
    np.testing.assert_array_equal(drawn(ax), (np.arange(6)[:, None] + np.arange(6)) % 2)


def test_errors(rng):
    q = rng.standard_normal((2, 3, 4))
    with pytest.raises(ValueError, match="tokens must be 3 texts, one for each token, got 2"):
        plot.attention(q, q, tokens="ab")
    with pytest.raises(ValueError, match="key_tokens must be 4 texts, one for each token, got 5"):
        plot.mask(3, 4, key_tokens="abcde")
    with pytest.raises(IndexError, match="index 2 is out of bounds"):
        plot.attention(q, q, head=2)
    with pytest.raises(IndexError, match=r"head must be at most 1 ints, got \(0, 0\)"):
        plot.attention(q, q, head=(0, 0))
    with pytest.raises(TypeError, match="unexpected keyword argument 'colour'"):
        plot.attention(q, q, colour="red")


def test_without_matplotlib(rng, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    with pytest.raises(ImportError, match="pip install matplotlib"):
        plot.mask(3, causal=True)
