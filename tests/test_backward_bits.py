"""Gradients to the bit: over threads, batches and calls; their memory; and how they wait."""

from __future__ import annotations

import sys
import tracemalloc

import numpy as np
import pytest
from cases import Case
from processes import fresh
from test_backward import backward

import fastattn

pytest.importorskip("numba")

BITS = [
    Case("bits", 300, 500, 32, batch=3, heads_q=4, heads_kv=2, causal=True),
    Case("bits", 70, 700, 40, 24, batch=2, heads_q=2, mask="h1k", sinks=True),
    Case("bits", 700, 300, 16, batch=2, heads_q=2, window=(40, 9), softcap=3.0),
    Case("bits", 130, 1500, 16, batch=3, heads_q=2, heads_kv=1, chunk=700, alibi="bh"),
    Case("bits", 40, 700, 16, batch=3, lengths="q_len kv_len kv_start align", window=(90, 3)),
    Case("bits", 140, 500, 24, batch=2, heads_q=2, causal=True, dtype="float16"),
    Case("bits", 140, 500, 24, heads_q=1, dtype="float64", dropout_p=0.3),
]
# Heads that share a bias, and keys that do.
SHARED = [
    Case("shared", 300, 700, 16, batch=2, heads_q=2, bias=axes) for axes in ("1qk", "hqk", "hq1")
]


@pytest.mark.parametrize("case", BITS + SHARED, ids=str)
def test_number_of_threads_does_not_matter(case, backend):
    with fastattn.num_threads(1):
        _, _, expected = backward(backend, case.arrays(), case.flags())
    for threads in (2, 5):
        with fastattn.num_threads(threads):
            for _ in range(3):
                _, _, found = backward(backend, case.arrays(), case.flags())
                for name, a in found.items():
                    np.testing.assert_array_equal(a, expected[name], name)


@pytest.mark.parametrize("case", [c for c in BITS if c.batch > 1], ids=str)
def test_neighbours_in_the_batch_do_not_matter(case):
    """Of the compiled kernel: a BLAS may sum a batched product in another order."""
    arrays, flags = case.arrays(), case.flags()
    dout, dlse, whole = backward("cpu", arrays, flags)
    out, lse = fastattn.attention(*arrays, **flags, return_lse=True, backend="numpy")
    for b in range(case.batch):
        own = {name: a[b] if name in PER_ENTRY and np.ndim(a) else a for name, a in flags.items()}
        one = [a[b] for a in (dout, *arrays, out, lse)]
        found = fastattn.attention_backward(*one, dlse=dlse[b], **own, backend="cpu")
        for name, a in zip("qkv", found, strict=True):
            np.testing.assert_array_equal(a, whole[name][b], name)


PER_ENTRY = ("q_len", "kv_len", "kv_start", "align", "alibi")


def test_more_threads_than_cores_wait_for_each_other():
    """One head: every item waits for the one before it, also for those that have nothing to do."""
    case = Case("waits", 900, 5000, 16, heads_q=1, causal=True, align="top_left")
    expected = backward("cpu", case.arrays(), case.flags())[2]
    with fastattn.num_threads(16):
        found = backward("cpu", case.arrays(), case.flags())[2]
    for name, a in found.items():
        np.testing.assert_array_equal(a, expected[name])
    assert not found["k"][..., 900:, :].any()


@pytest.mark.unguarded
def test_memory_beyond_the_gradients_does_not_grow_with_the_scores(backend):
    case = Case("memory", 3000, 3000, 16, heads_q=1)
    arrays, flags = case.arrays(), case.flags()
    out, lse = fastattn.attention(*arrays, **flags, return_lse=True)
    fastattn.attention_backward(out, *arrays, out, lse, backend=backend)
    tracemalloc.start()
    try:
        gradients = fastattn.attention_backward(out, *arrays, out, lse, backend=backend)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    scores = 4 * case.heads_q * case.seqlen_q * case.seqlen_k
    assert peak - sum(a.nbytes for a in gradients) < (scores / 4 if backend == "numpy" else 1 << 20)


PEAK = """
import json, re
from pathlib import Path
import numpy as np
import fastattn

def bytes_of(name):
    status = Path("/proc/self/status").read_text()
    return int(re.search(rf"^{name}:\\s*(\\d+) kB$", status, re.MULTILINE).group(1)) << 10

def call(seqlen):
    q = np.random.default_rng(0).standard_normal((2, seqlen, 64), dtype=np.float32)
    lse = np.full((2, seqlen), 12, np.float32)
    Path("/proc/self/clear_refs").write_text("5")
    before = bytes_of("VmRSS")
    found = fastattn.attention_backward(q, q, q, q, q, lse, causal=True, backend="cpu")
    return bytes_of("VmHWM") - before - sum(a.nbytes for a in found)

fastattn.set_num_threads(2)
call(300)
print(json.dumps(call(16384)))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_peak_memory_of_16384_tokens(tmp_path):
    """At most 8 MiB a thread beyond the gradients; the scores would be 2 GiB."""
    assert fresh(PEAK, tmp_path) < 2 * 8 << 20


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_wide_heads(dtype):
    """More of each than one register tile, and parts of one."""
    for head_dim, head_dim_v in ((96, 160), (256, 64), (300, 7)):
        case = Case("wide", 130, 250, head_dim, head_dim_v, heads_q=1, causal=True, dtype=dtype)
        ours = backward("cpu", case.arrays(), case.flags())[2]
        expected = backward("numpy", case.arrays(), case.flags())[2]
        for name, a in ours.items():
            np.testing.assert_allclose(
                a, expected[name], rtol=0, atol=1e-12 if a.itemsize == 8 else 2e-5
            )
