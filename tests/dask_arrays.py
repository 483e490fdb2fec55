"""dask arrays in any chunks, and what calls on them come to."""

from __future__ import annotations

import pytest

pytest.importorskip("dask.array")

import dask
import dask.array as da
import numpy as np


def split(size, rng, most=3):
    """Return a few chunk sizes along an axis."""
    edges = rng.integers(0, size + 1, rng.integers(0, most)) if size else []
    return tuple(np.diff([0, *sorted({*edges} - {0, size}), size]).tolist())


def chunked(array, rng, most=3):
    """Return an array as a dask array, cut at random along each of its axes."""
    return da.from_array(array, chunks=tuple(split(size, rng, most) for size in array.shape))


def computed(*arrays, scheduler="synchronous"):
    """Return NumPy arrays, after a look at what dask knew of them before."""
    found = dask.compute(*arrays, scheduler=scheduler)
    for lazy, array in zip(arrays, found, strict=True):
        assert lazy.dtype == array.dtype
        assert lazy.shape == array.shape
        assert type(lazy._meta) is np.ndarray
    return found


def tasks(array, step):
    """Return how many tasks of a step its graph has."""
    return sum(key[0].startswith(step) for key in array.dask if isinstance(key, tuple))
