"""dask arrays in any chunks, and what calls on them come to."""

from __future__ import annotations

import os
import signal

import pytest

pytest.importorskip("dask.array")

import dask
import dask.array as da
import numpy as np

SIZES = {"name", "seqlen_q", "seqlen_k", "head_dim", "head_dim_v"}


class Trap:
    """An array of which reading the block from a row on kills the process that does it first."""

    def __init__(self, array, first, sprung):
        self.array, self.first, self.sprung = array, first, sprung
        self.shape, self.dtype, self.ndim = array.shape, array.dtype, array.ndim

    def __getitem__(self, at):
        if at[1].start == self.first and not os.path.exists(self.sprung):
            open(self.sprung, "x").close()
            os.kill(os.getpid(), signal.SIGKILL)
        return self.array[at]


def covering(cases):
    """Return cases in which every parameter has every value that it has in all of them."""

    def values(case):
        return {(name, str(value)) for name, value in vars(case).items() if name not in SIZES}

    missing, found = set().union(*map(values, cases)), []
    while missing:
        found.append(max(cases, key=lambda case: len(values(case) & missing)))
        missing -= values(found[-1])
    return found


def split(size, rng, most=3, least=0):
    """Return a few chunk sizes along an axis."""
    edges = rng.integers(0, size + 1, rng.integers(least, most)) if size else []
    return tuple(np.diff([0, *sorted({*edges} - {0, size}), size]).tolist())


def chunked(array, rng, most=3, least=0):
    """Return an array as a dask array, cut at random along each of its axes."""
    chunks = tuple(split(size, rng, most, least) for size in array.shape)
    return da.from_array(array, chunks=chunks)


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
