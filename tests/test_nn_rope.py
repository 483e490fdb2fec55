"""RoPE: rotation, frequencies and scalings, against complex numbers and transformers."""

from __future__ import annotations

import math

import numpy as np
import pytest

from fastattn.nn.positions import Rope, Rotation, apply_rotary

DTYPES = (np.float32, np.float64)


def rotated(x, where, frequencies, interleaved):
    """x in float64 with each pair as a complex number, times exp(i · position · frequency)."""
    r = 2 * len(frequencies)
    x = x.astype(np.float64)
    turned = x.copy()
    first, second = (
        (slice(0, r, 2), slice(1, r, 2))
        if interleaved
        else (
            slice(0, r // 2),
            slice(r // 2, r),
        )
    )
    z = (x[..., first] + 1j * x[..., second]) * np.exp(1j * np.outer(where, frequencies))
    turned[..., first], turned[..., second] = z.real, z.imag
    return turned


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("interleaved", [False, True], ids=["half", "interleaved"])
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(8, 8), (64, 64), (10, 6), (7, 2), (80, 32)])
def test_rotation_is_a_product_of_complex_numbers(head_dim, rotary_dim, interleaved, dtype, rng):
    rope = Rope(rotary_dim, interleaved=interleaved)
    x = rng.standard_normal((2, 3, 19, head_dim)).astype(dtype)
    where = np.arange(1000, 1019)
    ours = rope.rotation(where, dtype=dtype).apply(x)
    exact = rotated(x, where, 10000.0 ** (-np.arange(0, rotary_dim, 2) / rotary_dim), interleaved)
    assert ours.dtype == dtype
    np.testing.assert_allclose(ours, exact, rtol=0, atol=16 * np.finfo(dtype).eps)
    np.testing.assert_array_equal(ours[..., rotary_dim:], x[..., rotary_dim:])


@pytest.mark.parametrize("interleaved", [False, True], ids=["half", "interleaved"])
def test_scores_depend_on_the_distance_alone(interleaved, rng):
    q, k = rng.standard_normal((2, 1, 32))
    rope = Rope(32, interleaved=interleaved)
    scores = [
        rope.rotation([i], dtype=float).apply(q)[0] @ rope.rotation([j], dtype=float).apply(k)[0]
        for i, j in [(0, 5), (100, 105), (9995, 10000)]
    ]
    np.testing.assert_allclose(scores, scores[0], rtol=1e-11)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("interleaved", [False, True], ids=["half", "interleaved"])
def test_both_backends_give_the_same_bits(interleaved, dtype, rng):
    pytest.importorskip("numba")
    x = rng.standard_normal((2, 5, 9, 37)).astype(dtype).swapaxes(1, 2)
    cos, sin = rng.standard_normal((2, 2, 1, 5, 15)).astype(dtype)
    ours, numpys = (
        apply_rotary(x, cos, sin, interleaved=interleaved, backend=backend)
        for backend in ("cpu", "numpy")
    )
    np.testing.assert_array_equal(ours, numpys)


@pytest.mark.parametrize("interleaved", [False, True], ids=["half", "interleaved"])
def test_any_strides_and_in_place(interleaved, rng):
    """Queries and keys as they lie in the product that makes them: (tokens, heads, features)."""
    qkv = rng.standard_normal((2, 9, 12, 16)).astype(np.float32)
    x = qkv[:, :, :8].swapaxes(1, 2)
    rotation = Rope(16, interleaved=interleaved).rotation(np.arange(9))
    before, expected = qkv.copy(), rotation.apply(x.copy())
    np.testing.assert_array_equal(rotation.apply(x[..., ::-1, :])[..., ::-1, :].shape, x.shape)
    assert rotation.apply(x, out=x) is x
    np.testing.assert_array_equal(x, expected)
    np.testing.assert_array_equal(qkv[:, :, 8:], before[:, :, 8:])


@pytest.mark.parametrize("interleaved", [False, True], ids=["half", "interleaved"])
@pytest.mark.parametrize("head_dim", [16, 22, 64])
def test_a_token_alone_gets_the_same_bits(head_dim, interleaved, rng):
    x = rng.standard_normal((3, 37, head_dim)).astype(np.float32)
    rope = Rope(head_dim - 2, interleaved=interleaved)
    whole = rope.rotation(np.arange(37)).apply(x)
    for p in range(37):
        alone = rope.rotation([p]).apply(x[:, p : p + 1])
        np.testing.assert_array_equal(alone, whole[:, p : p + 1])


def test_positions_of_each_member_of_a_batch(rng):
    """Left padding: member 1 starts two tokens later."""
    x = rng.standard_normal((2, 4, 6, 8)).astype(np.float32)
    where = np.maximum(np.arange(6) - np.array([[0], [2]]), 0)
    rope = Rope(8)
    ours = rope.rotation(where[:, None]).apply(x)
    for b in range(2):
        np.testing.assert_array_equal(ours[b], rope.rotation(where[b]).apply(x[b]))


def test_angles_keep_their_digits_at_large_positions():
    rotation = Rope(64).rotation([1_000_003])
    exact = np.array([math.cos(1_000_003 * 10000.0 ** (-t / 32)) for t in range(32)])
    np.testing.assert_allclose(rotation.cos[0], exact, rtol=0, atol=1e-7)


# --- against transformers ------------------------------------------------------------------------


def test_rotation_matches_transformers_llama(rng):
    torch = pytest.importorskip("torch")
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    q, k = rng.standard_normal((2, 1, 4, 50, 32)).astype(np.float32)
    rotation = Rope(32).rotation(np.arange(50))
    cos, sin = (torch.from_numpy(np.tile(a, 2))[None] for a in (rotation.cos, rotation.sin))
    theirs = llama.apply_rotary_pos_emb(torch.from_numpy(q), torch.from_numpy(k), cos, sin)
    for ours, x in zip(theirs, (q, k), strict=True):
        np.testing.assert_allclose(rotation.apply(x), ours.numpy(), rtol=0, atol=1e-6)


def test_interleaved_matches_transformers_gptj(rng):
    torch = pytest.importorskip("torch")
    gptj = pytest.importorskip("transformers.models.gptj.modeling_gptj")
    x = rng.standard_normal((1, 50, 4, 32)).astype(np.float32)  # tokens before heads
    sin, cos = gptj.create_sinusoidal_positions(50, 32)[None].chunk(2, dim=-1)
    theirs = gptj.apply_rotary_pos_emb(torch.from_numpy(x), sin, cos).numpy()
    ours = Rope(32, interleaved=True).rotation(np.arange(50)).apply(x.swapaxes(1, 2))
    np.testing.assert_allclose(ours.swapaxes(1, 2), theirs, rtol=0, atol=1e-5)


# --- errors -------------------------------------------------------------------------------------


def zeros(*shape, dtype=np.float32):
    return np.zeros(shape, dtype)


def turn(x=(2, 5, 8), cos=(5, 4), sin=None, dtype=np.float32, **options):
    sin = cos if sin is None else sin
    return apply_rotary(zeros(*x), zeros(*cos, dtype=dtype), zeros(*sin, dtype=dtype), **options)


def overlapping():
    x = zeros(6, 8)
    return Rotation(zeros(5, 4), zeros(5, 4)).apply(x[:5], out=x[1:])


def read_only():
    out = zeros(2, 5, 8)
    out.flags.writeable = False
    return turn(out=out)


ERRORS = {
    "dtype": (
        lambda: turn(dtype=np.float64),
        TypeError,
        "cos must have the dtype of x, float32, got float64",
    ),
    "int": (
        lambda: apply_rotary(np.ones((5, 8), int), zeros(5, 4), zeros(5, 4)),
        TypeError,
        "x must be float32 or float64, got int64",
    ),
    "rank": (lambda: turn(x=(8,)), ValueError, "x must have shape (..., tokens, features)"),
    "sin": (
        lambda: turn(sin=(5, 3)),
        ValueError,
        "cos and sin must have the same shape, got (5, 4) and (5, 3)",
    ),
    "width": (
        lambda: turn(cos=(5, 5)),
        ValueError,
        "cos must have at most half the width of x, (2, 5, 8), got shape (5, 5)",
    ),
    "tokens": (
        lambda: turn(cos=(4, 4)),
        ValueError,
        "cos must have a row for each token of x, (2, 5, 8), got (4, 4)",
    ),
    "leading": (
        lambda: turn(cos=(1, 2, 5, 4)),
        ValueError,
        "cos must have a row for each token of x, (2, 5, 8), got (1, 2, 5, 4)",
    ),
    "out-shape": (
        lambda: turn(out=zeros(5, 8)),
        ValueError,
        "out must have the shape of x, (2, 5, 8), got (5, 8)",
    ),
    "out-dtype": (
        lambda: turn(out=zeros(2, 5, 8, dtype=np.float64)),
        TypeError,
        "out must have the dtype of x, float32, got float64",
    ),
    "out-overlap": (overlapping, ValueError, "out must be x or not overlap it"),
    "out-read-only": (read_only, ValueError, "out must be writeable"),
    "odd": (lambda: Rope(7), ValueError, "rotary_dim must be even, got 7"),
    "base": (lambda: Rope(8, base=0.0), ValueError, "base must be positive and finite, got 0.0"),
    "positions-float": (
        lambda: Rope(8).rotation([0.5]),
        TypeError,
        "positions must be integers, got float64",
    ),
    "positions-negative": (
        lambda: Rope(8).rotation([3, -2]),
        ValueError,
        "positions must lie at 0 or above, got -2",
    ),
}


@pytest.mark.parametrize(("call", "error", "message"), ERRORS.values(), ids=ERRORS)
def test_errors(call, error, message):
    with pytest.raises(error) as raised:
        call()
    assert str(raised.value).startswith(message)
