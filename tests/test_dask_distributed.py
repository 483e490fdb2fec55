"""fastattn.dask on processes of dask.distributed: bits, a worker that is lost, little memory."""

from __future__ import annotations

import os
import re
from pathlib import Path

import numpy as np
import pytest
from cases import Case
from dask_arrays import Trap, chunked, computed, da

import fastattn
import fastattn.dask as lazy

distributed = pytest.importorskip("distributed")
# The cluster's own: sockets and processes that end after the test.
pytestmark = pytest.mark.filterwarnings("ignore")
F4 = np.float32
PATH = os.pathsep.join([str(Path(fastattn.__file__).parents[1]), str(Path(__file__).parent)])


def cluster(workers, **more):
    """A cluster of processes with one thread each, which import this checkout."""
    return distributed.LocalCluster(
        n_workers=workers,
        threads_per_worker=1,
        dashboard_address=":0",
        env={"PYTHONPATH": PATH},
        **more,
    )


def attended(rng):
    """Return (out, lse) and gradients in chunks at random."""
    case = Case("bits", 300, 400, 32, heads_q=4, heads_kv=2, causal=True, dropout_p=0.2, sinks=True)
    arrays = [chunked(a, rng, 5) for a in case.arrays()]
    flags = case.flags()
    out, lse = lazy.attention(*arrays, **flags, return_lse=True)
    del flags["sinks"]
    return out, lse, *lazy.attention_backward(out, *arrays, out, lse, **flags)


def test_a_cluster_of_threads_gives_the_bits_of_one(rng):
    arrays = attended(rng)
    expected = computed(*arrays)
    with (
        distributed.LocalCluster(n_workers=3, processes=False, dashboard_address=None) as three,
        distributed.Client(three) as client,
    ):
        found = client.gather(client.compute(arrays))
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.slow
def test_processes_give_the_bits_of_one_thread(rng):
    arrays = attended(rng)
    expected = computed(*arrays)
    with cluster(2) as two, distributed.Client(two) as client:
        found = client.gather(client.compute(arrays))
    for others in (found, computed(*arrays, scheduler="processes")):
        for ours, theirs in zip(others, expected, strict=True):
            np.testing.assert_array_equal(ours, theirs)


@pytest.mark.slow
@pytest.mark.parametrize("is_read", [True, False])
def test_a_worker_is_killed_and_the_result_is_right(is_read, tmp_path, rng):
    """In the middle of the run, by a block of keys, when it is read or computed first."""
    q, k, v = (rng.standard_normal((2, 600, 16)).astype(F4) for _ in range(3))
    trap = Trap(k, 300, str(tmp_path / "sprung"))
    lazy_q, lazy_k, lazy_v = (da.from_array(a, chunks=(1, 100, 16)) for a in (q, trap, v))
    if is_read:
        lazy_v = da.from_array(Trap(v, -1, ""), chunks=(1, 100, 16))
    else:
        lazy_k = lazy_k * 1
    out, lse = lazy.attention(lazy_q, lazy_k, lazy_v, causal=True, return_lse=True)
    gradients = lazy.attention_backward(out, lazy_q, lazy_k, lazy_v, out, lse, causal=True)
    with cluster(2) as two, distributed.Client(two) as client:
        found = client.gather(client.compute([out, lse, *gradients]))
    assert (tmp_path / "sprung").exists()
    out, lse = fastattn.attention(q, k, v, causal=True, return_lse=True)
    gradients = fastattn.attention_backward(out, q, k, v, out, lse, causal=True)
    for ours, theirs in zip(found, (out, lse, *gradients), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("store", ["memmap", "zarr", "hdf5"])
def test_keys_larger_than_the_memory_of_a_worker(store, tmp_path):
    """1 GiB of keys and values on a worker that is killed at 95 % of 450 MiB."""
    shape, chunks = (1, 1 << 21, 64), (1, 1 << 15, 64)
    path = tmp_path / "keys"
    if store == "memmap":
        keys = np.lib.format.open_memmap(f"{path}.npy", "w+", F4, shape)
        keys[:, :: 1 << 15] = 1
        keys.flush()
        keys = lazy.from_memmap(np.load(f"{path}.npy", mmap_mode="r"), chunks=chunks)
    elif store == "hdf5":
        h5py = pytest.importorskip("h5py")
        with h5py.File(path, "w") as file:
            stored = file.create_dataset("keys", shape, F4, chunks=chunks)
            stored[:, :: 1 << 15] = 1
        keys = da.from_array(h5py.File(path, "r")["keys"], chunks=chunks)
    else:
        zarr = pytest.importorskip("zarr")
        stored = zarr.create_array(path, shape=shape, chunks=chunks, dtype=F4, compressors=None)
        stored[:] = 0
        stored[:, :: 1 << 15] = 1
        keys = da.from_zarr(stored)
    q = da.ones((1, 256, 64), chunks=(1, 128, 64), dtype=F4)
    out = lazy.attention(q, keys, keys, scale=1.0)
    with cluster(1, memory_limit="450MiB") as one, distributed.Client(one) as client:
        pids = client.run(os.getpid)
        found = client.compute(out).result(timeout=250)
        assert pids == client.run(os.getpid)  # it has never been killed
    # 64 keys are ones, of score 64, all others zeros.
    np.testing.assert_allclose(found, 1 / (1 + (2**21 - 64) / 64 * np.exp(-64)), rtol=1e-5)


@pytest.mark.slow
def test_the_guide_runs():
    text = (Path(__file__).parents[1] / "docs" / "dask.md").read_text(encoding="utf-8")
    first = re.findall(r"```python\n(.*?)```", text, re.DOTALL)[0]
    small = first.replace("32768", "512").replace("4096", "64")
    scope: dict[str, object] = {}
    exec(small, scope)
    assert scope["out"].shape == (8, 512, 64)
