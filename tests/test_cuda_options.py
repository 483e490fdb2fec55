"""The options of the tensor-core kernels on the emulated device, against the oracle."""

from __future__ import annotations

import numpy as np
import pytest
from cuda_emulated import assert_call, forward, inputs, need_numba_cuda

from fastattn import mods
from fastattn.check import check
from fastattn.cuda.tensor.tilings import Tiling

need_numba_cuda()
SIZES = (1, 2, 1, 40, 70)
RNG = np.random.default_rng(1)


@pytest.fixture(params=["float16", pytest.param("float32", marks=pytest.mark.slow)])
def general(request):
    return Tiling(request.param, 64, 64, warps=2, block_m=32, block_n=32, general=True)


def bias(*shape, dtype=np.float32, hidden=0.0):
    values = RNG.standard_normal(shape)
    return np.where(RNG.random(shape) < hidden, -np.inf, values).astype(dtype)


OPTIONS = {
    "softcap": {"softcap": 1.5},
    "small softcap of small scores": {"softcap": 500.0, "scale": 0.01},
    "bias": {"bias": bias(2, 40, 70)},
    "bias of halves, transposed, that hides": {
        "bias": bias(70, 40, dtype=np.float16, hidden=0.3).T,
        "causal": True,
    },
    "bias of doubles, one for all rows": {"bias": bias(1, 70, dtype=np.float64)},
    "mask": {"mask": RNG.random((2, 40, 70)) < 0.5},
    "mask of one key for each row": {"mask": np.eye(40, 70, dtype=bool)},
    "mask that hides all": {"mask": np.zeros((1, 70), bool)},
    "alibi": {"alibi": np.array([0.5, 0.03], np.float32), "causal": True},
    "chunks": {"chunk": 16, "causal": True},
    "chunks, rows before the first key": {"chunk": 7, "align": -20},
    "all at once": {
        "softcap": 2.0,
        "bias": bias(2, 40, 70, hidden=0.1),
        "alibi": np.array([0.1, 0.2], np.float32),
        "mask": RNG.random((40, 70)) < 0.8,
        "sinks": np.array([0.1, 1.0], np.float32),
        "window": (30, 5),
        "scale": -0.2,
    },
}


@pytest.mark.parametrize("name", OPTIONS)
def test_option(name, general):
    assert_call(general, *inputs(general, *SIZES), **OPTIONS[name])


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", [192, 256])
def test_wide_rows(head_dim):
    """32 keys of a step."""
    wide = Tiling("bfloat16", head_dim, head_dim, 4, 64, 32, general=True)
    assert_call(wide, *inputs(wide, 1, 2, 1, 70, 90), **OPTIONS["alibi"], softcap=2.0)


def test_the_least_number_is_no_mask(general):
    """Rows of such a bias are means of all values, as finfo.min / ln 2 stays finite."""
    q, k, v = inputs(general, *SIZES)
    least = np.full((40, 70), np.finfo(np.float32).min, np.float32)
    problem, operands = check(q, k, v, bias=least)
    forward(general, problem, operands)
    mean = np.broadcast_to(v.mean(axis=2, keepdims=True, dtype=np.float32), operands.out.shape)
    np.testing.assert_allclose(operands.out.astype(np.float32), mean, atol=1e-3)


def test_masks_and_biases_count_keys_from_the_callers_first(general):
    q, k, v = inputs(general, 2, 2, 1, 40, 70)
    lengths = {"kv_start": np.array([3, 20]), "kv_len": np.array([70, 60])}
    masks = {"mask": RNG.random((2, 1, 40, 70)) < 0.5, "bias": bias(2, 1, 1, 70, hidden=0.1)}
    assert_call(general, q, k, v, **lengths, **masks, causal=True)


def test_values_that_are_not_finite_behind_masks(general):
    q, k, v = inputs(general, 1, 2, 1, 40, 70)
    v[0, 0, 11, 3], v[0, 0, 50, 4], v[0, 0, 51, 4] = np.nan, np.inf, -np.inf
    assert_call(general, q, k, v, mask=RNG.random((40, 70)) < 0.5)
    assert_call(general, q, k, v, bias=bias(40, 70, hidden=0.5), chunk=20)


def softened(score, b, h, i, j, aux):
    return mods.tanh(score) * 2 + aux[0][h] * abs(i - j)


QUICK = "both, and a list of documents"  # the others compile kernels of their own
MODIFIERS = {
    "score_mod": ({"score_mod": softened, "aux": (np.array([0.1, -0.05], np.float32),)}),
    "mask_mod": {"mask_mod": mods.dilated_window(20, 20, 3)},
    QUICK: {
        "score_mod": softened,
        "mask_mod": mods.and_masks(mods.causal, mods.document_mask(query=1, key=2)),
        "aux": (
            np.array([0.1, -0.05], np.float32),
            np.arange(40, dtype=np.int32) // 15,
            np.arange(70) // 15,
        ),
    },
}


@pytest.mark.parametrize(
    "name", [QUICK, *(pytest.param(n, marks=pytest.mark.slow) for n in MODIFIERS if n != QUICK)]
)
def test_modifier(name, general):
    flags = MODIFIERS[name]
    h, i, j = np.ogrid[:2, :40, :70]
    aux = flags.get("aux", ())
    truth = {}
    if "mask_mod" in flags:
        truth["mask"] = np.broadcast_to(flags["mask_mod"](0, h, i, j, aux), (2, 40, 70))
    if "score_mod" in flags:
        truth["change"] = lambda s: flags["score_mod"](s, 0, h, i, j, aux)
    assert_call(general, *inputs(general, *SIZES), truth=truth, **flags)
