"""What is asked of the driver, on a stub of it that runs no kernel: tests/fakecuda/fake.c."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import fastattn
from fastattn.cuda.job import FIELDS, FLOATS, GRADIENT_FIELDS

TESTS = Path(__file__).parent
PRELUDE = """
import ctypes, json, struct, warnings
import numpy as np
import fastattn
from fastattn.cuda import compile, driver
from fastattn.cuda.driver import Code
compile.code = lambda key, build: Code("kernel", f".version {key[0]}")
compile.unavailable = lambda key: ""
library = ctypes.CDLL("libcuda.so.1")
library.fake_log.restype = ctypes.c_char_p
library.fake_jobs.restype = ctypes.c_void_p
def log():
    return library.fake_log().decode().splitlines()

class Array:
    # One of a GPU, of a library that fastattn does not know
    def __init__(self, array, stream=5):
        self.array = array
        interface = dict(array.__array_interface__, stream=stream, version=3)
        self.__cuda_array_interface__ = {k: v for k, v in interface.items() if k != "descr"}

ones = lambda *shape: np.ones(shape, np.float32)
"""


@pytest.fixture(scope="module")
def stub(tmp_path_factory):
    """The folder of the stub."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None or sys.platform != "linux":
        pytest.skip("needs a C compiler and Linux")
    folder = tmp_path_factory.mktemp("fakecuda")
    source = TESTS / "fakecuda" / "fake.c"
    command = [compiler, "-shared", "-fPIC", "-O1", "-o", folder / "libcuda.so.1", source]
    subprocess.run(command, check=True)
    return folder


def run(stub, code, **environment):
    """What the code prints, as JSON."""
    variables = os.environ | {"PYTHONPATH": str(Path(fastattn.__file__).parent.parent)}
    variables |= {"LD_LIBRARY_PATH": str(stub), "FAKE_PARAMETERS": str(len(FIELDS))}
    variables |= {name: str(value) for name, value in environment.items()}
    command = [sys.executable, "-W", "error", "-c", PRELUDE + code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, env=variables)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def jobs(raw):
    """The parameters of each launch by name."""
    size = len(FIELDS)
    rows = [raw[start : start + size] for start in range(0, len(raw), size)]
    return [dict(zip(FIELDS, row, strict=True)) for row in rows]


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
def test_the_reason_is_named(stub, environment, reason):
    message, out = run(stub, ATTEMPT, **environment)
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


def test_a_launch_that_fails_says_why(stub):
    code = """
try:
    fastattn.attention(ones(4, 4), ones(4, 4), ones(4, 4), backend="cuda")
except driver.DriverError as error:
    print(json.dumps([str(error), log().count("allocate (nil)") - log().count("free (nil)")]))
"""
    message, left = run(stub, code, FAKE_STATUS=701)
    assert message == "the CUDA driver's cuLaunchKernel failed with 701: so it is"
    assert left == 0


# --- arrays of NumPy are copied, those of a GPU are not -------------------------------------------


def test_numpy_arrays_go_there_and_back(stub):
    code = """
q, k = ones(2, 3, 8), ones(1, 9, 8)
fastattn.attention(q, k, k, return_lse=True, backend="cuda")
print(json.dumps(log()))
"""
    lines = run(stub, code)
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
def test_arrays_of_a_gpu_stay_there(stub, asked):
    lines, raw, places = run(stub, DEVICE_CALL.replace("BACKEND", repr(asked)))
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


def test_large_shared_memory_is_asked_for(stub):
    code = """
q = np.ones((1, 300, 128), np.float16)
fastattn.attention(q, q, q, backend="cuda")
print(json.dumps([str(fastattn.explain(q, q, q, backend="cuda")), log()]))
"""
    text, lines = run(stub, code)
    assert (
        "\nkernel      forward: tensor cores multiply float16, sums are float32; no wgmma" in text
    )
    (shared,) = {line.split(", ")[2] for line in lines if line.startswith("launch")}
    assert int(shared) > 48 << 10
    assert f"attribute 8 {shared}" in lines


def test_numbers_of_a_launch_are_floats_where_they_should_be(stub):
    code = """
q = ones(3, 8)
fastattn.attention(q, q, q, scale=-0.5, softcap=2.5, backend="cuda")
raw = ctypes.string_at(library.fake_jobs(), 8 * FLOATS)
print(json.dumps(struct.unpack(f"{FLOATS}d", raw)))
""".replace("FLOATS", str(len(FLOATS)))
    found = dict(zip(FIELDS, run(stub, code), strict=False))
    assert found["scale"] == -0.5
    assert found["scale_log2"] == pytest.approx(0.5 / 0.6931471805599453)
    assert (found["q_sign"], found["softcap"], found["dropout_factor"]) == (-1, 2.5, 1)


def test_other_streams_are_waited_for_on_the_device(stub):
    code = """
q = ones(3, 8)
fastattn.attention(Array(q), Array(q, 7), Array(q, None), out=Array(ones(3, 8)))
print(json.dumps(log()))
"""
    lines = [line for line in run(stub, code) if line.split()[0] in ("record", "wait", "launch")]
    assert sorted(lines[:-1]) == ["record (nil)", "record 0x7", "wait 0x5", "wait 0x5"]
    assert lines[-1].endswith("0x5")


def test_lengths_and_splits_need_memory_in_the_order_of_the_stream(stub):
    code = """
q, k = ones(2, 2, 1, 8), ones(2, 2, 2000, 8)
fastattn.attention(Array(q), Array(k), Array(k), out=Array(q.copy()), kv_len=[9, 1800])
print(json.dumps(log()))
"""
    lines = run(stub, code)
    launches = [line for line in lines if line.startswith("launch")]
    assert launches == ["launch 16 1 1, 128 1 1, 0, 0x5", "launch 4 1 1, 128 1 1, 0, 0x5"]
    assert [line for line in lines if "device" in line] == ["to device 64 0x5"]
    assert sum(line == "allocate 0x5" for line in lines) == 2
    assert sum(line == "free 0x5" for line in lines) == 2
    assert not any("synchronize" in line or "host" in line for line in lines)


def test_rows_that_see_nothing_have_a_kernel_of_their_own(stub):
    code = """
q, k = ones(2, 1, 5, 8), ones(2, 1, 0, 8)
fastattn.attention(q, k, k, backend="cuda")
fastattn.attention(q, q, q, q_len=[5, 3], backend="cuda")
print(json.dumps(log()))
"""
    lines = run(stub, code)
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


def test_refused(stub):
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
    messages, lines = run(stub, code)
    for (call, wanted), message in zip(REFUSED, messages, strict=True):
        assert message.startswith(wanted), call
    assert lines == []


# --- the same call again --------------------------------------------------------------------------


def test_a_call_is_prepared_for_other_arrays_of_its_layout(stub):
    code = """
from fastattn.cuda import run
made = []
keep = run._keep
run._keep = lambda *arguments: made.append(0) or keep(*arguments)
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
    made, lines, raw, places = run(stub, code)
    assert made == 2
    launches = [line.rpartition(", ")[2] for line in lines if line.startswith("launch")]
    assert launches == ["0x5", "0x5", "0x9", "0x5"]
    first, *others, strided = jobs(raw)
    names = "q", "k", "v", "out"
    for job, wanted in zip((first, *others), places, strict=True):
        assert [job[name] for name in names] == wanted
        assert job | dict.fromkeys(names) == first | dict.fromkeys(names)
    assert strided["q_col"] == 2


def test_parts_of_a_prepared_call_have_memory_of_their_own(stub):
    code = """
q, k = ones(2, 2, 1, 8), ones(2, 2, 2000, 8)
for _ in range(2):
    fastattn.attention(Array(q), Array(k), Array(k), out=Array(q.copy()))
raw = (ctypes.c_int64 * (4 * FIELDS)).from_address(library.fake_jobs())
print(json.dumps([log(), list(raw)]))
""".replace("FIELDS", str(len(FIELDS)))
    lines, raw = run(stub, code)
    assert sum(line == "allocate 0x5" for line in lines) == 2
    assert sum(line == "free 0x5" for line in lines) == 2
    for job in jobs(raw):
        # 4 parts of 512 keys for 4 rows of 8 numbers of 4 bytes, then their references and sums
        assert job["partial_state"] - job["partial"] == 4 * 4 * 8 * 4
        assert job["num_splits"] == 4


@pytest.mark.slow
def test_what_a_call_costs_is_measured(stub):
    script = TESTS.parent / "bench" / "cuda_calls.py"
    variables = os.environ | {"PYTHONPATH": str(TESTS.parent)}
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, env=variables)
    assert done.returncode == 0, done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["call", "launch", "gradients"]


# --- gradients ------------------------------------------------------------------------------------


def test_gradients_of_arrays_of_a_gpu_stay_there(stub):
    code = """
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
half = lambda *shape: Of(np.ones(shape, np.float16))
q, k, lse = half(2, 4, 70, 16), half(2, 2, 90, 16), Of(ones(2, 4, 70))
found = fastattn.attention_backward(q, q, k, k, q, lse, sinks=[1.0] * 4, return_dsinks=True)
shapes = [a.array.shape for a in made]
same = [int(a) == b.array.ctypes.data for a, b in zip(found, made)]
print(json.dumps([log(), shapes, [a.array.dtype.name for a in made], same]))
"""
    lines, shapes, dtypes, same = run(stub, code, FAKE_PARAMETERS=len(GRADIENT_FIELDS))
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


def test_how_gradients_are_computed_is_explained(stub):
    code = """
q = np.ones((1, 300, 64), np.float16)
texts = [str(fastattn.explain(q, q, q, backend="cuda", gradients=True, bias=bias))
         for bias in (None, np.ones(300, np.float32))]
print(json.dumps(texts))
"""
    fast, scalar = run(stub, code)
    assert "kernel      gradients: tensor cores multiply float16, sums are float32\n" in fast
    assert "kernel      simt gradients: scalar arithmetic" in scalar
    assert "75 of 128 for rows, 5 of 128 for dq, 5 of 128 for dk and dv" in fast
