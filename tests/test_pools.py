"""Calls from the pools of others: processes, threads, and what they do at once."""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import sys
from pathlib import Path

import numpy as np
import pytest
from pool import needs_fork, quiet_fork
from processes import finish, fresh, start
from test_parallel_calls import CASES, answer, assert_same

import fastattn
from fastattn.cpu.cache import cache_folder
from fastattn.machine import default_num_threads

pytest.importorskip("numba")

METHODS = [
    pytest.param("fork", marks=needs_fork),
    # Each process imports fastattn, and reads its kernels from the cache.
    pytest.param("forkserver", marks=[pytest.mark.slow, needs_fork]),
    pytest.param("spawn", marks=pytest.mark.slow),
]


@pytest.fixture(scope="module")
def expected():
    return [answer(case, 2) for case in CASES]


def assert_answers(found, expected):
    for got, exact in zip(found, expected, strict=True):
        assert_same(got, exact)


@quiet_fork
@pytest.mark.parametrize("method", METHODS)
def test_multiprocessing(method, expected):
    with multiprocessing.get_context(method).Pool(2) as pool:
        found = pool.map(answer, CASES, chunksize=1)
    assert_answers(found, expected)


@quiet_fork
@pytest.mark.parametrize("method", METHODS)
def test_process_pool_executor(method, expected):
    context = multiprocessing.get_context(method)
    with concurrent.futures.ProcessPoolExecutor(2, mp_context=context) as pool:
        assert_answers(pool.map(answer, CASES), expected)


def test_thread_pool_executor(expected):
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        for _ in range(5):
            assert_answers(pool.map(answer, CASES), expected)


@pytest.mark.parametrize("kind", [pytest.param("loky", marks=pytest.mark.slow), "threading"])
def test_joblib(kind, expected):
    joblib = pytest.importorskip("joblib")
    with joblib.parallel_config(backend=kind, n_jobs=2):
        found = joblib.Parallel()(joblib.delayed(answer)(case) for case in CASES)
    assert_answers(found, expected)


@pytest.mark.slow
def test_dask(expected):
    dask = pytest.importorskip("dask")
    tasks = [dask.delayed(answer)(case) for case in CASES]
    for scheduler in ("threads", "processes", "synchronous"):
        assert_answers(dask.compute(*tasks, scheduler=scheduler), expected)


# --- other runtimes in the process ----------------------------------------------------------------

MANY_CALLS = """
import json, threading
{first}
import numpy as np
import fastattn
{second}

rng = np.random.default_rng(0)
CALLS = []
for shape, flags in [
    ((4, 300, 64), dict(causal=True)),
    ((2, 3, 16), dict()),
    ((8, 200, 32), dict(window=(40, 3), softcap=5.0)),
    ((1, 1, 64), dict()),
    ((3, 130, 40), dict(alibi=np.ones(3, np.float32))),
]:
    CALLS.append(([rng.standard_normal(shape).astype(np.float32) for _ in range(3)], flags))

def call(index, count):
    arrays, flags = CALLS[index]
    with fastattn.num_threads(count):
        return fastattn.attention(*arrays, **flags, backend="cpu").tobytes()

expected = [call(index, 1) for index in range(len(CALLS))]
wrong = []

def work(first):
    for n in range(first, first + {calls}):
        index = n % len(CALLS)
        {others}
        if call(index, 1 + n % 4) != expected[index]:
            wrong.append(n)

threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(json.dumps(len(wrong)))
"""
# A parallel function of the user's own, under Numba's threading layer, which fastattn must not
# touch. The layer "workqueue" aborts the process if two threads enter it: one at a time.
NUMBA = """
import numba
lock = threading.Lock()

@numba.njit(parallel=True)
def total(a):
    s = 0.0
    for n in numba.prange(a.size):
        s += a[n]
    return s
"""
CALL_NUMBA = """with lock:
            assert total(np.ones(1000)) == 1000"""
CALL_TORCH = "assert torch.ones(50, 50).matmul(torch.ones(50, 50))[0, 0] == 50"


@pytest.mark.slow
@pytest.mark.parametrize("layer", ["workqueue", "omp", "tbb"])
def test_threads_beside_numbas_own(layer):
    libraries = Path(sys.prefix) / "lib"
    if layer == "tbb" and not list(libraries.glob("libtbb.so*")):
        pytest.skip("tbb is not installed")
    environment = {"NUMBA_THREADING_LAYER": layer, "LD_LIBRARY_PATH": libraries}
    code = MANY_CALLS.format(first="", second=NUMBA, calls=500, others=CALL_NUMBA)
    assert fresh(code, cache_folder(), **environment, OMP_NUM_THREADS=None) == 0


@pytest.mark.slow
@pytest.mark.parametrize("first", [True, False], ids=["torch first", "torch second"])
def test_threads_beside_torchs_own(first):
    pytest.importorskip("torch")
    imports = {"first": "import torch", "second": ""}
    if not first:
        imports = {"first": "", "second": "import torch"}
    code = MANY_CALLS.format(**imports, calls=500, others=CALL_TORCH)
    assert fresh(code, cache_folder(), OMP_NUM_THREADS=None) == 0


# --- how many threads -----------------------------------------------------------------------------

COUNT = """
import json, os, threading
import numpy as np
import fastattn
q = np.ones((8, 400, 64), np.float32)
for _ in range(3):
    fastattn.attention(q, q, q, backend="cpu")
pool = [thread for thread in threading.enumerate() if thread.name == "fastattn"]
print(json.dumps([fastattn.get_num_threads(), len(pool)]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="affinity")
def test_four_processes_have_no_more_threads_than_each_may():
    """What limits a process limits its pool: OMP_NUM_THREADS as joblib and Dask set it."""
    processes = [start(COUNT, cache_folder(), OMP_NUM_THREADS=1) for _ in range(4)]
    assert [finish(process) for process in processes] == [[1, 0]] * 4
    count = default_num_threads()
    if count > 1:
        assert fresh(COUNT, cache_folder(), OMP_NUM_THREADS=None)[1] <= count
        pinned = "import os\nos.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
        assert fresh(pinned + COUNT, cache_folder(), OMP_NUM_THREADS=None) == [1, 0]


@needs_fork
@quiet_fork
def test_joblib_limits_the_threads_of_its_processes():
    joblib = pytest.importorskip("joblib")
    with joblib.parallel_config(backend="loky", n_jobs=2, inner_max_num_threads=1):
        counts = joblib.Parallel()(joblib.delayed(_count)() for _ in range(2))
    assert counts == [1, 1]


def _count():
    return fastattn.get_num_threads()


# --- while others write ---------------------------------------------------------------------------


def test_arrays_that_change_during_the_call(backend):
    """What comes out is not specified; that the process lives and writes nothing else, is."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((4, 300, 32)).astype(np.float32) for _ in range(3))
    mask = rng.random((300, 300)) < 0.5
    bias = rng.standard_normal((300, 300)).astype(np.float32)
    bits = rng.integers(0, 256, 1 << 16, np.uint8)

    def scribble(stop):
        n = 0
        while not stop:
            for a in (q, k, v, mask, bias):
                flat = a.reshape(-1).view(np.uint8)
                at = 64 * n % (flat.size - 4096)
                flat[at : at + 4096] = bits[at % 60000 :][:4096] & (1 if a is mask else 255)
            n += 7

    stop = []
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        done = pool.submit(scribble, stop)
        try:
            for _ in range(20):
                out = np.full((4, 302, 32), 7, np.float32)
                fastattn.attention(
                    q, k, v, mask=mask, bias=bias, causal=True, out=out[:, 1:-1], backend=backend
                )
                assert (out[:, [0, -1]] == 7).all()
        finally:
            stop.append(1)
        done.result()
