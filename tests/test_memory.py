"""What a call allocates, and what it does not read."""

from __future__ import annotations

import os
import tracemalloc

import numpy as np
import pytest
from cases import Case
from kernels import numpy_dtype, survives, unreadable
from processes import fresh

import fastattn
from fastattn import mods

pytestmark = pytest.mark.unguarded
LIMIT = 12 << 20  # bytes beyond the result


def peak_beyond_output(backend, q, k, v, **flags):
    """Return the bytes that a call allocates at its peak beyond its result."""
    fastattn.attention(q[..., :64, :], k, v, backend=backend)  # compiled, threads up
    tracemalloc.start()
    try:
        out = fastattn.attention(q, k, v, **flags, backend=backend)
        return tracemalloc.get_traced_memory()[1] - out.nbytes
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "how",
    [
        *("plain", "causal", "key mask", "window", "bias", "strided", "heads last"),
        *("alibi", "softcap", "sinks", "chunk", "lengths", "dropout"),
    ],
)
def test_memory_does_not_grow_with_the_scores(how, backend):
    # 256 x 16384 scores of two heads would be 32 MiB.
    case = Case("memory", 256, 16384, 16, heads_q=2)
    q, k, v = case.arrays()
    if how == "strided":
        q, k, v = (np.repeat(a, 2, axis=-1)[..., ::2] for a in (q, k, v))
    elif how == "heads last":
        q, k, v = (np.ascontiguousarray(a.swapaxes(1, 2)).swapaxes(1, 2) for a in (q, k, v))
    flags = {
        "causal": {"causal": True},
        "key mask": {"mask": np.arange(16384) % 3 > 0},
        "window": {"window": (100, 100), "align": 5000},
        "bias": {"bias": np.zeros((2, 1, 16384), np.float32)},
        "alibi": {"alibi": np.ones(2, np.float32)},
        "softcap": {"softcap": 20.0},
        "sinks": {"sinks": np.ones(2, np.float32)},
        "chunk": {"chunk": 10000},
        "lengths": {"q_len": [200], "kv_len": [16000], "kv_start": 300},
        "dropout": {"dropout_p": 0.1},
    }
    assert peak_beyond_output(backend, q, k, v, **flags.get(how, {})) < LIMIT


PAIRS = (1024, 16384)  # 16 MiB of bool
MASKS = {
    "mask": lambda: {"mask": np.ones(PAIRS, bool)},
    "transposed mask": lambda: {"mask": np.ones(PAIRS[::-1], bool).T},
    "float16 bias": lambda: {"bias": np.zeros(PAIRS, np.float16)},
    "float32 bias": lambda: {"bias": np.zeros(PAIRS, np.float32)},
    "float64 bias": lambda: {"bias": np.zeros(PAIRS, np.float64)},
    "one number": lambda: {"bias": np.broadcast_to(np.float32(0.5), (2, *PAIRS))},
    "both": lambda: {"mask": np.ones(PAIRS, bool), "bias": np.zeros((2, *PAIRS), np.float32)},
}


@pytest.mark.parametrize("how", MASKS)
def test_masks_are_neither_copied_nor_converted(how, backend):
    arrays = Case("memory", *PAIRS, 8, heads_q=2).arrays()
    assert peak_beyond_output(backend, *arrays, **MASKS[how]()) < LIMIT


def test_modifiers_take_no_memory_for_the_scores():
    arrays = Case("memory", *PAIRS, 8, heads_q=2).arrays()
    flags = {"score_mod": mods.alibi(), "mask_mod": mods.causal, "aux": (np.ones(2, np.float32),)}
    assert peak_beyond_output("numpy", *arrays, **flags) < LIMIT


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("seqlen_q", [1, 2, 70])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("flags", [{}, {"causal": True}, {"window": (90, 0)}], ids=str)
def test_keys_outside_the_lengths_are_never_read(flags, dtype, seqlen_q, backend):
    """They lie on pages that kill whoever reads them: of two batch entries, other ones."""
    page = os.sysconf("SC_PAGE_SIZE")
    keys = page // (32 * numpy_dtype(dtype).itemsize)  # of one head, on a page
    case = Case("pages", seqlen_q, 40 * keys, 32, batch=2, heads_q=4, heads_kv=2, dtype=dtype)
    q, k, v = case.arrays()
    start, stop = np.array([keys, 0]), np.array([39 * keys, 7 * keys])
    flags = {"kv_start": start, "kv_len": stop} | flags
    expected = fastattn.attention(q, k, v, **flags, backend=backend)
    j = np.arange(case.seqlen_k)[:, None]
    hidden = (j < start[:, None, None, None]) | (j >= stop[:, None, None, None])

    def call():
        found = fastattn.attention(q, hidden_k, hidden_v, **flags, backend=backend)
        np.testing.assert_array_equal(found, expected)

    with unreadable(k, hidden) as hidden_k, unreadable(v, hidden) as hidden_v:
        assert survives(call)
        assert not survives(lambda: hidden_k[0, 1, -1].sum())
        assert not survives(lambda: hidden_v[0, 0, 0].sum())


@pytest.mark.slow
def test_a_call_that_compiles_keeps_no_array(tmp_path):
    """Numba's errors lie in cycles that refer to all frames below; they must not count as old."""
    pytest.importorskip("numba")
    code = """
import gc, json, weakref
import numpy as np
import fastattn
class Array(np.ndarray): pass
q = np.ones((4, 64, 64), np.float32).view(Array)
kept = weakref.ref(q)
fastattn.attention(q, q, q, backend="cpu")
del q
gc.collect(1)
print(json.dumps(kept() is None))
"""
    assert fresh(code, tmp_path)


@pytest.mark.parametrize("rows", [5, 37, 197])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_packed_keys_begin_with_a_line(rows, dtype, monkeypatch):
    """Else each of their registers would lie in two (101 queries: 1.05 of the time)."""
    share, scratch = pytest.importorskip("fastattn.cpu.share"), np.zeros(1 << 21, np.uint8)
    start = share.aligned(scratch)
    monkeypatch.setattr(share, "take", lambda nbytes, *rest: (scratch, start))
    q, k, v = (np.full((1, 1, n, 5), x, dtype) for n, x in ((rows, 0), (64, 7.25), (64, 1)))
    fastattn.attention(q, k, v, backend="cpu")
    (found,) = np.nonzero(scratch.view(dtype) == 7.25)
    assert found.size
    assert (scratch.ctypes.data + found[0] * q.itemsize) % 64 == 0
