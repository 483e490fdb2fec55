"""Calls of arrays of a GPU that are prepared once, and gradients, on a stub of the driver."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from stubbed_gpu import jobs, run

from fastattn.cuda.job import FIELDS, GRADIENT_FIELDS

TESTS = Path(__file__).parent
# Arrays of a library that fastattn can ask for others.
ARRAYS_OF_NUMBA = """
import sys, types
class Of(Array):
    pass
Of.__module__ = "numba.made_up"
made = []
def device_array(shape, dtype):
    made.append(Of(np.full(shape, 7, dtype)))
    return made[-1]
sys.modules["numba.cuda"] = types.SimpleNamespace(
    device_array=device_array,
    as_cuda_array=lambda a, sync: np.asarray(a.__cuda_array_interface__["data"][0]),
)
"""


def test_a_call_is_prepared_for_other_arrays_of_its_layout():
    code = """
from fastattn.cuda import prepared
made = []
keep = prepared._keep
prepared._keep = lambda *arguments: made.append(0) or keep(*arguments)
places = []
for stream in (5, 5, 9):
    q, k, v, out = ones(2, 4, 70, 8), ones(2, 2, 90, 8), ones(2, 2, 90, 24), ones(2, 4, 70, 24)
    fastattn.attention(*(Array(a, stream) for a in (q, k, v)), out=Array(out, stream), causal=True)
    places.append([a.ctypes.data for a in (q, k, v, out)])
strided = ones(2, 4, 70, 16)[..., ::2]
fastattn.attention(Array(strided), *map(Array, (k, v)), out=Array(out), causal=True)
raw = (ctypes.c_int64 * (4 * FIELDS)).from_address(library.fake_jobs())
print(json.dumps([len(made), log(), list(raw), places]))
""".replace("FIELDS", str(len(FIELDS)))
    made, lines, raw, places = run(code)
    assert made == 2
    launches = [line.rpartition(", ")[2] for line in lines if line.startswith("launch")]
    assert launches == ["0x5", "0x5", "0x9", "0x5"]
    first, *others, strided = jobs(raw)
    names = "q", "k", "v", "out"
    for job, wanted in zip((first, *others), places, strict=True):
        assert [job[name] for name in names] == wanted
        assert job | dict.fromkeys(names) == first | dict.fromkeys(names)
    assert strided["q_col"] == 2


def test_parts_of_a_prepared_call_have_memory_of_their_own():
    code = """
q, k = ones(2, 2, 1, 8), ones(2, 2, 2000, 8)
for _ in range(2):
    fastattn.attention(Array(q), Array(k), Array(k), out=Array(q.copy()))
raw = (ctypes.c_int64 * (4 * FIELDS)).from_address(library.fake_jobs())
print(json.dumps([log(), list(raw)]))
""".replace("FIELDS", str(len(FIELDS)))
    lines, raw = run(code)
    assert sum(line == "allocate 0x5" for line in lines) == 2
    assert sum(line == "free 0x5" for line in lines) == 2
    for job in jobs(raw):
        # 4 parts of 512 keys for 4 rows of 8 numbers of 4 bytes, then their references and sums
        assert job["partial_state"] - job["partial"] == 4 * 4 * 8 * 4
        assert job["num_splits"] == 4


@pytest.mark.slow
def test_what_a_call_costs_is_measured():
    script = TESTS.parent / "bench" / "cuda_calls.py"
    variables = os.environ | {"PYTHONPATH": str(TESTS.parent)}
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, env=variables)
    assert done.returncode == 0, done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["call", "launch", "gradients"]


# --- gradients ------------------------------------------------------------------------------------


def test_gradients_of_arrays_of_a_gpu_stay_there():
    code = f"""{ARRAYS_OF_NUMBA}
half = lambda *shape: Of(np.ones(shape, np.float16))
q, k, lse = half(2, 4, 70, 16), half(2, 2, 90, 16), Of(ones(2, 4, 70))
found = fastattn.attention_backward(q, q, k, k, q, lse, sinks=[1.0] * 4, return_dsinks=True)
shapes = [a.array.shape for a in made]
same = [int(a) == b.array.ctypes.data for a, b in zip(found, made)]
print(json.dumps([log(), shapes, [a.array.dtype.name for a in made], same]))
"""
    lines, shapes, dtypes, same = run(code, FAKE_PARAMETERS=len(GRADIENT_FIELDS))
    kernels = [line for line in lines if line.startswith("launch")]
    assert kernels == [
        "launch 140 1 1, 128 1 1, 0, 0x5",  # a warp for each of 2 * 4 * 70 rows
        "launch 16 1 1, 128 1 1, 49152, 0x5",  # 2 blocks of 64 rows of 8 heads
        "launch 8 1 1, 128 1 1, 49152, 0x5",  # 2 blocks of 64 keys of 4 heads
        "launch 8 1 1, 128 1 1, 0, 0x5",  # the sum of each head's rows
    ]
    assert shapes == [[2, 4, 70, 16], [2, 2, 90, 16], [2, 2, 90, 16], [4]]
    assert dtypes == ["float16"] * 3 + ["float64"]
    assert all(same)
    assert not any("host" in line or "synchronize" in line for line in lines)


@pytest.mark.parametrize(("dtype", "weights"), [("float16", 0), ("float32", 1)])
def test_gradients_are_prepared(dtype, weights):
    """Kernels get the same numbers as where each call makes its jobs anew, but for addresses."""
    code = f"""{ARRAYS_OF_NUMBA}
from fastattn.cuda import prepared, run_backward
kept, places = [], []
keep, again = prepared._keep, run_backward._launch_again
prepared._keep = lambda *arguments: kept.append(0) or keep(*arguments)
for way in (lambda *arguments: False, again, again):
    run_backward._launch_again = way
    dout, q, k, v, out = [Of(np.ones((2, 4, 70, 16), np.{dtype})) for _ in range(5)]
    lse, dlse = Of(ones(2, 4, 70)), Of(ones(2, 4, 70))
    made.clear()
    fastattn.attention_backward(dout, q, k, v, out, lse, dlse=dlse, causal=True)
    given = dict(q=q, k=k, v=v, out=out, lse=lse, dout=dout, dlse=dlse)
    given |= dict(zip(("dq", "dk", "dv"), made))
    places.append({{name: a.array.ctypes.data for name, a in given.items()}})
raw = (ctypes.c_int64 * (9 * {len(GRADIENT_FIELDS)})).from_address(library.fake_jobs())
print(json.dumps([len(kept), log(), list(raw), places]))
"""
    kept, lines, raw, places = run(code, FAKE_PARAMETERS=len(GRADIENT_FIELDS))
    assert kept == 1
    # Its scratch is of one piece: delta and reference, and weights for the scalar kernels.
    assert sum(line.startswith("allocate") for line in lines) == 2 + weights + 2
    assert sum(line.startswith("free") for line in lines) == 2 + weights + 2
    found = jobs(raw, GRADIENT_FIELDS)
    scratch = ("delta", "reference", "weight")
    for number, job in enumerate(found):
        assert {name: job[name] for name in places[0]} == places[number // 3]
        assert job["reference"] - job["delta"] == 2 * 4 * 70 * 4 or number < 3
        assert bool(job["weight"]) == bool(weights)
        hidden = dict.fromkeys((*places[0], *scratch))
        assert job | hidden == found[number % 3] | hidden


def test_how_gradients_are_computed_is_explained():
    code = """
q, wide = np.ones((1, 300, 64), np.float16), np.ones((1, 3, 129), np.float16)
calls = [(q, {}), (q, {"bias": np.ones(300, np.float32)}), (wide, {}), (ones(1, 3, 8), {})]
texts = [str(fastattn.explain(a, a, a, backend="cuda", gradients=True, **flags))
         for a, flags in calls]
print(json.dumps(texts))
"""
    fast, *scalar = run(code)
    assert "kernel      gradients: tensor cores multiply float16, sums are float32\n" in fast
    reasons = (
        "masks, biases and other options change scores",
        "head_dim is above 128",
        "tensor cores multiply 16-bit types, not float32",
    )
    for text, reason in zip(scalar, reasons, strict=True):
        assert f"kernel      simt gradients: scalar arithmetic: {reason}\n" in text
    assert "75 of 128 for rows, 5 of 128 for dq, 5 of 128 for dk and dv" in fast
