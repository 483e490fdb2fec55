"""What `import fastattn` costs and what it leaves alone, in fresh processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from fastattn import optional

TIMES = """
import json, time
start = time.process_time()
import numpy
middle = time.process_time()
import fastattn
print(json.dumps([middle - start, time.process_time() - middle]))
"""


def fresh(code, *flags):
    """Return what `code` prints in a process of its own, which may keep its bytecode."""
    command = [sys.executable, *flags, "-c", code]
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, timeout=250, env=environment
    )
    return done.stdout.strip()


def test_import_loads_no_compiler():
    heavy = ("numba", "llvmlite", "torch", "scipy", "jax", "ml_dtypes", "matplotlib", "rich")
    code = f"import sys, fastattn; print([m for m in {heavy} if m in sys.modules])"
    assert fresh(code, "-W", "error") == "[]"


def test_numpy_backend_loads_no_compiler():
    code = """
import sys, numpy, fastattn
q = numpy.ones((3, 2))
fastattn.attention(q, q, q, causal=True, backend="numpy")
print("numba" in sys.modules, "llvmlite" in sys.modules)
"""
    assert fresh(code, "-W", "error") == "False False"


@pytest.mark.slow
@pytest.mark.parametrize("first", ["torch", "fastattn"])
def test_torch_may_be_imported_before_or_after(first):
    """Two OpenMP runtimes in one process crash: fastattn brings none."""
    pytest.importorskip("torch")
    code = f"""
import numpy, {first}, fastattn
q = numpy.ones((4, 300, 64), numpy.float32)
one = fastattn.attention(q, q, q, causal=True)
import torch
both = torch.ones(500, 500) @ torch.ones(500, 500)
print(fastattn.attention(q, q, q, causal=True).tobytes() == one.tobytes(), both[0, 0].item())
"""
    assert fresh(code, "-W", "error") == "True 500.0"


def test_import_time_is_a_fraction_of_numpys():
    # Of the processor, and both in one process, so that they share the machine's mood; the least of
    # each is its cost.
    fresh(TIMES)  # writes the bytecode
    for _ in range(3):
        numpy, ours = map(min, zip(*(json.loads(fresh(TIMES)) for _ in range(5)), strict=True))
        if ours <= 0.3 * numpy:
            return
    pytest.fail(f"fastattn adds {ours * 1e3:.0f} ms to the {numpy * 1e3:.0f} ms of NumPy")


def test_version_and_names():
    version = fresh("import fastattn; print(fastattn.__version__)")
    assert version[0].isdigit()
    code = "import fastattn; print(all(hasattr(fastattn, name) for name in fastattn.__all__))"
    assert fresh(code) == "True"


def test_unknown_name():
    import fastattn

    with pytest.raises(AttributeError, match="module 'fastattn' has no attribute 'nothing'"):
        fastattn.nothing  # noqa: B018


@pytest.mark.parametrize("name", ["dask", "jax", "torch"])
def test_a_missing_package_is_said_with_the_command(name):
    code = f"""
import sys, fastattn
sys.modules["{name}"] = None
try:
    fastattn.{name}
except ImportError as error:
    print(error)
"""
    needs = f"fastattn.{name} needs {name}, which is not installed"
    assert fresh(code) == f"{needs}: pip install 'fastattn[{name}]'"


def test_jax_that_means_something_else_is_refused():
    code = """
import sys, types, fastattn
jax = sys.modules["jax"] = types.ModuleType("jax")
jax.__version__, jax.__version_info__ = "0.8.2", (0, 8, 2)
try:
    fastattn.jax
except ImportError as error:
    print(error)
"""
    assert fresh(code).startswith("fastattn.jax needs jax 0.8.3 or newer, got 0.8.2: pip install")


@pytest.mark.parametrize(
    ("package", "call"),
    [
        ("ml_dtypes", lambda: optional.bfloat16.__wrapped__()),
        ("matplotlib.pyplot", lambda: optional.pyplot("a picture")),
    ],
)
def test_the_absence_of_parts_of_packages(package, call, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    name = package.split(".")[0]
    why = f" needs {name}, which is not installed: pip install {name}$"
    with pytest.raises(ImportError, match=why):
        call()
