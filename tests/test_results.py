"""The memory of large results: it serves the next one, and never two at a time."""

from __future__ import annotations

import gc
import threading

import numpy as np
import pytest
from processes import fresh

import fastattn
from fastattn import results

MIB = 1 << 20


@pytest.fixture(autouse=True)
def nothing_kept(monkeypatch):
    monkeypatch.setattr(results, "_blocks", [])


def floats(nbytes=MIB):
    return results.empty((4, nbytes // 16), np.float32)


def test_an_array_is_as_np_empty_makes_it():
    out = results.empty((2, 3, 1 << 16), np.float16)
    assert type(out) is np.ndarray
    assert (out.shape, out.dtype) == ((2, 3, 1 << 16), np.float16)
    assert out.flags.c_contiguous
    assert out.flags.writeable
    assert out.ctypes.data % 64 == 0


def test_memory_that_nobody_refers_to_serves_the_next_result():
    out = floats()
    place = out.ctypes.data
    out = None
    assert floats().ctypes.data == place


def test_it_serves_one_result_at_a_time_and_of_its_size():
    for nbytes in (MIB // 2, MIB, 2 * MIB):
        floats(nbytes)
    one, two = floats(), floats()
    assert not np.shares_memory(one, two)
    assert [block.nbytes for block in results._blocks] == [MIB // 2, 2 * MIB]


def last_base(out):
    while getattr(out, "base", None) is not None:
        out = out.base
    return out


VIEWS = {
    "array": lambda out: out,
    "slice": lambda out: out[1:, ::2],
    "view of a view": lambda out: out.view(np.int32).T[3:].reshape(-1)[1:],
    "memoryview": memoryview,
    "as another array": lambda out: np.asarray(memoryview(out)),
    "its base": lambda out: out[0].base,
    "part of its base": lambda out: out.base[64:],
    "the base of all": last_base,
}


@pytest.mark.parametrize("how", VIEWS)
def test_memory_that_something_refers_to_is_left_alone(how):
    first = floats()
    first[...] = 7
    view = VIEWS[how](first)
    del first
    gc.collect()
    second = floats()
    second[...] = 8
    assert not np.shares_memory(np.asarray(view), second)
    assert (np.asarray(view).ravel().view(np.uint8)[:4].view(np.float32) == 7).all()


def test_results_that_outlive_the_module(tmp_path):
    """Python takes the names of modules away, those with an underscore first, then the others."""
    code = """
import json, sys
import numpy as np
from fastattn import results
sys.kept, results._first, results.last = results, *(results.empty((1 << 18,), "b") for _ in "ab")

class Late:
    def __del__(self):
        self.result = make((1 << 18,), np.int8)

cycle = Late()
cycle.itself, make = cycle, results.empty
print(json.dumps(True))
"""
    assert fresh(code, tmp_path)


def test_its_base_takes_no_attribute_that_could_bring_it_back():
    """Once its memory has been given back: of objects in a cycle, another may do so."""
    out = floats()
    with pytest.raises(AttributeError):
        out.base.result = out


def test_a_result_is_not_resized():
    """Its memory is lent: docs/robustness.md says so."""
    with pytest.raises(ValueError, match="does not own its data"):
        floats().resize(3)


def test_small_results_and_very_large_ones_are_not_kept():
    floats(results.LEAST // 2)
    large = results.empty((results.KEPT + 1,), np.uint8)
    assert large.base is None
    del large
    assert results._blocks == []


def test_no_more_is_kept_than_said():
    kept = [floats(results.KEPT // 4) for _ in range(6)]
    newest = kept[-1].ctypes.data
    while kept:
        del kept[0]
    assert len(results._blocks) == 4
    assert floats(results.KEPT // 4).ctypes.data == newest


def test_threads_never_get_the_same_memory():
    wrong = []

    def work(number):
        for _ in range(200):
            out = floats(results.LEAST)
            out[:, 0] = number
            if (out[:, 0] != number).any():
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.unguarded
def test_calls_take_it():
    pytest.importorskip("numba")
    x = np.ones((1, 4, 256, 64), np.float32)
    out = fastattn.attention(x, x, x)
    kept = fastattn.attention(x, x, x)
    assert not np.shares_memory(out, kept)
    place, out = out.ctypes.data, None
    with fastattn.num_threads(1):  # another could hold the result for a moment longer
        out = fastattn.attention(x, x, x)
    assert out.ctypes.data == place
    assert (out == 1).all()
    assert (kept == 1).all()
