"""Gradients on the emulated device, through attention_backward(), against the oracle."""

from __future__ import annotations

import re
from dataclasses import replace

import gradient_oracle
import numpy as np
import oracle
import pytest
from cuda_assembled import assemble, need_assembler
from cuda_emulated import inputs, need_numba_cuda
from emulated_gpu import emulated_gpu
from ptx_text import EmulationError

import fastattn
from fastattn.cuda import choice, compile
from fastattn.cuda.tensor.gradient_tilings import GradientTiling, gradient_tiling
from fastattn.problem import Problem, Variant

need_numba_cuda()
SMALL = GradientTiling("float16", 64, block_n=16, block_m=32, warps=2)


def small_tiling(problem, **arguments):
    """What gradient_tiling() says, in small blocks."""
    tiling, _ = gradient_tiling(problem, **arguments)
    return replace(tiling, block_m=SMALL.block_m, block_n=SMALL.block_n, warps=SMALL.warps), ""


def gradients_of(dout, q, k, v, out, lse, choose=small_tiling, **flags):
    with emulated_gpu(gradient_tiling=choose):
        found = fastattn.attention_backward(dout, q, k, v, out, lse, **flags, backend="cuda")
    return dict(zip(("dq", "dk", "dv"), found, strict=True))


CALLS = {
    "dense": ((1, 2, 2, 50, 70), {}),
    "causal, grouped heads": ((1, 4, 2, 50, 70), {"causal": True}),
    "causal, rows without keys": ((1, 1, 1, 70, 40), {"causal": True}),
    "window, scale below 0": ((1, 1, 1, 70, 90), {"window": (20, 10), "scale": -0.2}),
    "scale 0": ((1, 1, 1, 40, 40), {"scale": 0.0}),
    "lengths": (
        (2, 2, 1, 50, 60),
        {"q_len": np.array([50, 20]), "kv_len": np.array([60, 33]), "kv_start": np.array([0, 5])},
    ),
    "sinks": ((1, 2, 1, 40, 50), {"sinks": np.array([0.5, 1.0], np.float32)}),
}


@pytest.mark.parametrize("name", CALLS)
def test_gradients(name):
    sizes, flags = CALLS[name]
    assert_gradients(SMALL, sizes, **flags)


def test_gradient_of_lse():
    dlse = np.random.default_rng(4).standard_normal((1, 2, 50)).astype(np.float32)
    assert_gradients(SMALL, (1, 2, 1, 50, 50), dlse=dlse)


def test_few_columns_at_odd_places():
    """Rows that are no whole chunks, of bfloat16."""
    assert_gradients(replace(SMALL, storage="bfloat16"), (1, 1, 1, 40, 40), (33, 17), causal=True)


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", [64, 96, 128])
def test_blocks_as_problems_get_them(head_dim):
    sizes, widths = (1, 2, 1, 100, 140), (head_dim, head_dim)
    assert_gradients(SMALL, sizes, widths, choose=gradient_tiling, causal=True)


@pytest.mark.parametrize("place", ["q", "dout", "k", "v"])
def test_what_is_not_seen_adds_nothing(place):
    """A NaN makes NaN of what its row or key is seen by, and of nothing else."""
    assert_gradients(SMALL, (1, 1, 1, 70, 70), window=(10, 0), poison=place)


def assert_gradients(tiling, sizes, widths=(64, 64), poison="", choose=small_tiling, **flags):
    arrays = dict(zip("qkv", inputs(tiling, *sizes, *widths), strict=True))
    q, k, v = arrays.values()
    dout = np.random.default_rng(3).standard_normal((*q.shape[:-1], v.shape[-1])).astype(q.dtype)
    if "q_len" in flags:
        for b, rows in enumerate(flags["q_len"]):
            dout[b, :, rows:] = 0
    if poison:
        arrays |= {"dout": dout}
        arrays[poison][..., 45, 7] = np.nan
    forward = {name: value for name, value in flags.items() if name != "dlse"}
    out, lse = fastattn.attention(q, k, v, return_lse=True, backend="numpy", **forward)
    found = gradients_of(dout, q, k, v, out, lse, choose, **flags)
    if poison:  # the oracle multiplies what is hidden by 0
        exact = fastattn.attention_backward(dout, q, k, v, out, lse, **flags, backend="numpy")
        exact = dict(zip(found, exact, strict=True))
    else:
        exact, _ = gradient_oracle.judge(dout, q, k, v, orders=1, **flags)
    for name, array in found.items():
        assert array.dtype == q.dtype
        array, truth = array.astype(np.float64), exact[name].astype(np.float64)
        # p and ds are rounded to the type of the inputs, as out was, whose products delta sums.
        allowed = 3 * oracle.EPS[tiling.storage] * max(1, np.nanmax(np.abs(truth)))
        np.testing.assert_allclose(array, truth, rtol=0, atol=allowed, err_msg=name)


# What orders copies and threads; bar.red does as well, and its result is missed at once.
ORDER = r"bar\.(warp\.)?sync [^;]*;|cp\.async\.(wait|commit)_group[^;]*;"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gradient_q", "gradient_kv"])
def test_all_that_orders_is_needed(name, monkeypatch):
    """A barrier, a wait or a commit that is missing is noticed, each of them."""
    translate, dropped = compile.code, None

    def code(key, build):
        found = translate(key, build)
        if key[0] != name or dropped is None:
            return found
        start, stop = dropped.span()
        return found._replace(ptx=found.ptx[:start] + ";" + found.ptx[stop:])

    monkeypatch.setattr(compile, "code", code)
    q, k, v = inputs(SMALL, 1, 2, 1, 90, 100, 64, 64)
    dout, flags = inputs(SMALL, 1, 2, 1, 90, 90, 64, 64)[0], {"causal": True, "scale": -0.125}
    for array in (k, q):
        array[0, 0, 60, 3] = np.nan
    out, lse = fastattn.attention(q, k, v, return_lse=True, backend="numpy", **flags)
    right = gradients_of(dout, q, k, v, out, lse, **flags)
    key = name, SMALL
    for dropped in re.finditer(ORDER, translate(key, choice.builder(key)).ptx):
        try:
            wrong = gradients_of(dout, q, k, v, out, lse, **flags)
        except EmulationError:
            continue
        same = all(np.array_equal(wrong[n], right[n], equal_nan=True) for n in right)
        assert not same, f"nobody notices: {dropped[0]}, {dropped.start()}"


@pytest.mark.slow
@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100", "sm_120"])
@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 120])  # the last is padded
def test_code(head_dim, strided, target):
    """Nothing is spilled; with the products of p and ds there are three and four."""
    need_assembler()
    variant = Variant("float32", "bfloat16")
    problem = Problem(variant, 1, 1, 1, 500, 500, head_dim, head_dim, 0.1, 0, None, None)
    tiling, _ = gradient_tiling(problem, options=False, strided=strided, shared_limit=99 << 10)
    for name, products in (("gradient_q", 3), ("gradient_kv", 4)):
        key = name, tiling
        found = assemble(compile.code(key, choice.builder(key)).ptx, target)
        assert found.spilled == 0
        # 16 rows of a warp and 8 of a step, 16 deep
        assert found.loop["HMMA"] == products * tiling.block_n // 8 * tiling.head_dim // 16
