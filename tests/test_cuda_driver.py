"""What is asked of the driver, on a stub of it that runs no kernel."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from stubbed_gpu import jobs, run

import fastattn
from fastattn.cuda.job import FIELDS, FLOATS

# --- why there is no GPU to use -------------------------------------------------------------------

ATTEMPT = """
one = ones(1, 1)
try:
    fastattn.attention(one, one, one, backend="cuda")
    message = ""
except ImportError as error:
    message = str(error)
print(json.dumps([message, fastattn.attention(one, one, one, backend="numpy").tolist()]))
"""


@pytest.mark.parametrize(
    ("environment", "reason"),
    [
        ({"FAKE_VERSION": 11080}, "the NVIDIA driver is too old: it knows CUDA 11.8, fastattn ne"),
        ({"FAKE_DEVICES": 0}, "there is no NVIDIA GPU"),
        ({"FAKE_CAPABILITY": 61}, "the GPU is too old: it has compute capability 6.1, fastattn n"),
    ],
)
def test_the_reason_is_named(environment, reason):
    message, out = run(ATTEMPT, **environment)
    assert message.startswith(f"backend='cuda' cannot run here: {reason}")
    assert out == [[1.0]]


def test_without_a_driver(tmp_path):
    code = """
import json, numpy as np, fastattn
one = np.ones((1, 1), np.float32)
"""
    variables = os.environ | {"PYTHONPATH": str(Path(fastattn.__file__).parent.parent)}
    code = (
        "import ctypes\nload = ctypes.CDLL\ndef CDLL(name, *a, **k):\n"
        + (
            "    if 'cuda' in str(name):\n        raise OSError('no such file')\n"
            "    return load(name, *a, **k)\nctypes.CDLL = CDLL\n"
        )
        + code
        + ATTEMPT.replace("ones(1, 1)", "one")
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, env=variables
    )
    message, out = json.loads(done.stdout)
    assert message == "backend='cuda' cannot run here: there is no NVIDIA driver (libcuda)"
    assert out == [[1.0]]


def test_a_launch_that_fails_says_why():
    code = """
try:
    fastattn.attention(ones(4, 4), ones(4, 4), ones(4, 4), backend="cuda")
except driver.DriverError as error:
    print(json.dumps([str(error), log().count("allocate (nil)") - log().count("free (nil)")]))
"""
    message, left = run(code, FAKE_STATUS=701)
    assert message == "the CUDA driver's cuLaunchKernel failed with 701: so it is"
    assert left == 0


# --- arrays of NumPy are copied, those of a GPU are not -------------------------------------------


def test_numpy_arrays_go_there_and_back():
    code = """
q, k = ones(2, 3, 8), ones(1, 9, 8)
fastattn.attention(q, k, k, return_lse=True, backend="cuda")
print(json.dumps(log()))
"""
    lines = run(code)
    copies = [line for line in lines if line.startswith("to ")]
    sizes = [int(line.split()[2]) for line in copies]
    # A lone key head is one, however many heads read it.
    assert sizes == [2 * 3 * 8 * 4, 9 * 8 * 4, 9 * 8 * 4, 2 * 3 * 8 * 4, 2 * 3 * 4]
    assert [line.split()[1] for line in copies] == ["device"] * 3 + ["host"] * 2
    assert sum(line.startswith("allocate") for line in lines) == 5
    assert sum(line.startswith("free") for line in lines) == 5
    launches = [line for line in lines if line.startswith("launch")]
    assert launches == ["launch 1 1 1, 128 1 1, 0, (nil)"]
    assert [lines[0], lines[-1]] == ["push 0x1000", "pop"]


DEVICE_CALL = """
library.fake_ordinal(1)
q, k, v = ones(2, 4, 70, 8), ones(2, 2, 90, 16)[..., ::2], ones(2, 2, 90, 24)
out = ones(2, 4, 70, 24)
fastattn.attention(*map(Array, (q, k, v)), out=Array(out), causal=True, backend=BACKEND)
raw = (ctypes.c_int64 * FIELDS).from_address(library.fake_jobs())
places = [a.ctypes.data for a in (q, k, v, out)]
print(json.dumps([log(), list(raw), places]))
""".replace("FIELDS", str(len(FIELDS)))


@pytest.mark.parametrize("asked", ["auto", "cuda"])
def test_arrays_of_a_gpu_stay_there(asked):
    lines, raw, places = run(DEVICE_CALL.replace("BACKEND", repr(asked)))
    assert lines == [
        "push 0x1001",
        "module .versio",
        "function kernel",
        "launch 12 1 1, 128 1 1, 0, 0x5",
        "pop",
    ]
    (job,) = jobs(raw)
    assert [job[name] for name in ("q", "k", "v", "out")] == places
    assert [job["k" + part] for part in ("_table", "_batch", "_head", "_row", "_col")] == [
        0,
        2 * 90 * 16,
        90 * 16,
        16,
        2,
    ]
    sizes = ("batch", "heads_q", "heads_kv", "group", "seqlen_q", "seqlen_k", "head_dim")
    assert [job[name] for name in (*sizes, "head_dim_v")] == [2, 4, 2, 2, 70, 90, 8, 24]
    assert (job["offset"], job["right"], job["left"]) == (20, 0, 1 << 40)
    assert job["lse"] == job["mask"] == job["ranges"] == 0


def test_large_shared_memory_is_asked_for():
    code = """
q = np.ones((1, 300, 128), np.float16)
fastattn.attention(q, q, q, backend="cuda")
print(json.dumps([str(fastattn.explain(q, q, q, backend="cuda")), log()]))
"""
    text, lines = run(code)
    assert (
        "\nkernel      forward: tensor cores multiply float16, sums are float32; no wgmma" in text
    )
    (shared,) = {line.split(", ")[2] for line in lines if line.startswith("launch")}
    assert int(shared) > 48 << 10
    assert f"attribute 8 {shared}" in lines


def test_the_reason_for_scalar_arithmetic():
    code = """
half = lambda *shape: np.ones(shape, np.float16)
q, wide, odd = half(1, 3, 64), half(1, 3, 257), half(1, 1, 77)
pages = {"block_table": [[0]], "kv_len": [3]}
calls = [(ones(1, 3, 8), {}), (wide, {}), (odd, {}), (half(1, 1, 3, 9), pages), (q, {})]
texts = [str(fastattn.explain(a, a, a, backend="cuda", **flags)) for a, flags in calls]
print(json.dumps(texts))
"""
    reasons = (
        "tensor cores multiply 16-bit types, not float32 unless precision='tf32'",
        "head_dim is above 256",
        "rows for one query are not whole chunks of 16 aligned bytes",
        "rows of pages are not whole chunks of 16 aligned bytes",
    )
    for text, reason in zip(run(code), reasons, strict=False):
        assert f"kernel      simt: scalar arithmetic: {reason}\n" in text
    older = "no tensor cores for both 16-bit types and tf32 below compute capability 8.0"
    assert f"simt: scalar arithmetic: {older}\n" in run(code, FAKE_CAPABILITY=75)[-1]


def test_numbers_of_a_launch_are_floats_where_they_should_be():
    code = """
q = ones(3, 8)
fastattn.attention(q, q, q, scale=-0.5, softcap=2.5, backend="cuda")
raw = ctypes.string_at(library.fake_jobs(), 8 * FLOATS)
print(json.dumps(struct.unpack(f"{FLOATS}d", raw)))
""".replace("FLOATS", str(len(FLOATS)))
    found = dict(zip(FIELDS, run(code), strict=False))
    assert found["scale"] == -0.5
    assert found["scale_log2"] == pytest.approx(0.5 / 0.6931471805599453)
    assert (found["q_sign"], found["softcap"], found["dropout_factor"]) == (-1, 2.5, 1)


def test_other_streams_are_waited_for_on_the_device():
    code = """
q = ones(3, 8)
fastattn.attention(Array(q), Array(q, 7), Array(q, None), out=Array(ones(3, 8)))
print(json.dumps(log()))
"""
    lines = [line for line in run(code) if line.split()[0] in ("record", "wait", "launch")]
    assert sorted(lines[:-1]) == ["record (nil)", "record 0x7", "wait 0x5", "wait 0x5"]
    assert lines[-1].endswith("0x5")


def test_lengths_and_splits_need_memory_in_the_order_of_the_stream():
    code = """
q, k = ones(2, 2, 1, 8), ones(2, 2, 2000, 8)
fastattn.attention(Array(q), Array(k), Array(k), out=Array(q.copy()), kv_len=[9, 1800])
print(json.dumps(log()))
"""
    lines = run(code)
    launches = [line for line in lines if line.startswith("launch")]
    assert launches == ["launch 16 1 1, 128 1 1, 0, 0x5", "launch 4 1 1, 128 1 1, 0, 0x5"]
    assert [line for line in lines if "device" in line] == ["to device 64 0x5"]
    assert sum(line == "allocate 0x5" for line in lines) == 2
    assert sum(line == "free 0x5" for line in lines) == 2
    assert not any("synchronize" in line or "host" in line for line in lines)


def test_rows_that_see_nothing_have_a_kernel_of_their_own():
    code = """
q, k = ones(2, 1, 5, 8), ones(2, 1, 0, 8)
fastattn.attention(q, k, k, backend="cuda")
fastattn.attention(q, q, q, q_len=[5, 3], backend="cuda")
print(json.dumps(log()))
"""
    lines = run(code)
    names = [line for line in lines if line.startswith(("module", "launch"))]
    missing = "launch 10 1 1, 128 1 1, 0, (nil)"
    assert [n for n in names if n.startswith("launch")] == [
        missing,
        "launch 2 1 1, 128 1 1, 0, (nil)",
        missing,
    ]


# --- what is refused ------------------------------------------------------------------------------

REFUSED = [
    (
        "attention(g, g, q)",
        "v must be in the memory of q, that of GPU 1, got an array in the CPU's",
    ),
    ("attention(q, q, q, mask=gb, backend='cuda')", "mask must be in the memory of q, the CPU's,"),
    (
        "attention(g, g, g, out=o, backend='cpu')",
        "backend='cpu' needs arrays in the memory of the CPU, go",
    ),
    ("attention(g, g, g)", "out must be given where q is of __main__, which fastattn cannot ask"),
    ("attention(g, g, g, out=g, kv_len=gi)", "kv_len must be an array in the memory of the CPU, g"),
    ("attention(g, g, g, out=o, alibi=gh)", "alibi of a GPU must be float32 and contiguous, got f"),
    ("attention_backward(g, g, g, g, g, gl)", "out must be given where q is of __main__, which"),
    ("attention_backward(q, g, g, g, g, gl)", "dout must be in the memory of q, that of GPU 1, g"),
    ("attention(g, g, g, out=g)", "out must not overlap q, got arrays that share memory"),
    ("attention_weights(g, q)", "k must be in the memory of q, that of GPU 1, got an array in the"),
]


def test_refused():
    code = f"""
library.fake_ordinal(1)
q = ones(3, 8)
g, o, gb = Array(q), Array(q.copy()), Array(np.ones((3, 3), bool))
gh, gi = Array(np.ones(1, np.float16)), Array(np.ones(1, np.int64))
gl = Array(ones(3))
messages = []
for call in {[call for call, _ in REFUSED]}:
    try:
        eval("fastattn." + call)
        messages.append("")
    except (TypeError, ValueError) as error:
        messages.append(str(error))
print(json.dumps([messages, log()]))
"""
    messages, lines = run(code)
    for (call, wanted), message in zip(REFUSED, messages, strict=True):
        assert message.startswith(wanted), call
    assert lines == []
