"""A GPU whose driver is a stub that runs no kernel and logs what it is asked: tests/fakecuda."""

from __future__ import annotations

import atexit
import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

import fastattn
from fastattn.cuda.job import FIELDS

SOURCE = Path(__file__).parent / "fakecuda" / "fake.c"
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


@functools.cache
def stub():
    """The folder of the stub."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None or sys.platform != "linux":
        pytest.skip("needs a C compiler and Linux")
    folder = tempfile.TemporaryDirectory()
    atexit.register(folder.cleanup)
    command = [compiler, "-shared", "-fPIC", "-O1", "-o", Path(folder.name, "libcuda.so.1"), SOURCE]
    subprocess.run(command, check=True)
    return folder.name


def run(code, **environment):
    """What the code prints, as JSON."""
    variables = os.environ | {"PYTHONPATH": str(Path(fastattn.__file__).parent.parent)}
    variables |= {"LD_LIBRARY_PATH": stub(), "FAKE_PARAMETERS": str(len(FIELDS))}
    variables |= {name: str(value) for name, value in environment.items()}
    command = [sys.executable, "-W", "error", "-c", PRELUDE + code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=550, env=variables)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def jobs(raw, fields=FIELDS):
    """The parameters of each launch by name."""
    rows = [raw[start : start + len(fields)] for start in range(0, len(raw), len(fields))]
    return [dict(zip(fields, row, strict=True)) for row in rows]
