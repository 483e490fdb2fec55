"""Helpers that run code in a process of its own, with a cache and an environment of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import fastattn

PACKAGE = Path(fastattn.__file__).parent
# A kernel that compiles at once: it leaves 2**0, as elementary.py has it, and a number of its own.
SMALL = """
import json, sys
import numpy as np
from fastattn.cpu import compile

def build(unit):
    from fastattn.cpu.memory import address, pointer_to
    from fastattn.cpu.simd import operations
    simd = operations("float32", unit.lanes(4))
    real, exp2, splat, store = pointer_to("float32"), simd.exp2, simd.splat, simd.store
    def kernel(job, scratch, quota):
        store(real(address(job)), 0, exp2(splat(np.float32(0))))
        return quota + 1
    return kernel

out = np.zeros(64, np.float32)
run = compile.kernel("small", build)
answer = run(out.ctypes.data, 0, 41)
print(json.dumps([answer, float(out[0]), "numba" in sys.modules]))
"""


def start(code, cache, *flags, **environment):
    """A process of its own that runs `code` with this cache and these variables."""
    dropped = ("FASTATTN_", "PYTHONDONTWRITEBYTECODE")
    variables = {k: v for k, v in os.environ.items() if not k.startswith(dropped)}
    if cache is not None:
        variables["FASTATTN_CACHE"] = str(cache)
    variables["PYTHONPATH"] = str(PACKAGE.parent)
    for name, value in environment.items():
        variables.pop(name, None)
        if value is not None:
            variables[name] = str(value)
    # Python looks for modules where it is started: at the root, there are none.
    command = [sys.executable, "-W", "error", *flags, "-c", code]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, env=variables, cwd=Path(os.sep), **pipes)


def finish(process):
    """What the process printed, as JSON. It must not have said anything else."""
    out, err = process.communicate(timeout=280)
    assert process.returncode == 0, err
    assert err == ""
    return json.loads(out)


def fresh(code, cache, *flags, **environment):
    return finish(start(code, cache, *flags, **environment))
