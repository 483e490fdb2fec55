"""Sinusoidal and learned positions, and xPos."""

from __future__ import annotations

import math

import numpy as np
import pytest
from nn_cases import tokens_of, zeros

from fastattn import nn
from fastattn.nn import positions
from fastattn.nn.positions import Rope, xpos_rotations


@pytest.mark.parametrize("dim", [1, 2, 7, 64])
def test_sinusoids_are_the_papers(dim):
    """PE[p, 2t] = sin(p / 10000 ** (2t / dim)), PE[p, 2t + 1] = cos of the same."""
    ours = positions.sinusoidal(np.arange(3, 40), dim, dtype=np.float64)
    for p in range(3, 40):
        for feature in range(dim):
            angle = p / 10000 ** (2 * (feature // 2) / dim)
            exact = math.cos(angle) if feature % 2 else math.sin(angle)
            assert ours[p - 3, feature] == pytest.approx(exact, abs=1e-14)


@pytest.mark.parametrize("dim", [6, 64, 9])
def test_sinusoids_match_transformers_marian(dim):
    torch = pytest.importorskip("torch")
    marian = pytest.importorskip("transformers.models.marian.modeling_marian")
    module = marian.MarianSinusoidalPositionalEmbedding(50, dim)
    theirs = module.create_weight() if hasattr(module, "create_weight") else module.weight
    ours = positions.sinusoidal(np.arange(50), dim, interleaved=False)
    np.testing.assert_allclose(ours, torch.as_tensor(theirs).detach().numpy(), rtol=0, atol=1e-6)


def test_sinusoids_take_any_shape_and_base():
    where = np.array([[0, 3], [5, 2]])
    ours = positions.sinusoidal(where, 8, base=100.0)
    assert ours.shape == (2, 2, 8)
    assert ours.dtype == np.float32
    np.testing.assert_allclose(ours[1, 0, 2], math.sin(5 / 100**0.25), rtol=1e-6)


def test_learned_rows(rng):
    table = tokens_of(rng, 10, 4)
    where = np.array([[9, 0], [3, 3]])
    ours = positions.learned(table, where)
    np.testing.assert_array_equal(ours, table[where])
    ours[:] = 0
    assert table.all()
    assert positions.learned(table, []).shape == (0, 4)


# --- xPos ---------------------------------------------------------------------------------------


def xpos_score(q, k, i, j, interleaved, scale_base):
    """Sum over pairs of Re(q conj(k) exp(i (i - j) theta)) zeta ** ((i - j) / scale_base)."""
    r = len(q)
    first, second = (
        (slice(0, r, 2), slice(1, r, 2))
        if interleaved
        else (
            slice(0, r // 2),
            slice(r // 2, r),
        )
    )
    total = 0.0
    for t, (q1, q2, k1, k2) in enumerate(
        zip(q[first], q[second], k[first], k[second], strict=True)
    ):
        turn = complex(q1, q2) * complex(k1, k2).conjugate()
        angle = (i - j) * 10000 ** (-2 * t / r)
        decay = ((2 * t / r + 0.4) / 1.4) ** ((i - j) / scale_base)
        total += (turn * complex(math.cos(angle), math.sin(angle))).real * decay
    return total


@pytest.mark.parametrize("center", [0.0, 1000.0])
@pytest.mark.parametrize("interleaved", [False, True], ids=["half", "interleaved"])
def test_xpos_scores(interleaved, center, rng):
    q, k = rng.standard_normal((2, 1, 16))
    rope = Rope(16, interleaved=interleaved)
    for i, j in [(0, 0), (5, 5), (40, 3), (2000, 1500), (7, 90)]:
        options = {"scale_base": 300.0, "center": center, "dtype": np.float64}
        of_q, _ = xpos_rotations(rope, [i], **options)
        _, of_k = xpos_rotations(rope, [j], **options)
        ours = float(of_q.apply(q)[0] @ of_k.apply(k)[0])
        assert ours == pytest.approx(xpos_score(q[0], k[0], i, j, interleaved, 300.0), rel=1e-10)


def test_xpos_scale_is_that_of_the_published_code():
    """exp of (position - middle) / scale_base times the log of (2t + 0.4 d) / (1.4 d)."""
    rope = Rope(8)
    of_q, of_k = xpos_rotations(rope, np.arange(6), center=3, dtype=np.float64)
    scale = (np.arange(0, 8, 2) + 0.4 * 8) / (1.4 * 8)
    exact = scale ** ((np.arange(6)[:, None] - 3) / 512)
    np.testing.assert_allclose(np.hypot(of_q.cos, of_q.sin), exact, rtol=1e-14)
    np.testing.assert_allclose(np.hypot(of_k.cos, of_k.sin), 1 / exact, rtol=1e-14)


def test_xpos_in_multihead_attention(rng):
    weights = nn.MultiHeadWeights(
        nn.LinearWeights(tokens_of(rng, 24, 8)), nn.LinearWeights(tokens_of(rng, 8, 8)), 2
    )
    x, rope = tokens_of(rng, 5, 8), Rope(4)
    outs = [
        nn.multihead_attention(x, weights, rotary=xpos_rotations(rope, np.arange(s, s + 5)))
        for s in (0, 700)
    ]
    np.testing.assert_allclose(*outs, rtol=2e-4)


ERRORS = {
    "dim": (
        lambda: positions.sinusoidal([1], 0),
        ValueError,
        "dim must be an int >= 1, got 0",
    ),
    "base": (
        lambda: positions.sinusoidal([1], 4, base=-1),
        ValueError,
        "base must be positive and finite, got -1",
    ),
    "float": (
        lambda: positions.sinusoidal([1.0], 4),
        TypeError,
        "positions must be integers, got float64",
    ),
    "past-the-table": (
        lambda: positions.learned(zeros(10, 4), [3, 10]),
        ValueError,
        "positions must lie from 0 to 9, got 10",
    ),
    "negative": (
        lambda: positions.learned(zeros(10, 4), [3, -1]),
        ValueError,
        "positions must lie from 0 to 9, got -1",
    ),
    "table": (
        lambda: positions.learned(zeros(10), [3]),
        ValueError,
        "table must have shape (max_positions, dim), got (10,)",
    ),
    "xpos-far": (
        lambda: xpos_rotations(Rope(8), [36_000]),
        ValueError,
        "positions must lie within 35694 of center = 0.0, got one 36000 away",
    ),
}


@pytest.mark.parametrize(("call", "error", "message"), ERRORS.values(), ids=ERRORS)
def test_errors(call, error, message):
    with pytest.raises(error) as raised:
        call()
    assert str(raised.value).startswith(message)
