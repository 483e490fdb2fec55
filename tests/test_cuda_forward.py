"""The tensor-core forward kernel's PTX on the emulated device, against the oracle."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from cuda_emulated import assert_call, inputs, need_numba_cuda

from fastattn.cuda.tensor import tilings
from fastattn.cuda.tensor.tilings import Tiling

need_numba_cuda()
SMALL = Tiling("float16", 64, 64, warps=4, block_m=128, block_n=64)
LARGE = Tiling("bfloat16", 128, 128, warps=4, block_m=128, block_n=64)


def tiling(storage, head_dim, warps, block_m, block_n, **flags):
    return Tiling(storage, head_dim, head_dim, warps, block_m, block_n, **flags)


# (queries, keys, flags): one block and several, whole ones and remainders, rows that see nothing
CALLS = {
    "dense": (150, 200, {}),
    "causal": (150, 210, {"causal": True}),
    "causal, rows without keys": (140, 40, {"causal": True}),
    "top left": (70, 150, {"causal": True, "align": "top_left"}),
    "window": (150, 210, {"window": (40, 10)}),
    "window left of the keys": (40, 100, {"window": (3, None), "align": 200}),
    "scale below 0": (70, 90, {"scale": -0.3}),
    "scale 0": (70, 90, {"scale": 0.0}),
    "sinks": (70, 90, {"sinks": np.array([0.5, -3.0], np.float32)}),
    "sinks, rows without keys": (
        70,
        30,
        {"sinks": np.array([0.3, -np.inf], np.float32), "causal": True},
    ),
}


@pytest.fixture(params=["float16", pytest.param("float32", marks=pytest.mark.slow)])
def small(request):
    return Tiling(request.param, 64, 64, warps=4, block_m=128, block_n=64)


@pytest.mark.parametrize("name", CALLS)
def test_out_and_lse(name, small):
    seqlen_q, seqlen_k, flags = CALLS[name]
    assert_call(small, *inputs(small, 1, 2, 1, seqlen_q, seqlen_k), **flags)


def test_lengths_of_each_batch_entry(small):
    lengths = {
        "q_len": np.array([70, 30, 0]),
        "kv_len": np.array([80, 60, 50]),
        "kv_start": np.array([3, 10, 50]),
    }
    assert_call(small, *inputs(small, 3, 2, 2, 70, 90), **lengths, causal=True)


def test_what_is_hidden_may_be_anything():
    """NaN and infinities in k and v: rows that see them, and no others, have them."""
    small = tiling("float16", 64, 2, 32, 32)
    q, k, v = inputs(small, 1, 1, 1, 40, 50)
    k[0, 0, 40], k[0, 0, 45, 3] = np.nan, np.inf
    for key, column, value in ((12, 5, np.nan), (20, 6, np.inf), (33, 6, -np.inf)):
        v[0, 0, key, column] = value
    v[0, 0, 48] = np.nan
    assert_call(small, q, k, v, causal=True)
    # past the last key
    assert_call(small, q[:, :, :20], k, v, kv_len=np.array([12]))


@pytest.mark.slow
def test_head_dim_128():
    assert_call(LARGE, *inputs(LARGE, 1, 2, 1, 150, 210), causal=True)


def one_query(storage):
    shape = tilings.PACKED_OF_FLOAT32[128] if storage == "float32" else tilings.PACKED
    return Tiling(storage, 128, 128, *shape, packed=True)


def test_one_query_of_grouped_heads(small):
    """All heads of a group at once: more and fewer than a block has rows."""
    tiling = one_query(small.storage)
    assert_call(tiling, *inputs(tiling, 2, 6, 2, 1, 150), causal=True)
    sinks = np.linspace(-2, 2, 40).astype(np.float32)
    lengths = {"kv_len": np.array([70, 130]), "kv_start": np.array([0, 9])}
    assert_call(tiling, *inputs(tiling, 2, 40, 2, 1, 130), **lengths, sinks=sinks, window=(50, 0))


@pytest.mark.parametrize("queries", [1, 40])
def test_parts_of_the_keys(queries, small):
    tiling = one_query(small.storage) if queries == 1 else small
    assert_call(tiling, *inputs(tiling, 2, 4, 2, queries, 200), split_n=64, window=(170, 0))


def test_any_strides(small):
    """Elements one by one: rows that are no whole chunks, columns apart, negative strides."""
    strided = replace(small, padded=True, strided=True)
    q, k, v = inputs(strided, 1, 2, 1, 70, 90, head_dim=37, head_dim_v=41)
    k = k[:, :, ::-1]
    v = np.asfortranarray(v)
    assert_call(strided, q, k, v, causal=True)


SHAPES = [
    tiling("bfloat16", 64, 4, 128, 64),
    tiling("bfloat16", 96, 4, 128, 64),
    tiling("float16", 96, 4, 64, 64),
    tiling("float16", 128, 4, 64, 64),
    tiling("bfloat16", 192, 8, 128, 64),
    tiling("float16", 192, 4, 64, 32),
    tiling("bfloat16", 256, 8, 128, 64),
    tiling("float16", 256, 4, 64, 64),
    tiling("bfloat16", 256, 4, 64, 32),
    Tiling("bfloat16", 64, 128, 4, 128, 64),
    Tiling("float16", 192, 128, 4, 64, 64),
    *(tiling("float32", d, *s) for d, some in tilings.SHAPES_OF_FLOAT32.items() for s in some),
    *(tiling("float32", d, *s, packed=True) for d, s in tilings.PACKED_OF_FLOAT32.items()),
    Tiling("float32", 64, 128, 4, 128, 32),
    Tiling("float32", 192, 128, 8, 128, 32),
    tiling("float32", 96, 4, 64, 32, padded=True),
    tiling("float32", 256, 2, 32, 16, padded=True),
    tiling("float32", 128, 4, 64, 32, padded=True, strided=True),
    tiling("bfloat16", 64, 4, 128, 64, padded=True),
    tiling("bfloat16", 128, 4, 64, 64, padded=True, strided=True),
]


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes(shape):
    narrower = 11 if shape.strided else 24 if shape.padded else 0
    sizes = {"head_dim": shape.head_dim - narrower, "head_dim_v": shape.head_dim_v - narrower}
    rows, more = (1, 1) if shape.packed else (150, 65)
    assert_call(shape, *inputs(shape, 2, 2, 1, rows, 170, **sizes), causal=True)
    assert_call(shape, *inputs(shape, 1, 3, 3, more, 33, **sizes))


@pytest.mark.slow
@pytest.mark.parametrize("storage", ["bfloat16", "float32"])
def test_no_access_waits_for_a_bank(storage):
    large = replace(LARGE, storage=storage)
    counts = assert_call(large, *inputs(large, 1, 1, 1, 128, 128)).shared.wavefronts
    assert set(counts) == {"cp", "ldmatrix", "st", "ld"}
    assert all(needed == least for needed, least in counts.values()), counts
