"""Build fastattn with setuptools, and compile the kernels that a wheel brings with it.

Editable installs have none and need no compiler: there, kernels are compiled when they are called.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from setuptools import build_meta
from setuptools.build_meta import *  # noqa: F403
from setuptools.command.build_py import build_py

COMPILER = "numba>=0.61; python_version < '3.15'"  # as in pyproject.toml


def get_requires_for_build_wheel(config_settings=None):
    """PEP 517: what is needed to build a wheel, but not to install an editable copy."""
    return [*build_meta.get_requires_for_build_wheel(config_settings), COMPILER]


class BuildWithKernels(build_py):
    """Copy the sources, then compile what they say."""

    def run(self):
        super().run()
        if self.editable_mode:
            return
        if importlib.util.find_spec("numba") is None:
            self.warn("numba is not installed: the wheel will have no prebuilt kernels")
            return
        # In a process of its own, which imports the copy, as kernels are keyed by its sources, and
        # leaves no bytecode in it, which would go into the wheel.
        subprocess.run([sys.executable, "-B", __file__, self.build_lib], check=True)


def compile_kernels(root: Path) -> None:
    """Compile every built-in kernel for every named target, into the package under `root`."""
    from fastattn.cpu import built_in, prebuilt
    from fastattn.machine import TARGETS, default_num_threads

    assert prebuilt.FOLDER.is_relative_to(root)
    shutil.rmtree(prebuilt.FOLDER, ignore_errors=True)
    prebuilt.FOLDER.mkdir()
    jobs = [(target, key) for target in TARGETS for key in built_in.kernels()]
    with ProcessPoolExecutor(default_num_threads()) as pool:
        list(pool.map(compile_kernel, *zip(*jobs, strict=True)))


def compile_kernel(target: str, key) -> None:
    """Compile one kernel."""
    from fastattn.cpu import built_in, compile, prebuilt

    machine = compile.named_target(target)
    entry, code = compile.compile_object(built_in.kernels()[key](machine.unit), machine)
    prebuilt.write(prebuilt.FOLDER, key, target, entry, code)


if __name__ == "__main__":
    os.environ["FASTATTN_CACHE"] = "0"
    sys.path.insert(0, sys.argv[1])
    compile_kernels(Path(sys.argv[1]).resolve())
