"""A few modifiers in the compiled kernel; test_modifiers.py has all of them, as slow tests."""

from __future__ import annotations

import numpy as np
import oracle
import pytest

import fastattn
from fastattn import mods


def arrays(rng, seqlen_q=70, seqlen_k=300):
    """Return q, k, v with two query heads a key head."""
    shapes = [(2, 4, seqlen_q, 32), (2, 2, seqlen_k, 32), (2, 2, seqlen_k, 40)]
    return [rng.standard_normal(shape, dtype=np.float32) for shape in shapes]


def agree(q, k, v, dense, **arguments):
    """Hold the compiled kernel against the oracle with a dense mask or bias."""
    ours = fastattn.attention(q, k, v, **arguments, return_lse=True, backend="cpu")
    exact, formula = oracle.judge(q, k, v, **dense)
    for result, truth, measure in zip(ours, exact, formula, strict=True):
        oracle.assert_within_budget(result, truth, measure, floor=4)


@pytest.fixture(autouse=True)
def compiled():
    one = np.ones((1, 1), np.float32)
    plan = fastattn.explain(one, one, one)
    if plan.backend != "cpu":
        pytest.skip(f"backend cpu: {dict(plan.rejected)['cpu']}")


def test_mask_mod_block_mask_and_hidden_nan(rng):
    q, k, v = arrays(rng)
    i, j = np.ogrid[:70, :300]
    seen = (j >= i - 40) & (j <= i + 9)
    k[:, :, 200:], v[:, :, 200:] = np.nan, np.inf  # no row sees them
    window = mods.sliding_window(40, 9)
    mask = fastattn.create_block_mask(window, None, None, 70, 300)
    for arguments in ({"mask_mod": window}, {"block_mask": mask}):
        agree(q, k, v, {"mask": seen}, **arguments)


def test_block_mask_above_rows_that_see_no_key(rng):
    """Strips of rows that stand before the first key: their span was taken backwards."""
    q, k, v = arrays(rng)
    i, j = np.ogrid[:70, :300]
    mask = fastattn.create_block_mask(mods.sliding_window(40, 9), None, None, 70, 300, block=(8, 8))
    flags = {"causal": True, "align": -60}
    agree(q, k, v, {"mask": (j >= i - 40) & (j <= i + 9), **flags}, block_mask=mask, **flags)


def test_score_mod_with_aux_of_heads_and_keys(rng):
    q, k, v = arrays(rng)
    slopes, keys = rng.random(4, np.float32), rng.standard_normal(300, dtype=np.float32)
    bias = slopes[:, None, None] * keys

    def score_mod(score, b, h, i, j, aux):
        return score + aux[0][h] * aux[1][j]

    agree(q, k, v, {"bias": bias}, score_mod=score_mod, aux=(slopes, keys))


def test_score_mod_of_keys_that_fill_any_number_of_registers(rng):
    """Four at a time, and the last ones more than once."""
    q, k, v = arrays(rng)
    keys = rng.standard_normal(300, dtype=np.float32)

    def score_mod(score, b, h, i, j, aux):
        return score + aux[0][j]

    for count in range(7, 150, 7):
        some = k[:, :, :count], v[:, :, :count]
        agree(q, *some, {"bias": keys[:count]}, score_mod=score_mod, aux=(keys,))


def test_largest_and_smallest_scores_stay_finite(rng):
    """In base 2 they would be infinite; rows of them are uniform, and neither NaN nor empty."""
    q, k, v = arrays(rng)
    rows = np.zeros(70, np.float32)
    rows[3], rows[5] = np.finfo(np.float32).max, np.finfo(np.float32).min

    def score_mod(score, b, h, i, j, aux):
        return mods.where(aux[0][i] == 0, score, aux[0][i])

    out = fastattn.attention(q, k, v, score_mod=score_mod, aux=(rows,), backend="cpu")
    mean = v.mean(axis=-2).repeat(2, axis=1)[:, :, None]
    np.testing.assert_allclose(out[:, :, [3, 5]], mean.repeat(2, axis=2), atol=1e-5)
    assert np.isfinite(out).all()


def test_gradients_of_full_blocks_that_begin_or_end_amid_a_register(rng):
    """Whole registers are computed: what lies before and behind the blocks must not count."""
    q, k, v = arrays(rng)
    dout = rng.standard_normal((2, 4, 70, 40), dtype=np.float32)

    def between(b, h, i, j, aux):
        return (j >= aux[0][0]) & (j < aux[0][1])

    for ends in ((8, 296), (0, 40), (24, 56)):
        aux = (np.array(ends),)
        blocks = fastattn.create_block_mask(between, None, None, 70, 300, block=(8, 8), aux=aux)
        flags = {"block_mask": blocks}
        out, lse = fastattn.attention(q, k, v, **flags, return_lse=True, backend="numpy")
        found, exact = (
            fastattn.attention_backward(dout, q, k, v, out, lse, **flags, backend=name)[:3]
            for name in ("cpu", "numpy")
        )
        for a, b in zip(found, exact, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


def test_minus_infinity_of_a_score_mod_hides_also_where_the_product_is(rng):
    q, k, v = arrays(rng)
    q[..., 0], k[:, :, 7], v[:, :, 7] = 1e30, 0, np.inf
    k[..., 0] = 0
    k[:, :, 7, 0] = -1e30

    def same(score, b, h, i, j, aux):
        return score + 0

    out = fastattn.attention(q, k, v, score_mod=same, backend="cpu")
    assert np.isfinite(out).all()
    assert np.isnan(fastattn.attention(q, k, v, backend="cpu")).all()  # nothing hides the key


def test_a_modifier_made_anew_is_the_same_kernel(rng, monkeypatch):
    q, k, v = arrays(rng)
    fastattn.attention(q, k, v, mask_mod=mods.sliding_window(40, 9), backend="cpu")
    monkeypatch.setattr("fastattn.cpu.compile.translate", None)  # a compilation would raise
    for _ in range(2):
        fastattn.attention(q, k, v, mask_mod=mods.sliding_window(40, 9), backend="cpu")


def test_compiled_modifiers_differentiate(rng):
    """Gradients with a score_mod that bends, a block mask and NaN that no row sees."""
    q, k, v = (a.astype(float) for a in arrays(rng))
    k[:, :, 200:], v[:, :, 200:] = np.nan, np.inf

    def bend(score, b, h, i, j, aux):
        return mods.tanh(score / 3) * aux[0][h] + score * aux[1][j]

    mask = fastattn.create_block_mask(mods.sliding_window(40, 9), None, None, 70, 300)
    flags = {"score_mod": bend, "block_mask": mask, "softcap": 5.0}
    flags["aux"] = rng.standard_normal(4), rng.standard_normal(300)
    out, lse = fastattn.attention(q, k, v, **flags, return_lse=True, backend="numpy")
    dout, dlse = rng.standard_normal(out.shape), rng.standard_normal(lse.shape)
    given = {"dlse": dlse} | flags
    ours = fastattn.attention_backward(dout, q, k, v, out, lse, **given, backend="cpu")
    exact = fastattn.attention_backward(dout, q, k, v, out, lse, **given, backend="numpy")
    for a, expected in zip(ours, exact, strict=True):
        np.testing.assert_allclose(a, expected, rtol=0, atol=1e-12)
        assert a.any()
    given["score_mod_grad"] = lambda score, b, h, i, j, aux: 0.0
    none, _, _ = fastattn.attention_backward(dout, q, k, v, out, lse, **given, backend="cpu")
    assert not none.any()
