"""PTX -> machine code, as NVIDIA's assembler reports it and its disassembler shows it."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from functools import cache, cached_property
from importlib.util import find_spec
from pathlib import Path

import pytest


class Assembled:
    """What a kernel became. Its instructions are looked at when they are asked for: that takes as
    long as all the rest.
    """

    def __init__(self, report: str, binary: bytes):
        spilled = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", report)
        self.registers = int(re.search(r"Used (\d+) registers", report)[1])  # of a thread
        self.spilled = int(spilled[1]) + int(spilled[2])  # bytes of registers kept in memory
        self.binary = binary

    @cached_property
    def _listed(self) -> tuple[list[tuple[str, str]], Counter]:
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(self.binary)
            file.flush()
            return listed(_run("nvdisasm", "-c", file.name))

    @property
    def code(self) -> list[tuple[str, str]]:
        """All instructions in order: (name, what follows it)."""
        return self._listed[0]

    @property
    def instructions(self) -> Counter:
        """How many there are by name, without what follows a dot."""
        return Counter(name for name, _ in self.code)

    @property
    def loop(self) -> Counter:
        """Those of the longest loop."""
        return self._listed[1]


def need_assembler():
    """Skip the test module where ptxas or nvdisasm is not installed."""
    for name in ("ptxas", "nvdisasm"):
        if _tool(name) is None:
            package = {"ptxas": "nvidia-cuda-nvcc", "nvdisasm": "nvidia-cuda-nvdisasm"}[name]
            pytest.skip(f"{package} is not installed", allow_module_level=True)


@cache
def _tool(name: str) -> Path | None:
    """Where a package of pip keeps a program of the CUDA toolkit."""
    spec = find_spec("nvidia")
    folders = list(spec.submodule_search_locations or ()) if spec else []
    return next((p for f in folders for p in sorted(Path(f).glob(f"*/bin/{name}"))), None)


@cache
def assemble(ptx: str, target: str, divides: bool = False) -> Assembled:
    """For a target such as "sm_80". Fails where ptxas does, or where it warns; unless it divides,
    also at a long division.
    """
    with tempfile.TemporaryDirectory() as folder:
        source, file = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
        source.write_text(ptx)
        report = _run("ptxas", "-v", f"-arch={target}", source, "-o", file)
        binary = file.read_bytes()
    assert "warning" not in report, report
    assert "Performance Loss" not in report, report
    assert divides or b"__internal" not in binary, (
        "a function of the compiler's own, for a long division"
    )
    return Assembled(report, binary)


def _run(name: str, *arguments) -> str:
    done = subprocess.run([_tool(name), *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def listed(listing: str) -> tuple[list[tuple[str, str]], Counter]:
    """(all instructions, a count of those of the longest loop)."""
    code, labels, jumps = [], {}, []
    for line in listing.splitlines():
        label = re.match(r"\s*(\.L_\w+):", line)
        if label:
            labels[label[1]] = len(code)
        found = re.match(r"\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*)(.*);", line)
        if found:
            jump = re.search(r"`\((\.L_\w+)\)", found[2]) if found[1] == "BRA" else None
            jumps += [(jump[1], len(code))] if jump else []
            code.append((found[1], found[2]))
    back = [(labels[name], place) for name, place in jumps if labels.get(name, place + 1) <= place]
    first, last = max(back, key=lambda jump: jump[1] - jump[0], default=(0, -1))
    return code, Counter(name for name, _ in code[first : last + 1])
