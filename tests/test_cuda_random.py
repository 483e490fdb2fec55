"""Dropout's random numbers in CUDA kernels are those of dropout.py, to the last bit."""

from __future__ import annotations

import numpy as np
import pytest
import simulated_words as words

from fastattn import dropout

pytest.importorskip("numba")


@pytest.fixture(autouse=True)
def wraps_silently():
    with np.errstate(over="ignore"):
        yield


def test_keys():
    from fastattn.cuda.random import chained

    keys = np.random.default_rng(0).integers(0, 2**64, 50, np.uint64)
    one = chained(words)
    assert [one(key, i) for i, key in enumerate(keys)] == dropout.chained(
        keys, np.arange(50)
    ).tolist()


def test_numbers(rng):
    from fastattn.cuda.random import kept

    is_kept = kept(words)
    for key, j in zip(
        rng.integers(0, 2**64, 20, np.uint64), rng.integers(0, 2**20, 20), strict=True
    ):
        low, high = 0, 2**32 - 1  # the number is the largest threshold that keeps it
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if is_kept(key, j, middle) else (low, middle - 1)
        assert dropout.kept(key[None], j[None], low / 2**32)[0, 0]
        assert not dropout.kept(key[None], j[None], (low + 1) / 2**32)[0, 0]
