"""fastattn.dask on processes of dask.distributed: bits, a worker that is lost, little memory."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from cases import Case
from dask_arrays import chunked, computed, da

import fastattn
import fastattn.dask as lazy

distributed = pytest.importorskip("distributed")
pytestmark = [
    pytest.mark.slow,
    # The cluster's own: sockets and processes that end after the test.
    pytest.mark.filterwarnings("ignore"),
]
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


def tasks_in_memory(client):
    """Results of tasks that some worker holds just now."""
    held = (key for keys in client.has_what().values() for key in keys)
    return [key for key in held if "attention-part" in str(key)]


def test_any_cluster_gives_the_bits_of_one_thread(rng):
    case = Case("bits", 300, 400, 32, heads_q=4, heads_kv=2, causal=True, dropout_p=0.2, sinks=True)
    arrays = [chunked(a, rng, 5) for a in case.arrays()]
    flags = case.flags()
    out, lse = lazy.attention(*arrays, **flags, return_lse=True)
    del flags["sinks"]
    gradients = lazy.attention_backward(out, *arrays, out, lse, **flags)
    expected = computed(out, lse, *gradients)
    with cluster(2) as two, distributed.Client(two) as client:
        found = client.gather(client.compute([out, lse, *gradients]))
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_a_worker_is_killed_and_the_result_is_right(rng):
    q, k, v = (rng.standard_normal((2, 8192, 64)).astype(F4) for _ in range(3))
    out = lazy.attention(*(da.from_array(a, chunks=(1, 1024, 64)) for a in (q, k, v)), causal=True)
    with cluster(2) as two, distributed.Client(two) as client:
        victims = client.run(os.getpid)
        future = client.compute(out)
        # In the middle of the run, as far as the size of the arrays makes that likely.
        while not tasks_in_memory(client):
            time.sleep(0.02)
        os.kill(next(iter(victims.values())), signal.SIGKILL)
        found = future.result(timeout=120)
        assert victims != client.run(os.getpid)  # the nanny has started another
    np.testing.assert_allclose(
        found, fastattn.attention(q, k, v, causal=True), rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("store", ["memmap", "zarr"])
def test_keys_larger_than_the_memory_of_a_worker(store, tmp_path):
    """1 GiB of keys and values on a worker that is killed at 95 % of 450 MiB."""
    shape, chunks = (1, 1 << 21, 64), (1, 1 << 15, 64)
    path = tmp_path / "keys"
    if store == "memmap":
        keys = np.lib.format.open_memmap(f"{path}.npy", "w+", F4, shape)
        keys[:, :: 1 << 15] = 1
        keys.flush()
        keys = lazy.from_memmap(np.load(f"{path}.npy", mmap_mode="r"), chunks=chunks)
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


def test_the_guide_runs():
    text = (Path(__file__).parents[1] / "docs" / "dask.md").read_text(encoding="utf-8")
    first = re.findall(r"```python\n(.*?)```", text, re.DOTALL)[0]
    small = first.replace("32768", "512").replace("4096", "64")
    scope: dict[str, object] = {}
    exec(small, scope)
    assert scope["out"].shape == (8, 512, 64)
