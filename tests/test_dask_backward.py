"""attention_backward() on dask arrays: the gradients of one call, whatever the chunks."""

from __future__ import annotations

import numpy as np
import pytest
from cases import CASES, Case
from dask_arrays import chunked, computed, covering, da, tasks

import fastattn
import fastattn.dask as lazy
from fastattn import mods

OTHERS = ("bias", "sinks", "alibi")
WIDE = ("float32", "float64")
FEW = covering([case for case in CASES if case.seqlen_k <= 150 and case.dtype in WIDE])


def compare(arrays, flags, rng, backend, most=3, least=0, rtol=1e-4, atol=1e-5):
    """Hold all gradients, in chunks at random, against those of one call."""
    out, lse = fastattn.attention(*arrays, **_forward(flags), return_lse=True, backend=backend)
    dout = rng.standard_normal(out.shape).astype(out.dtype)
    dlse = rng.standard_normal(lse.shape).astype(lse.dtype)
    wanted = {f"return_d{name}": True for name in OTHERS if name in flags}
    more = {"backend": backend, **flags, **wanted}
    expected = fastattn.attention_backward(dout, *arrays, out, lse, dlse=dlse, **more)
    whole = [chunked(a, rng, most, least) for a in (dout, *arrays, out, lse, dlse)]
    found = lazy.attention_backward(*whole[:-1], dlse=whole[-1], **more)
    for ours, theirs in zip(computed(*found), expected, strict=True):
        assert ours.dtype == theirs.dtype
        scale = np.abs(theirs).max(initial=1)
        # As float64: NumPy before 2.0 does not compare bfloat16.
        wide = (a.astype(np.float64) for a in (ours, theirs))
        np.testing.assert_allclose(*wide, rtol=rtol, atol=float(atol * scale))


def _forward(flags):
    return {name: value for name, value in flags.items() if name != "score_mod_grad"}


@pytest.mark.parametrize("case", FEW, ids=str)
def test_gradients_are_those_of_one_call(case):
    rng = np.random.default_rng(case.seqlen_q * 1000 + case.seqlen_k)
    compare(case.arrays(), case.flags(), rng, "auto", most=4, least=2)


ALL = Case("all", 40, 50, batch=6, heads_q=4, heads_kv=2, sinks=True, dropout_p=0.3)
SHARED = {
    "causal": {"causal": True, "align": np.array([[-60, 3, 0], [10, 20, -5]])},
    "chunk": {"chunk": 7, "kv_start": np.array([[0, 3, 9], [40, 50, 0]])},
    "bias": {"bias": np.random.default_rng(1).standard_normal((3, 1, 40, 1))},
    "alibi": {"alibi": np.random.default_rng(1).random((2, 1, 4)), "window": (9, 4)},
}


@pytest.mark.parametrize("name", SHARED)
def test_what_serves_several_blocks_has_their_sum(name, backend, rng):
    q, k, v = (a.reshape(2, 3, *a.shape[1:]) for a in ALL.arrays())
    compare((q, k[:, :1], v[0]), ALL.flags() | SHARED[name], rng, backend, 4)


def test_score_mod_and_its_slope(rng):
    flags = {
        "score_mod": lambda s, b, h, i, j, aux: s * aux[0][b, j] + mods.abs(i - j) * (h + 1) * 0.1,
        "mask_mod": lambda b, h, i, j, aux: (i + j + h + b) % 5 != 0,
        "aux": (rng.standard_normal((2, 50)),),
    }
    arrays = Case("mod", 40, 50, batch=2, heads_q=4, heads_kv=1).arrays()
    compare(arrays, flags, rng, "numpy", 4)
    one = {"score_mod_grad": lambda s, b, h, i, j, aux: 1.0}  # the caller's word counts
    compare(arrays, flags | one, rng, "numpy", 4)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_halves(dtype, backend, rng):
    case = Case("half", 30, 70, heads_q=2, dtype=dtype, bias="qk", sinks=True)
    compare(case.arrays(), case.flags(), rng, backend, 4, rtol=2e-2, atol=1e-2)


def test_rank_2_and_no_keys(backend, rng):
    q, k = rng.standard_normal((20, 8)), rng.standard_normal((30, 8))
    compare((q, k, k), {"causal": True}, rng, backend)
    compare((q, k[:0], k[:0]), {"sinks": np.ones(1)}, rng, backend)


def test_pairs_that_nothing_sees_make_no_task():
    q = da.zeros((2, 80, 8), chunks=(1, 10, 8))
    out, lse = lazy.attention(q, q, q, causal=True, return_lse=True)
    dq, dk, _ = lazy.attention_backward(out, q, q, q, out, lse, causal=True)
    assert tasks(dq, "attention-backward-part") == 2 * (8 * 9 // 2)
    assert tasks(dk, "attention-backward-dk-sum") == 2 * (7 * 8 // 2)
    assert dk.chunks == q.chunks


def test_bad_arguments():
    q = da.zeros((2, 80, 8), chunks=(1, 10, 8))
    out, lse = lazy.attention(q, q, q, return_lse=True)
    with pytest.raises(ValueError, match="bias must be given with return_dbias=True, got None"):
        lazy.attention_backward(out, q, q, q, out, lse, return_dbias=True)
    with pytest.raises(ValueError, match=r"lse must have shape \(2, 80\), got \(2, 79\)"):
        lazy.attention_backward(out, q, q, q, out, lse[:, 1:])
    with pytest.raises(TypeError, match="dout must be a dask array, got ndarray"):
        lazy.attention_backward(np.zeros((2, 80, 8)), q, q, q, out, lse)
