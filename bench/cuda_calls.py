"""What a call with arrays of a GPU costs the CPU, on a stub of the driver: no GPU is needed.

python bench/cuda_calls.py

call      attention() of one small problem, with out
launch    what of it is left once the arguments are checked: a prepared call's addresses and launch
gradients attention_backward() of the same

The stub (tests/fakecuda) does nothing, so the driver's own time, 2 to 4 us for a launch, comes on
top. Times are of this thread, the best of several runs.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import repository

ROUNDS, COUNT = 15, 200
CHILD = "FASTATTN_CUDA_CALLS"


class Array:
    """One of a GPU, of a library whose arrays fastattn can make."""

    __module__ = "numba.stub"

    def __init__(self, array: np.ndarray):
        self.array = array
        kept = ("shape", "typestr", "data", "version", "strides")
        interface = array.__array_interface__
        self.__cuda_array_interface__ = {k: interface[k] for k in kept} | {"stream": 5}


def best(run: Callable[[], Any]) -> float:
    """Microseconds of a call."""
    times = []
    for _ in range(ROUNDS):
        start = time.thread_time()
        for _ in range(COUNT):
            run()
        times.append((time.thread_time() - start) / COUNT)
    return min(times) * 1e6


def measure() -> None:
    """Print the times."""
    import fastattn
    from fastattn.cuda import compile
    from fastattn.cuda import run as running
    from fastattn.cuda.driver import Code

    compile.code = lambda key, build: Code("kernel", f".version {key[0]}")
    compile.unavailable = lambda key: ""
    sys.modules["numba.cuda"] = SimpleNamespace(  # type: ignore[assignment]
        device_array=lambda shape, dtype: Array(np.empty(shape, dtype)),
        as_cuda_array=lambda array, sync: array,
    )
    half = [Array(np.ones((1, 8, 16, 64), np.float16)) for _ in range(5)]
    q, k, v, out, dout = half
    lse = Array(np.ones((1, 8, 16), np.float32))
    print(f"call       {best(lambda: fastattn.attention(q, k, v, out=out, causal=True)):.1f} us")
    asked: list[Any] = []
    whole = running._launch_again
    running._launch_again = lambda *arguments: asked.append(arguments) or whole(*arguments)
    fastattn.attention(q, k, v, out=out, causal=True)
    print(f"launch     {best(lambda: whole(*asked[-1])):.1f} us")
    gradients = best(lambda: fastattn.attention_backward(dout, q, k, v, out, lse, causal=True))
    print(f"gradients  {gradients:.1f} us")


def main() -> None:
    repository.parser(__doc__).parse_args()
    if os.environ.get(CHILD):
        measure()
        return
    source = repository.ROOT / "tests" / "fakecuda" / "fake.c"
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder, "libcuda.so.1")
        subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", library, source], check=True)
        variables = os.environ | {"LD_LIBRARY_PATH": folder, CHILD: "1", "FAKE_QUIET": "1"}
        subprocess.run([sys.executable, __file__], check=True, env=variables)


if __name__ == "__main__":
    main()
