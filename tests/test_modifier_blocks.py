"""What modifiers hide is not there, and block masks skip it."""

from __future__ import annotations

import dataclasses

import numpy as np
import oracle
import pytest
from cases import Case
from modifier_cases import MASKS, assert_agrees_with_the_oracle, modified

import fastattn
from fastattn import create_block_mask, mods
from fastattn.block_mask import PARTIAL, SKIPPED

CPU_IS_SLOW = True  # see test_modifiers.py

# --- what is hidden is not there ----------------------------------------------------------------

BAD = [np.nan, np.inf, -np.inf]


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("how", ["mask_mod", "score_mod", "block_mask"])
def test_hidden_keys_may_hold_anything(how, bad, backend):
    (q, k, v), hidden = Case("hidden", 40, 300, heads_q=4, heads_kv=2).arrays(), [3, 70, 299]
    aux = (np.isin(np.arange(300), hidden, invert=True),)
    flags = {
        "mask_mod": {"mask_mod": lambda b, h, i, j, aux: aux[0][j], "aux": aux},
        "score_mod": {
            "score_mod": lambda s, b, h, i, j, aux: mods.where(aux[0][j], s, -np.inf),
            "aux": aux,
        },
        "block_mask": {
            "block_mask": create_block_mask(
                lambda b, h, i, j, aux: aux[0][j], None, None, 40, 300, aux=aux, block=(16, 4)
            )
        },
    }[how]
    clean = fastattn.attention(q, k, v, **flags, backend=backend)
    for a in (k, v):
        a[..., hidden, :] = bad
    np.testing.assert_array_equal(fastattn.attention(q, k, v, **flags, backend=backend), clean)


def test_nan_that_a_row_sees_stays_in_its_rows(backend):
    q, k, v = Case("seen", 40, 70).arrays()
    v[..., 20, :] = np.nan
    out = fastattn.attention(q, k, v, mask_mod=mods.causal, backend=backend)
    np.testing.assert_array_equal(np.isnan(out).all(axis=-1), np.arange(40) >= [[[20]] * 2])
    np.testing.assert_array_equal(np.isnan(out).any(axis=-1), np.arange(40) >= [[[20]] * 2])


# --- block masks --------------------------------------------------------------------------------


@pytest.mark.parametrize("block", [(64, 64), (16, 256), (300, 7)], ids=str)
@pytest.mark.parametrize("name", MASKS)
def test_block_mask_equals_its_mask_mod(name, block, backend):
    case = Case("block", 270, 1100, 8, batch=2, heads_q=4, heads_kv=2)
    ours, truth = modified(case, mask=name, block=block)
    assert_agrees_with_the_oracle(backend, case, ours, truth)
    plain, _ = modified(case, mask=name)
    q, k, v = case.arrays()
    found = fastattn.attention(q, k, v, **ours, backend=backend)
    expected = fastattn.attention(q, k, v, **plain, backend=backend)
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-6)


def test_block_mask_for_all_heads_and_batches(backend):
    case = Case("shared", 70, 130, batch=3, heads_q=4, heads_kv=2)
    q, k, v = case.arrays()
    expected = fastattn.attention(q, k, v, mask_mod=mods.causal, backend=backend)
    for sizes in [(None, None), (3, None), (1, 4), (3, 4)]:
        block_mask = create_block_mask(mods.causal, *sizes, 70, 130, block=(16, 16))
        found = fastattn.attention(q, k, v, block_mask=block_mask, backend=backend)
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)


def test_skipped_blocks_may_hold_anything(backend):
    """Keys of skipped blocks that stand between others, in the arrays and in the aux of a score."""
    q, k, v = Case("skipped", 256, 512, 8, heads_q=2).arrays()
    seen = np.repeat([1, 0, 0, 1, 1, 1, 0, 1], 64) > 0
    mask = create_block_mask(
        lambda b, h, i, j, aux: aux[0][j], None, None, 256, 512, aux=(seen,), block=(64, 64)
    )
    assert mask.sparsity == 3 / 8
    k[..., ~seen, :] = v[..., ~seen, :] = np.nan
    found = fastattn.attention(
        q,
        k,
        v,
        block_mask=mask,
        score_mod=lambda s, b, h, i, j, aux: s + aux[0][j],
        aux=(np.where(seen, 0.0, np.nan),),
        backend=backend,
    )
    exact, _ = oracle.attention(q, k, v, mask=seen)
    np.testing.assert_allclose(found, exact, rtol=0, atol=2e-6)


def test_skipped_blocks_are_not_computed(backend):
    """What is said to be skipped is not read, whatever its mask_mod would say: whole blocks of a
    kernel, and the ends of one.
    """
    q, k, v = Case("skipped", 256, 1024, 8, heads_q=2).arrays()
    mask = create_block_mask(mods.and_masks(), None, None, 256, 1024, block=(64, 64))
    kinds = np.full(mask.kinds.shape, PARTIAL, np.uint8)
    kinds[..., [0, 4, 5, 6, 7, 11, 15]] = SKIPPED
    mask = dataclasses.replace(mask, kinds=kinds)
    seen = np.repeat(kinds[0, 0, 0] != SKIPPED, 64)
    k[..., ~seen, :] = v[..., ~seen, :] = np.nan
    found = fastattn.attention(q, k, v, block_mask=mask, backend=backend)
    exact, _ = oracle.attention(q, k, v, mask=seen)
    np.testing.assert_allclose(found, exact, rtol=0, atol=2e-6)


def test_full_blocks_do_not_run_the_mask_mod(monkeypatch):
    """On NumPy, where it can be counted: the pairs of partial blocks, and no others."""
    import fastattn.modified as numpy_backend

    pairs = []
    evaluate = numpy_backend.evaluate

    def counted(modifier, dtype, aux, b, h, i, j, score):
        pairs.append((i.size, j.size))
        return evaluate(modifier, dtype, aux, b, h, i, j, score)

    monkeypatch.setattr(numpy_backend, "evaluate", counted)
    q, k, v = Case("count", 512, 2048, 8, heads_q=1).arrays()
    block_mask = create_block_mask(mods.prefix_lm(1024), None, None, 512, 2048, block=(256, 1024))
    fastattn.attention(q, k, v, block_mask=block_mask, backend="numpy")
    assert pairs == []  # all full or skipped
    block_mask = create_block_mask(mods.causal, None, None, 512, 2048, block=(256, 256))
    fastattn.attention(q, k, v, block_mask=block_mask, backend="numpy")
    assert pairs == [(256, 256), (256, 512)]
