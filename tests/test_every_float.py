"""Functions of one float32 on every float32 there is: four billion, in parts."""

from __future__ import annotations

import numpy as np
import pytest
from kernels import machines, numpy_dtype
from modifier_kernel import traced
from test_modifier_words import _check_elementary
from test_simd import EXP2_ERROR, evaluate
from test_storage import assert_same, converted

from fastattn import mods

pytest.importorskip("numba")
pytestmark = [
    pytest.mark.slow,
    # ml_dtypes raises the flag for NaN, whatever is asked.
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
]
PARTS, CHUNK = 16, 1 << 22
in_parts = pytest.mark.parametrize("part", range(PARTS))
(HOST,) = machines()[:1] or (None,)
LARGEST_EXP2 = 8.0  # scores have their maximum taken off: no larger argument comes


def chunks(part):
    """The float32 of one part of all bit patterns, some at a time."""
    size = (1 << 32) // PARTS
    for start in range(part * size, (part + 1) * size, CHUNK):
        yield np.arange(start, start + CHUNK, dtype=np.uint64).astype(np.uint32).view(np.float32)


@in_parts
@pytest.mark.parametrize("storage", ["float16", "bfloat16"])
def test_every_float_rounds_to_the_nearest_half(part, storage):
    dtype = numpy_dtype(storage)
    for x in chunks(part):
        with np.errstate(over="ignore"):
            expected = x.astype(dtype)
        assert_same(converted(HOST, x, dtype, True), expected)


@in_parts
def test_exp2_of_every_float(part):
    for x in chunks(part):
        x = x[~(x > LARGEST_EXP2)]
        if not x.size:
            continue
        found = evaluate(HOST, 23, x)
        np.testing.assert_array_equal(np.isnan(found), np.isnan(x))
        low = x < -126  # whose result is subnormal: 0, or the smallest normal
        assert not ((found[low] < 0) | (found[low] > np.finfo(np.float32).tiny)).any()
        x, found = x[x >= -126].astype(np.float64), found[x >= -126]
        error = np.abs(found - np.exp2(x))
        unit = np.exp2(np.floor(x)) * np.finfo(np.float32).eps
        assert (error <= EXP2_ERROR["float32"] * unit).all()


@in_parts
def test_tanh_of_every_float(part):
    modifier, _ = traced(lambda s, b, h, i, j, aux: mods.tanh(s), "score_mod", ())
    for x in chunks(part):
        _check_elementary("tanh", modifier, x, 2.6, np.float64)
