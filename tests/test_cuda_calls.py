"""Calls with backend="cuda" on the emulated device: what the tensor-core kernels take besides."""

from __future__ import annotations

import numpy as np
import pytest
from cuda_emulated import need_numba_cuda
from emulated_gpu import emulated_gpu

import fastattn
from fastattn import mods
from fastattn.cuda.tensor import tilings

need_numba_cuda()
RNG = np.random.default_rng(0)


def normal(*shape):
    return RNG.standard_normal(shape).astype(np.float16)


def assert_on_tensor_cores(monkeypatch, *arrays, small=True, function=fastattn.attention, **flags):
    """Fail unless the emulated device gives what NumPy does in float32, but for rounding.

    small: with few rows and keys in a block, so that there are several.
    """
    if small:
        monkeypatch.setattr(tilings, "_shapes", lambda *_: [(2, 32, 32)])
    exact, lse = function(*arrays, return_lse=True, backend="numpy", **flags)
    with emulated_gpu():
        plan = fastattn.explain(*arrays, backend="cuda", **flags) if small else None
        found = function(*arrays, return_lse=True, backend="cuda", **flags)
    assert plan is None or plan.choice.name == "forward"
    # Probabilities and results are rounded to 11 bits: of sums of at most 30.
    np.testing.assert_allclose(found[0].astype(np.float32), exact, rtol=2e-3, atol=2e-2)
    np.testing.assert_allclose(found[1], lse, rtol=1e-5, atol=1e-5)
    assert np.nanmean(np.abs(found[0].astype(np.float32) - exact)) < 5e-4


def test_dropout(monkeypatch):
    """The same elements as on the CPU."""
    q, k, v = normal(1, 2, 40, 64), normal(1, 2, 70, 64), normal(1, 2, 70, 64)
    flags = {"dropout_p": 0.4, "dropout_seed": 7, "causal": True}
    assert_on_tensor_cores(monkeypatch, q, k, v, **flags)


@pytest.mark.slow
def test_block_masks(monkeypatch):
    """Blocks of the mask are smaller and larger than those of the kernel, and some are skipped."""
    q, k, v = normal(1, 2, 70, 64), normal(1, 2, 150, 64), normal(1, 2, 150, 64)
    near = mods.sliding_window(12, 12)
    for sizes in ((16, 24), (128, 48)):
        blocks = fastattn.create_block_mask(near, 1, 2, 70, 150, block=sizes)
        assert_on_tensor_cores(monkeypatch, q, k, v, block_mask=blocks)


def pages(count, size, width):
    """(k, v, table) of two entries, pages in any order; entries without a key are wrong."""
    k, v = normal(count, 2, size, width), normal(count, 2, size, width)
    table = RNG.permutation(count)[: 2 * (count // 2)].reshape(2, -1)
    return k, v, table


@pytest.mark.parametrize("queries", [1, pytest.param(40, marks=pytest.mark.slow)])
def test_keys_on_pages(monkeypatch, queries):
    k, v, table = pages(22, 9, 64)
    q = normal(2, 4, queries, 64)
    flags = {"block_table": table, "kv_len": [90, 41], "kv_start": [4, 0], "causal": True}
    v[table[1, 3], 0, 2] = np.nan  # key 29 of entry 1
    with np.errstate(invalid="ignore"):
        assert_on_tensor_cores(monkeypatch, q, k, v, small=queries > 1, **flags)
