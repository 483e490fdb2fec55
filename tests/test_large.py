"""Too little memory, and arrays larger than it."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from cases import Case
from numpy.lib.stride_tricks import as_strided
from processes import fresh

import fastattn
from fastattn import launch, plan
from fastattn.cpu.cache import cache_folder

linux = pytest.mark.skipif(sys.platform != "linux", reason="limits of Linux")

# 256 rows of this head_dim take 100 MB of scratch; 48 rows 60 MB, most of it for keys.
LIMITED = """
import json, resource
from pathlib import Path
import numpy as np
import fastattn

def attend():
    return fastattn.attention(q, k, v, backend="cpu")

def limit(megabytes):
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + megabytes * 1000000
    resource.setrlimit(resource.RLIMIT_AS, (most, resource.RLIM_INFINITY))

rng = np.random.default_rng(0)
q, k = (rng.standard_normal((1, n, 50000), np.float32) for n in (400, 256))
v = rng.standard_normal((1, 256, 2), np.float32)
with fastattn.num_threads({threads}):
    expected = attend()
    told = []
    for megabytes in {megabytes}:
        limit(megabytes)
        try:
            told.append(bool(np.allclose(attend(), expected, rtol=0, atol=1e-4)))
        except MemoryError as error:
            told.append("MemoryError")
    limit(1000)
    told.append(bool((attend() == expected).all()))
    small = fastattn.attention(q[..., :8], k[..., :8], v, backend="cpu")
print(json.dumps(told))
"""


@linux
@pytest.mark.slow
@pytest.mark.parametrize("threads", [1, 2])
def test_less_memory_is_tried_before_giving_up(threads):
    """The last limit fits nothing, and the call before and after it is right. The second fits a
    smaller block on one thread: the other leaves its share to it.
    """
    pytest.importorskip("numba")
    code = LIMITED.format(threads=threads, megabytes=(200, 110, 20))
    assert fresh(code, cache_folder()) == [True, True, "MemoryError", True]


def test_smaller_plans_end_and_keep_the_bits(backend, monkeypatch):
    case = Case("smaller", 700, 2100, 16, heads_q=2, causal=True)
    q, k, v = case.arrays()
    right, tried = launch._launcher(backend), []

    def run(chosen, problem, operands):
        tried.append(chosen)
        if plan.smaller(chosen) is not None:
            raise MemoryError
        right(chosen, problem, operands)

    with fastattn.num_threads(4):
        expected = fastattn.attention(q, k, v, causal=True, backend=backend)
        monkeypatch.setattr(launch, "_launcher", lambda backend: run)
        monkeypatch.setattr(fastattn.repeat, "_known", {})
        found = fastattn.attention(q, k, v, causal=True, backend=backend)
    assert len(tried) > 1
    assert tried[-1].block_m <= 48
    assert tried[-1].num_splits == 1
    assert all(chosen.work_items >= 1 for chosen in tried)
    np.testing.assert_allclose(found, expected, atol=1e-6)
    if backend == "cpu":
        np.testing.assert_array_equal(found, expected)


def test_a_plan_that_never_fits_raises(backend, monkeypatch):
    def run(chosen, problem, operands):
        raise MemoryError("none left")

    monkeypatch.setattr(launch, "_launcher", lambda backend: run)
    one = np.ones((300, 8), np.float32)
    with pytest.raises(MemoryError, match="none left"):
        fastattn.attention(one, one, one, return_lse=True, backend=backend)


# --- no leak --------------------------------------------------------------------------------------

MANY_CALLS = """
import json
from pathlib import Path
from fastattn.verifying.draw import draw
from fastattn.verifying.trial import inputs_of, results

def resident_pages():
    return int(Path("/proc/self/statm").read_text().split()[1])

# The same problems over and over: what is kept of a call is kept once.
trials = [draw(9, number) for number in range(250)]
inputs = [inputs_of(trial) for trial in trials]
pages = []
for _ in range(10):
    for _ in range(2):
        for trial, x in zip(trials, inputs):
            results(trial, x, "{backend}")
    pages.append(resident_pages())
print(json.dumps(pages))
"""


@linux
@pytest.mark.slow
def test_ten_thousand_calls_leave_nothing(backend):
    """Each result is two calls or more: 10 000 in ten parts, of which the first ones settle."""
    pages = fresh(MANY_CALLS.format(backend=backend), cache_folder())
    assert max(pages[5:]) <= 1.02 * max(pages[2:5]), pages


# --- more than 2**31 elements -------------------------------------------------------------------

MANY = 1 << 31


@linux
def test_strides_beyond_32_bits(backend, rng):
    """Views whose elements lie gigabytes apart, in memory that is there once it is touched."""
    case = Case("far", 40, 50, 16, batch=3, heads_q=2)
    arrays = case.arrays()
    mask = rng.random(case.shape("bhqk")) < 0.7
    expected = fastattn.attention(*arrays, mask=mask, backend=backend)

    def far(a):
        room = np.zeros(2 * MANY + 4096, a.dtype)
        strides = (MANY * a.itemsize, *a.strides[1:])
        view = as_strided(room, a.shape, strides)
        view[...] = a
        return view

    q, k, v = map(far, arrays)
    out = far(np.full_like(expected, np.nan))
    fastattn.attention(q, k, v, mask=far(mask), out=out, backend=backend)
    np.testing.assert_array_equal(out, expected)


@linux
def test_more_keys_than_32_bits_count(backend):
    """All but the last hundred are beyond the lengths, and share one page of zeros."""
    count = MANY + 100
    k, v = np.zeros((count, 1), np.float16), np.zeros((count, 1), np.float16)
    k[-1], v[-1] = 3, 3
    q = np.ones((4, 1), np.float16)
    flags = {"kv_start": MANY, "causal": True, "scale": 1.0, "return_lse": True}
    out, lse = fastattn.attention(q, k, v, **flags, backend=backend)
    assert not out[:-1].any()
    assert out[-1, 0] == pytest.approx(3 * np.exp(3) / (99 + np.exp(3)), rel=1e-3)
    np.testing.assert_allclose(lse[:-1], np.log([97, 98, 99]), rtol=1e-6)


# --- files larger than memory ---------------------------------------------------------------------

STREAMED = """
import json, resource
from pathlib import Path
import numpy as np
import fastattn

def attend(k, v, out):
    return fastattn.attention(q, k, v, out=out, causal=True, backend="{backend}")

shape = (2, {keys}, 64)
k, v = (np.memmap("{folder}/" + name, np.float16, "w+", shape=shape) for name in "kv")
k[:, -1], v[:, -1], v[:, 0] = 1, 1, 2
q = np.ones((2, 3, 64), np.float16)
out = np.memmap("{folder}/out", np.float16, "w+", shape=(2, 3, 64))
few = np.ones((2, 5, 64), np.float16)
attend(few, few, np.empty_like(q))
status = Path("/proc/self/status").read_text().split()
# Bytes of memory that is not of a file.
limit = int(status[status.index("VmData:") + 1]) * 1024 + 100000000
resource.setrlimit(resource.RLIMIT_DATA, (limit, resource.RLIM_INFINITY))
result = attend(k, v, out)
print(json.dumps([bool(result is out), float(out[0, 2, 0]), float(out[0, 1, 0])]))
"""


@linux
@pytest.mark.slow
def test_mapped_files_are_streamed(backend, tmp_path):
    """Two of 1 GiB each, of which the process may copy 100 MB; most of them are holes."""
    keys = 1 << 22
    code = STREAMED.format(backend=backend, folder=tmp_path, keys=keys)
    same, last, before = fresh(code, cache_folder())
    assert same
    e = np.exp(8.0)
    assert last == pytest.approx((e + 2) / (e + keys - 1), rel=2e-2)
    assert before == pytest.approx(2 / (keys - 1), abs=1e-6)
