"""Arrays of any strides, order, byte order and alignment."""

from __future__ import annotations

import mmap

import numpy as np
import pytest
from calls import attend
from cases import Case

import fastattn

DTYPES = ["float32", "float64"]

# --- views --------------------------------------------------------------------------------------


def unaligned(a):
    raw = np.zeros(a.nbytes + 1, np.uint8)
    view = raw[1:].view(a.dtype).reshape(a.shape)
    view[...] = a
    return view


def in_struct(a):
    record = np.zeros(a.shape, [("a", a.dtype), ("pad", "u1")])
    record["a"] = a
    return record["a"]


def read_only(a):
    a = a.copy()
    a.setflags(write=False)
    return a


VIEWS = {
    "fortran": np.asfortranarray,
    "heads last": lambda a: np.ascontiguousarray(a.swapaxes(-3, -2)).swapaxes(-3, -2),
    "transposed": lambda a: np.ascontiguousarray(a.swapaxes(-1, -2)).swapaxes(-1, -2),
    "every second": lambda a: np.repeat(a, 2, axis=-1)[..., ::2],
    "every third row": lambda a: np.repeat(a, 3, axis=-2)[..., ::3, :],
    "reversed columns": lambda a: np.ascontiguousarray(a[..., ::-1])[..., ::-1],
    "reversed rows": lambda a: np.ascontiguousarray(a[..., ::-1, :])[..., ::-1, :],
    "reversed all": lambda a: np.ascontiguousarray(a[::-1, ::-1, ::-1, ::-1])[
        ::-1, ::-1, ::-1, ::-1
    ],
    "read-only": read_only,
    "byte-swapped": lambda a: a.astype(a.dtype.newbyteorder()),
    "unaligned": unaligned,
    "in a struct": in_struct,
}


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seqlen_q", [1, 35])
def test_views_give_the_same_bits(view, dtype, seqlen_q, backend):
    case = Case(
        "view",
        seqlen_q,
        70,
        20,
        12,
        batch=2,
        heads_q=4,
        heads_kv=2,
        dtype=dtype,
        mask="hqk",
        bias="qk",
    )
    arrays, flags = case.arrays(), case.flags()
    expected = attend(backend, *arrays, **flags)
    q, k, v = (VIEWS[view](a) for a in arrays)
    np.testing.assert_array_equal(q, arrays[0])
    if view == "read-only":
        flags |= {name: read_only(flags[name]) for name in ("mask", "bias")}
    before = [a.copy() for a in (q, k, v)]
    out = np.full(expected[0].shape, np.nan, dtype)
    result, lse = fastattn.attention(q, k, v, **flags, return_lse=True, out=out, backend=backend)
    assert result.dtype == lse.dtype == dtype
    np.testing.assert_array_equal(result, expected[0])
    np.testing.assert_array_equal(lse, expected[1])
    for a, b in zip((q, k, v), before, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("view", ["fortran", "heads last", "every second", "reversed all"])
def test_out_of_any_strides(view, backend):
    q, k, v = Case("out", 35, 70, 20, 12, batch=2, causal=True).arrays()
    expected, _ = attend(backend, q, k, v)
    out = VIEWS[view](np.full(expected.shape, np.nan, np.float32))
    assert fastattn.attention(q, k, v, out=out, backend=backend) is out
    np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize("axes", ["qk", "b11k", "hqk"])
def test_mask_and_bias_of_any_strides(axes, backend):
    case = Case("strides", 35, 70, 20, batch=2, heads_q=4, mask=axes, bias=axes)
    flags = case.flags()
    expected, _ = attend(backend, *case.arrays(), **flags)
    for view in (lambda a: a.T.copy().T, lambda a: a[..., ::-1].copy()[..., ::-1]):
        strided = {name: view(flags[name]) for name in ("mask", "bias")}
        out, _ = attend(backend, *case.arrays(), **flags | strided)
        np.testing.assert_array_equal(out, expected)


def test_zero_strides(backend, rng):
    q = rng.standard_normal((3, 4, 9, 8), dtype=np.float32)
    one = rng.standard_normal((1, 1, 1, 8), dtype=np.float32)
    k = rng.standard_normal((1, 4, 33, 8), dtype=np.float32)
    for shared in (k, np.broadcast_to(k, (3, 4, 33, 8)), np.broadcast_to(one, (3, 4, 33, 8))):
        full = np.ascontiguousarray(np.broadcast_to(shared, (3, 4, 33, 8)))
        expected, _ = attend(backend, q, full, full, causal=True)
        out, _ = attend(backend, q, shared, shared, causal=True)
        np.testing.assert_array_equal(out, expected)
    flat = np.broadcast_to(np.float32(0.5), (3, 4, 9, 8))
    np.testing.assert_array_equal(fastattn.attention(flat, flat, flat, backend=backend), flat)


@pytest.mark.skipif(not hasattr(mmap, "MAP_PRIVATE"), reason="memory is not lent by the page here")
def test_heads_further_apart_than_32_bits_count(backend, rng):
    """Elements are addressed in 64 bits. Only the pages that hold keys take memory."""
    shape, apart = (1, 2, 70, 8), 2**31 + 16
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
    try:
        room = mmap.mmap(-1, 4 * (apart + 70 * 8), flags=flags)
    except OSError as error:
        pytest.skip(f"no 8 GiB of addresses: {error}")
    k = np.lib.stride_tricks.as_strided(
        np.frombuffer(room, np.float32), shape, (0, 4 * apart, 32, 4), writeable=True
    )
    k[...] = rng.standard_normal(shape)
    q = rng.standard_normal((1, 2, 33, 8), dtype=np.float32)
    expected, _ = attend(backend, q, k.copy(), k.copy())
    out, _ = attend(backend, q, k, k)
    np.testing.assert_array_equal(out, expected)
