"""The wheel, built from the source distribution: what is in it, and that it needs no compiler."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import emulated
import numpy as np
import pytest
import test_attention
import test_backward
from cases import CASES
from processes import fresh

import fastattn
from fastattn import nn
from fastattn.cpu import built_in, prebuilt
from fastattn.machine import TARGETS, listed_features, runnable_targets

pytest.importorskip("numba")
ROOT = Path(__file__).parent.parent
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (ROOT / "pyproject.toml").exists(), reason="no source tree"),
]
runnable = runnable_targets(listed_features())
here = pytest.mark.skipif(not runnable, reason="no images run on this system")

HALF = ("float16", "bfloat16")

BUILD = "import sys, fastattn_build; print(fastattn_build.build_sdist(sys.argv[1]))"
NOT_SOURCES = (".*", "build", "dist", "*.egg-info", "__pycache__", "results")
PIP = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-build-isolation", "--no-deps"]


@pytest.fixture(scope="module")
def wheel(pytestconfig, tmp_path_factory):
    """The wheel's file, built from the source distribution of a copy of the tree."""
    if given := pytestconfig.getoption("--wheel"):
        return Path(given).resolve()
    folder = tmp_path_factory.mktemp("wheel")
    shutil.copytree(ROOT, folder / "tree", ignore=shutil.ignore_patterns(*NOT_SOURCES))
    environment = {k: v for k, v in os.environ.items() if not k.startswith("FASTATTN_")}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # users do not set it, and want no bytecode
    environment["PYTHONPATH"] = str(ROOT / "building")
    command = [sys.executable, "-c", BUILD, str(folder)]
    subprocess.run(command, cwd=folder / "tree", env=environment, check=True)
    (sources,) = folder.glob("*.tar.gz")
    del environment["PYTHONPATH"]
    command = [*PIP, "--wheel-dir", str(folder), str(sources)]
    subprocess.run(command, cwd=folder, env=environment, check=True)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """The folder that holds what the wheel does."""
    folder = tmp_path_factory.mktemp("installed")
    zipfile.ZipFile(wheel).extractall(folder)
    return folder


@pytest.fixture
def copy(installed, tmp_path):
    """A copy of it that a test may spoil."""
    return Path(shutil.copytree(installed, tmp_path / "copy"))


def test_wheel_is_small_and_whole(wheel):
    assert wheel.name == f"fastattn-{fastattn.__version__}-py3-none-any.whl"
    assert wheel.stat().st_size < 5 << 20
    names = zipfile.ZipFile(wheel).namelist()
    sources = {path.relative_to(ROOT).as_posix() for path in (ROOT / "fastattn").rglob("*.py")}
    images = [name for name in names if name.endswith(".img")]
    assert len(images) == len(TARGETS) * len(built_in.kernels())
    others = {name for name in names if ".dist-info/" not in name} - set(images)
    assert others == sources | {"fastattn/py.typed"}


def test_wheel_has_every_kernel_of_every_target(installed):
    folder = installed / "fastattn" / "cpu" / "prebuilt"
    for target in TARGETS:
        for key in built_in.kernels():
            assert prebuilt.image_path(folder, key, target).exists()


CALL = """
import json, sys, time
sys.modules["numba"] = sys.modules["llvmlite"] = None
import numpy as np
q = np.ones((1, 8, 256, 64), np.float32)
start, spent = time.perf_counter(), time.process_time()
import fastattn
out = fastattn.attention(q, q, q)
took = min(time.perf_counter() - start, time.process_time() - spent)
plan = fastattn.explain(q, q, q)
print(json.dumps([bool((out == 1).all()), plan.backend, dict(plan.rejected).get("cpu", ""), took]))
"""


@here
@pytest.mark.parametrize("target", [None, *runnable])
def test_first_call_needs_no_compiler(installed, tmp_path, target):
    cache = tmp_path / "cache"
    where = {"PYTHONPATH": installed, "FASTATTN_TARGET": target}
    fresh(CALL, cache, **where)  # writes the bytecode, as pip does
    *answer, took = fresh(CALL, cache, **where)
    assert answer == [True, "cpu", ""]
    assert took <= 0.2
    assert not cache.exists()


@here
def test_edited_sources_do_not_run_prebuilt_kernels(copy, tmp_path):
    with (copy / "fastattn" / "cpu" / "simd.py").open("a") as file:
        file.write("# edited\n")
    right, backend, why, _ = fresh(CALL, tmp_path / "cache", PYTHONPATH=copy)
    assert (right, backend) == (True, "numpy")
    assert why.startswith("llvmlite")


@here
def test_damaged_kernels_do_not_run(copy, tmp_path):
    for path in copy.rglob("*.img"):
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)
    right, backend, why, _ = fresh(CALL, tmp_path / "cache", PYTHONPATH=copy)
    assert (right, backend) == (True, "numpy")
    assert why.startswith("llvmlite")


@here
@pytest.mark.parametrize("target", runnable)
def test_every_case_on_this_machine(installed, tmp_path, target):
    """The tests of attention, without a compiler."""
    (tmp_path / "numba.py").write_text("raise ModuleNotFoundError(name='numba')")
    (tmp_path / "llvmlite.py").write_text("raise ModuleNotFoundError(name='llvmlite')")
    path = os.pathsep.join([str(tmp_path), str(installed)])
    environment = {**os.environ, "PYTHONPATH": path, "FASTATTN_TARGET": target}
    command = [sys.executable, "-c", "import pytest, sys; sys.exit(pytest.main(sys.argv[1:]))"]
    command += [
        "-q",
        "-p",
        "no:cacheprovider",
        "--rootdir",
        str(ROOT),
        "-c",
        str(ROOT / "pyproject.toml"),
    ]
    command += ["--backend", "cpu", str(ROOT / "tests" / "test_attention.py")]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert " passed" in done.stdout
    assert "backend cpu:" not in done.stdout, "skipped"


@pytest.fixture
def arm(installed):
    with emulated.everywhere(installed / "fastattn" / "cpu" / "prebuilt"):
        yield


@pytest.mark.parametrize("case", CASES[::4], ids=str)
def test_attention_on_arm(case, arm):
    test_attention.test_error_is_at_most_twice_the_formulas(case, "cpu")


def test_pages_on_arm(arm, rng):
    q, k, v = rng.standard_normal((3, 2, 2, 300, 24)).astype(np.float32)
    pages = [
        a[:, :, :288].reshape(2, 2, 9, 32, 24).swapaxes(1, 2).reshape(18, 2, 32, 24) for a in (k, v)
    ]
    table = np.arange(18).reshape(2, 9)
    found = fastattn.attention(q[:, :, :5], *pages, block_table=table, backend="cpu")
    whole = fastattn.attention(q[:, :, :5], k[:, :, :288], v[:, :, :288], backend="cpu")
    np.testing.assert_array_equal(found, whole)


@pytest.mark.parametrize("case", [c for c in CASES[::44] if c.dtype not in HALF], ids=str)
def test_gradients_on_arm(case, arm):
    test_backward.test_error_is_at_most_twice_the_formulas(case, "cpu")


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("function", ["relu", "gelu", "gelu_tanh", "silu"])
def test_activations_on_arm(function, dtype, arm, rng):
    x = rng.standard_normal((37, 41)).astype(dtype)
    ours, numpys = (getattr(nn, function)(x, backend=b) for b in ("cpu", "numpy"))
    np.testing.assert_allclose(ours, numpys, rtol=0, atol=8 * np.finfo(dtype).eps)
