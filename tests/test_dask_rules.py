"""What attention() on dask arrays refuses, what explain() says of it, suggested chunks."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from dask_arrays import computed, da
from rules import rule_id

import fastattn.dask as lazy

F4 = np.float32


def zeros(*shape, chunks=-1, dtype=F4):
    return da.zeros(shape, chunks=chunks, dtype=dtype)


def unknown(*shape):
    """Return an array of this shape, but dask does not know how many keys it has."""
    return zeros(*shape)[:, da.ones(shape[1]) > 0]


Q = zeros(4, 70, 8, chunks=(2, 20, 8))
K = zeros(2, 50, 8, chunks=(1, 25, 8))
WRONG = [
    ({"q": np.zeros((4, 70, 8), F4)}, TypeError, "q must be a dask array, got ndarray. Use dask"),
    ({"k": [[1.0]]}, TypeError, "k must be a dask array, got list"),
    ({"v": unknown(2, 50, 8)}, ValueError, r"v must have known chunk sizes, got \(\(2,\), \(nan"),
    ({"mask": unknown(4, 70, 50) > 0}, ValueError, "mask must have known chunk sizes"),
    ({"kv_len": da.ones(1, dtype=int)}, TypeError, r"kv_len must be known .* kv_len.compute\(\)"),
    ({"sinks": da.zeros(4)}, TypeError, "sinks must be known when the graph is made"),
    (
        {"aux": (da.zeros(4),), "mask_mod": lambda b, h, i, j, aux: i == j},
        TypeError,
        r"aux\[0\] must be known",
    ),
    ({"v": K[:, 1:]}, ValueError, "k and v must have the same seqlen_k"),
    ({"k": K.astype("f8")}, TypeError, "q, k and v must have the same dtype, got float32, float64"),
    ({"mask": zeros(70, 50)}, TypeError, "mask must be bool, got float32"),
    ({"bias": zeros(70, 49)}, ValueError, r"bias must broadcast to the scores \(4, 70, 50\)"),
    ({"window": (-1, 0)}, ValueError, "window must be a pair of ints >= 0 or None"),
    ({"return_lse": 1}, TypeError, "return_lse must be a bool, got int"),
    ({"backend": "dask"}, ValueError, "backend must be one of"),
    ({"block_table": [0]}, TypeError, "unexpected keyword argument 'block_table'"),
    ({"out": np.zeros((4, 70, 8), F4)}, TypeError, "unexpected keyword argument 'out'"),
]


@pytest.mark.parametrize(("change", "error", "message"), WRONG, ids=rule_id)
def test_what_is_refused_when_the_graph_is_made(change, error, message):
    with pytest.raises(error, match=message):
        lazy.attention(**({"q": Q, "k": K, "v": K} | change))


@pytest.mark.parametrize(
    ("error", "kind"),
    [(MemoryError, MemoryError), (KeyError, RuntimeError), (TypeError, TypeError)],
)
def test_a_block_that_fails_says_which(error, kind, monkeypatch):
    def fail(part, q, k, v, backend, arguments):
        if (part.h, part.i, part.j) == (2, 20, 25):
            raise error("no room")
        return np.zeros(q.shape, q.dtype), q[..., 0]

    monkeypatch.setattr("fastattn.dask.tasks.attend", fail)
    with pytest.raises(
        kind, match=r"no room.* \[in block \(1, 1, 1\) of \(batch\.\.\., heads, rows, keys"
    ):
        computed(lazy.attention(Q, K, K))


def test_blocks_that_are_not_what_they_were_said_to_be_are_refused():
    wide = Q.map_blocks(lambda block: block.astype("f8"), dtype=F4)
    with pytest.raises(
        TypeError, match=r"same dtype, got float64, float32.*\[in block \(\d, \d, 0\)"
    ):
        lazy.attention(wide, K[:, :25], K[:, :25]).compute(scheduler="synchronous")


def test_explain_says_what_is_rechunked():
    found = lazy.explain(Q, K, K.rechunk((2, 10, 8)), causal=True)
    assert found.notes == (
        "k is rechunked along seqlen_k from 2 x 25 to 2 x 10 + 2 x 5 + 2 x 10",
        "v is rechunked along heads_kv from 2 to 2 x 1",
        "k is rechunked along seqlen_k from 2 x 25 to 2 x 10 + 5 + 5 + 2 x 10",
        "v is rechunked along seqlen_k from 5 x 10 to 2 x 10 + 5 + 5 + 2 x 10",
    ) or sorted(found.notes)
    print(found)


def test_explain_counts_tasks():
    q = zeros(8, 32768, 64, chunks=(8, 4096, 64))
    found = lazy.explain(q, q, q, causal=True, backend="numpy")
    assert (found.parts, found.seen, found.pairs, found.merges) == (36, 36, 64, 28)
    assert found.nbytes == 4 * 8 * 4096 * 64 * 4
    assert found.plan.num_threads == 1
    text = str(found)
    assert "seqlen_k    8 x 4096" in text
    assert "36, 56.2 % of 64" in text
    assert "36 parts, 28 merges" in text
    assert "note" not in text


def test_entries_that_count_keys_from_unlike_places_have_chunks_of_their_own():
    q = zeros(4, 2, 30, 8, chunks=(2, 2, 30, 8))
    flags = {"kv_start": [0, 1, 2, 3]}
    assert lazy.explain(q, q, q, **flags).parts == 2
    found = lazy.explain(q, q, q, **flags, chunk=8)
    assert found.parts == 4
    assert "every batch entry has a chunk of its own, as chunk counts keys" in found.notes[0]
    assert lazy.explain(q, q, q, kv_start=3, chunk=8).parts == 2


# --- suggest_chunks ------------------------------------------------------------------------------

SHAPES = [
    ((8, 32768, 64), (8, 32768, 64), {}),
    ((32, 1 << 20, 128), (8, 1 << 20, 128), {"dtype": "bfloat16"}),
    ((2, 3, 32, 1, 128), (2, 3, 8, 1 << 24, 128), {"threads": 2}),
    ((64, 12, 512, 64), (64, 12, 512, 64), {"threads": 4}),
    ((8, 10000, 64), (8, 3000, 64), {"head_dim_v": 256}),
    ((5000, 64), (5000, 64), {}),
    ((2, 0, 64), (2, 0, 64), {}),
]


@pytest.mark.parametrize("memory", ["24 MiB", "1 GiB", 8 << 30])
@pytest.mark.parametrize(("q", "k", "more"), SHAPES, ids=str)
def test_suggested_chunks_fit(q, k, more, memory):
    if more.get("dtype") == "bfloat16":
        pytest.importorskip("ml_dtypes")
    chunks_q, chunks_k = lazy.suggest_chunks(q, k, memory=memory, **more)
    arrays = [zeros(*shape, chunks=c) for shape, c in ((q, chunks_q), (k, chunks_k))]
    v = zeros(*k[:-1], more.get("head_dim_v", k[-1]), chunks=chunks_k)
    found = lazy.explain(*arrays, v, backend="numpy")
    assert found.notes == ()
    problem = found.plan.problem
    keys = problem.batch * problem.heads_kv * problem.seqlen_k
    rows = problem.batch * problem.heads_q * problem.seqlen_q
    dims = problem.head_dim + problem.head_dim_v
    limit = da.core.parse_bytes(memory) / 2 / more.get("threads", 1)
    assert 4 * (3 * keys * dims + rows * (dims + 5 * problem.head_dim_v)) <= limit
    assert problem.flop <= 1e11


def test_suggested_chunks_of_a_call_that_fits_are_the_call():
    assert lazy.suggest_chunks((4, 100, 8), (2, 100, 8), memory="1 GiB") == (
        (4, 100, -1),
        (2, 100, -1),
    )


def test_memory_without_room_for_a_row_is_refused():
    with pytest.raises(ValueError, match="memory must be at least 120832 bytes for each thread"):
        lazy.suggest_chunks((16, 1000, 128), (1, 1000, 128), memory=1000)
    with pytest.raises(ValueError, match="q and k must have the same head_dim"):
        lazy.suggest_chunks((2, 10, 8), (2, 10, 9), memory="1 GiB")
    with pytest.raises(ValueError, match="k_shape must have rank 2 or more, got"):
        lazy.suggest_chunks((2, 10, 8), (8,), memory="1 GiB")
    with pytest.raises(ValueError, match="threads must be an int >= 1, got 0"):
        lazy.suggest_chunks((2, 10, 8), (2, 10, 8), memory="1 GiB", threads=0)
    with pytest.raises(TypeError, match="dtype must be float16"):
        lazy.suggest_chunks((2, 10, 8), (2, 10, 8), memory="1 GiB", dtype="int8")


# --- import ---------------------------------------------------------------------------------------


def test_query_planning_is_refused():
    setting = "import dask; dask.config.set({'array.query-planning': True})"
    code = f"{setting}; import fastattn.dask"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "fastattn.dask needs dask arrays without query planning" in done.stderr
