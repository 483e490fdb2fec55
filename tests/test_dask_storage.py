"""Files larger than what tasks hold of them: np.memmap, zarr and HDF5 through dask."""

from __future__ import annotations

import pickle
import tracemalloc

import numpy as np
import pytest
from dask_arrays import computed, da, dask, tasks

import fastattn
import fastattn.dask as lazy

F4 = np.float32
SHAPE, CHUNKS = (2, 600, 8), (1, 100, 8)


@pytest.fixture
def arrays(rng):
    return [rng.standard_normal(SHAPE).astype(F4) for _ in range(3)]


def memmapped(array, folder, n):
    path = folder / f"{n}.npy"
    np.save(path, array)
    return lazy.from_memmap(np.load(path, mmap_mode="r"), chunks=CHUNKS)


def in_zarr(array, folder, n):
    zarr = pytest.importorskip("zarr")
    form = {"shape": array.shape, "dtype": array.dtype, "chunks": CHUNKS}
    stored = zarr.open_array(str(folder / f"{n}.zarr"), mode="w", **form)
    stored[...] = array
    return da.from_array(stored, chunks=CHUNKS)


def in_hdf5(array, folder, n):
    h5py = pytest.importorskip("h5py")
    stored = h5py.File(folder / f"{n}.h5", "w").create_dataset("a", data=array, chunks=CHUNKS)
    return da.from_array(stored, chunks=CHUNKS)


def blocks_that_wait(out, *arrays):
    """Return the tasks of a graph that make blocks of these arrays, or of what they come from."""
    names = {key[0] for array in arrays for key in array.dask if isinstance(key, tuple)}
    optimized = dask.optimize(out)[0].dask
    return [key for key in optimized if isinstance(key, tuple) and key[0] in names]


STORES = [memmapped, in_zarr, in_hdf5]


@pytest.mark.parametrize("store", STORES)
def test_each_task_reads_its_own_keys(store, arrays, tmp_path):
    """So that no block of keys waits in memory for the last of the queries."""
    q = da.from_array(arrays[0], chunks=CHUNKS)
    k, v = (store(a, tmp_path, n).rechunk((1, 300, 8)) for n, a in enumerate(arrays[1:]))
    out = lazy.attention(q, k, v, causal=True)
    assert not blocks_that_wait(out, k, v)
    np.testing.assert_allclose(
        *computed(out), fastattn.attention(*arrays, causal=True), rtol=1e-5, atol=1e-6
    )


class Torn:
    """An array of which some rows cannot be read."""

    def __init__(self, array, first):
        self.array, self.first = array, first
        self.shape, self.dtype, self.ndim = array.shape, array.dtype, array.ndim

    def __getitem__(self, at):
        if at[1].start == self.first:
            raise OSError("bad sector")
        return self.array[at]


@pytest.mark.parametrize("name", ["q", "k", "v", "mask"])
def test_a_block_that_cannot_be_read_says_which(name, arrays):
    given = dict(zip("qkv", arrays, strict=True)) | {"mask": np.ones((2, 600, 600), bool)}
    stored = {n: da.from_array(Torn(a, -1), chunks=(1, 100, -1)) for n, a in given.items()}
    stored[name] = da.from_array(Torn(given[name], 300), chunks=(1, 100, -1))
    mask = stored["mask"].rechunk((1, 100, 100))
    q, k, v = (stored[n] for n in "qkv")
    index = r"\(\d, 3, \d\)" if name in ("q", "mask") else r"\(\d, \d, 3\)"
    match = rf"bad sector \[in block {index} of \(batch\.\.\., heads, rows, keys\)"
    out, lse = lazy.attention(q, k, v, mask=mask, return_lse=True)
    with pytest.raises(OSError, match=match):
        computed(out)
    gradients = lazy.attention_backward(q, q, k, v, da.zeros_like(q), da.zeros_like(lse), mask=mask)
    with pytest.raises(OSError, match=match):
        computed(*gradients)


def test_what_has_to_be_computed_is_computed_once(arrays):
    calls = []

    def project(block):
        calls.append(1)
        return block * 2

    q, k, v = (da.from_array(a, chunks=CHUNKS) for a in arrays)
    k = k.map_blocks(project, meta=np.empty((0, 0, 0), F4))
    out = computed(lazy.attention(q, k, v))[0]
    assert len(calls) == 12
    expected = fastattn.attention(arrays[0], arrays[1] * 2, arrays[2])
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-6)


def test_keys_in_another_order_and_dtype_are_read_too(arrays, tmp_path):
    """(seqlen, heads * dim) in float16 on disk."""
    stored = [a.swapaxes(0, 1).astype(np.float16).reshape(600, 16) for a in arrays]
    for n, a in enumerate(stored):
        np.save(tmp_path / f"{n}.npy", a)
    maps = [np.load(tmp_path / f"{n}.npy", mmap_mode="r") for n in range(3)]
    loaded = (lazy.from_memmap(a, (100, 16)).reshape(600, 2, 8) for a in maps)
    _, k, v = (a.swapaxes(0, 1).astype(F4) for a in loaded)
    whole = [a.reshape(600, 2, 8).swapaxes(0, 1).astype(F4) for a in stored]
    q = da.from_array(whole[0], chunks=CHUNKS)
    out = lazy.attention(q, k, v)
    assert not blocks_that_wait(out, k, v)
    np.testing.assert_allclose(*computed(out), fastattn.attention(*whole), rtol=1e-5, atol=1e-6)


def test_peak_memory_is_that_of_blocks(tmp_path):
    """Keys of 32 MiB; a block of them and of the values is 2 MiB, one of the queries 16 KiB."""
    k = np.lib.format.open_memmap(tmp_path / "k.npy", "w+", F4, (1, 1 << 17, 64))
    k[:, ::1000] = 1
    k.flush()
    keys = lazy.from_memmap(np.load(tmp_path / "k.npy", mmap_mode="r"), chunks=(1, 4096, 64))
    q = da.ones((1, 64, 64), chunks=(1, 64, 64), dtype=F4)
    out = lazy.attention(q, keys, keys, backend="numpy")
    assert tasks(out, "attention-part") == 32  # as short as can be: there is one chunk of queries
    tracemalloc.start()
    computed(out)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 10 << 20


def test_from_memmap_is_the_array(tmp_path, rng):
    array = rng.standard_normal((7, 9, 3))
    for order in "CF":
        path = tmp_path / f"{order}.npy"
        np.save(path, np.asarray(array, order=order))
        mapped = np.load(path, mmap_mode="r")
        found = lazy.from_memmap(mapped, chunks=(2, -1, 2))
        np.testing.assert_array_equal(*computed(found), array)
        assert found.name == lazy.from_memmap(mapped, chunks=(2, -1, 2)).name
        assert len(pickle.dumps(dict(found.dask))) < 10_000  # the tasks, not the numbers
    raw = np.memmap(tmp_path / "raw", np.int16, "w+", offset=6, shape=(5,))
    raw[:] = range(5)
    raw.flush()
    np.testing.assert_array_equal(*computed(lazy.from_memmap(raw, chunks=2)), range(5))


def test_from_memmap_refuses_what_is_no_whole_file(tmp_path):
    raw = np.memmap(tmp_path / "raw", np.int16, "w+", shape=(5,))
    with pytest.raises(ValueError, match="array must be a map of a file itself, not a view of one"):
        lazy.from_memmap(raw[1:])
    with pytest.raises(TypeError, match=r"array must be an np\.memmap, got ndarray"):
        lazy.from_memmap(np.zeros(3))
