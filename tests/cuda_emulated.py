"""Calls of attention() on an emulated device: a kernel's PTX, run on the operands of check()."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import oracle
import pytest
from ptx_launch import launch
from ptx_memory import GlobalMemory

import fastattn.cuda.compile
from fastattn.check import check
from fastattn.cuda.choice import builder
from fastattn.cuda.maps import maps_of
from fastattn.cuda.packing import job_of


class Device:
    """Arrays of this process on the emulated device, and back."""

    def __init__(self, *written: np.ndarray | None):
        """written: those that kernels write."""
        self.memory = GlobalMemory()
        self._written = [array for array in written if array is not None]
        self._places: list[tuple[int, int, int]] = []

    def address(self, array: np.ndarray) -> int:
        """Of the first element of a copy of it, in the same strides and alignment to 16 bytes."""
        low, high = np.lib.array_utils.byte_bounds(array)
        content = np.frombuffer((ctypes.c_char * (high - low)).from_address(low), np.uint8)
        place = self.memory.put(content, low % 16)
        if any(np.shares_memory(array, other) for other in self._written):
            self._places.append((place, low, high - low))
        return place + array.__array_interface__["data"][0] - low

    def fetch(self):
        """Write back what kernels have written."""
        for place, low, nbytes in self._places:
            content = self.memory.get(place, np.empty(nbytes, np.uint8))
            ctypes.memmove(low, content.ctypes.data, nbytes)


class Pieces(NamedTuple):
    """What job_of() needs to know of a choice."""

    m_blocks: int
    num_splits: int = 1
    split_n: int = 0


def forward(tiling, problem, operands, ptx=None):
    """Write operands.out and operands.lse; return the last thread block, for its counters."""
    device = Device(operands.out, operands.lse)
    job = job_of(problem, operands, Pieces(tiling.m_blocks(problem)), device.address)
    if tiling.specialised:
        places = (job.q, job.k, job.v)
        maps = zip(maps_of(operands, tiling), places, strict=True)
        job = (*job, *(tensor._replace(address=place) for tensor, place in maps))
    text = ptx or code(tiling)
    block = launch(text, device.memory, job, tiling.grid(problem), tiling.shared_bytes)
    device.fetch()
    return block


def forward_in_parts(tiling, problem, operands, split_n):
    """The same with the keys in parts, which are merged here."""
    splits = -(-problem.seqlen_k // split_n)
    rows = problem.batch * problem.heads_q * problem.seqlen_q
    width = problem.head_dim_v
    partial = np.full(rows * splits * (width + 2), np.nan, np.float32)
    device = Device(partial)
    job = job_of(
        problem,
        operands,
        Pieces(tiling.m_blocks(problem), splits, split_n),
        device.address,
        device.address(partial),
    )
    grid = tiling.grid(problem) * splits
    launch(code(tiling), device.memory, job, grid, tiling.shared_bytes)
    device.fetch()
    outs, states = np.split(partial.astype(np.float64), [rows * splits * width])
    reference, total = np.moveaxis(states.reshape(rows, splits, 2), 2, 0)
    top = reference.max(axis=1, keepdims=True)
    weight = np.exp(reference - np.where(np.isinf(top), 0, top))
    both = (weight * total).sum(axis=1)
    out = (weight[..., None] * outs.reshape(rows, splits, width)).sum(axis=1) / both[:, None]
    operands.out[...] = out.reshape(operands.out.shape)
    operands.lse[...] = (top[:, 0] + np.log(both)).reshape(operands.lse.shape)


def code(tiling) -> str:
    """The forward kernel's PTX."""
    key = ("warpgroups" if tiling.specialised else "forward", tiling)
    return fastattn.cuda.compile.code(key, builder(key)).ptx


def need_numba_cuda():
    """Skip the test module where kernels cannot be translated."""
    pytest.importorskip("ml_dtypes")
    problem = fastattn.cuda.compile.unavailable("")
    if problem:
        pytest.skip(problem, allow_module_level=True)


def inputs(tiling, batch, heads_q, heads_kv, seqlen_q, seqlen_k, head_dim=0, head_dim_v=0):
    """q, k and v, their heads beside each other as most models have them."""
    dtype = np.dtype("float32" if tiling.storage == "float32" else "float16")
    if tiling.storage == "bfloat16":
        from ml_dtypes import bfloat16 as dtype
    rng = np.random.default_rng(0)
    widths = head_dim or tiling.head_dim, head_dim_v or tiling.head_dim_v

    def array(heads, rows, width):
        return rng.standard_normal((batch, rows, heads, width)).astype(dtype).swapaxes(1, 2)

    return (
        array(heads_q, seqlen_q, widths[0]),
        array(heads_kv, seqlen_k, widths[0]),
        array(heads_kv, seqlen_k, widths[1]),
    )


def assert_call(tiling, q, k, v, truth=None, split_n=0, **flags):
    """Run a call, fail unless out and lse are as exact as they can be; return the last block.

    truth: flags for the oracle, where it takes others. split_n: keys of a part, if not all.
    """
    problem, operands = check(q, k, v, return_lse=True, **flags)
    modifiers = {name: getattr(problem.variant, name) for name in ("score_mod", "mask_mod")}
    tiling = replace(tiling, **modifiers)
    flags = flags if truth is None else truth
    operands.out[...], operands.lse[...] = np.nan, np.nan
    if operands.ranges is not None:  # another kernel writes the rows that are not there
        for b, rows in enumerate(operands.ranges[:, 0]):
            operands.out[b, :, rows:], operands.lse[b, :, rows:] = 0, -np.inf
    block = None
    if split_n:
        forward_in_parts(tiling, problem, operands, split_n)
    else:
        block = forward(tiling, problem, operands)
    if tiling.storage == "float32":
        # With factors as the kernel takes them, lse is as exact as ever.
        q, k, v = map(oracle.rounded_to_tf32, (q, k, v))
    exact, formula = oracle.judge(q, k, v, **flags)
    oracle.assert_within_budget(operands.lse, exact[1], formula[1], floor=8)
    assert_rounded_once(operands.out, exact[0], formula[0], q, k, v, flags)
    return block


def assert_rounded_once(out, exact, formula, q, k, v, flags):
    """Fail unless out errs by what rounding each probability and the result must bring, and twice
    what the formula errs in float32.

    A probability p of n errs by at most half a unit, so the result by eps / 2 * sum(p * |v|), or
    where p is too small for float16 to keep its bits, by its least number for each. Of float32,
    they are rounded to tf32, which has as many bits as float16, and results are not.
    """
    storage, spread = q.dtype.name, np.abs(np.nan_to_num(v.astype(np.float64), posinf=0))
    rounding = oracle.attention(q, k, spread, **flags)[0]
    out, finite = out.astype(np.float64), np.isfinite(exact)
    np.testing.assert_array_equal(out[~finite], exact[~finite])
    half = oracle.EPS["float16" if storage == "float32" else storage] / 2
    allowed = half * 1.01 * rounding + 2 * oracle.error_of(formula, exact)
    allowed += 0 if storage == "float32" else half * np.abs(exact)
    allowed += oracle.TINY[storage] * spread.sum(axis=-2).max() + 4 * oracle.EPS["float32"]
    excess = np.abs(out[finite] - exact[finite]) - allowed[finite]
    assert (excess <= 0).all(), f"{excess.max():.3g} more than is allowed"
