"""What fastattn sees of this machine, and what it will do there."""

from __future__ import annotations

import argparse
import os
import platform
from collections.abc import Iterator

from .. import machine
from ..benchmark import limits, record
from ..cpu import cache, compile, prebuilt
from ..cpu.run import unavailable
from ..cpu.threads import get_num_threads
from ..problem import Variant

HELP = "show the processor, backends, threads and the cache of kernels"
SETTINGS = (
    "FASTATTN_CACHE",
    "FASTATTN_DEBUG",
    "FASTATTN_TARGET",
    "FASTATTN_WGMMA",
    "OMP_NUM_THREADS",
    "OMP_WAIT_POLICY",
    "OPENBLAS_CORETYPE",
)
FLOAT32 = Variant("float32", "float32")
UNIT_NAMES = {machine.AVX512: "AVX-512", machine.AVX2: "AVX2", machine.NEON: "NEON"}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--measure",
        action="store_true",
        help="measure the multiply-add peak and the memory bandwidth (some seconds)",
    )


def run(options: argparse.Namespace) -> None:
    """Print a line for each fact."""
    why_not = unavailable(FLOAT32)
    lines = [*machine_lines(), *backend_lines(why_not)]
    if options.measure:
        lines += list(measured_lines())
    for name, text in lines:
        print(f"{name:<11} {text}")


def machine_lines() -> Iterator[tuple[str, str]]:
    """What the computer is and what is installed."""
    python = f"Python {platform.python_version()}, {platform.system()} {platform.machine()}"
    yield "processor", machine.cpu_name()
    level1, level2 = (size >> 10 for size in machine.cache_bytes())
    yield "caches", f"level 1 {level1} KiB, level 2 {level2} KiB of each core"
    yield "threads", f"{get_num_threads()}: the least of CPUs granted, quota and OMP_NUM_THREADS"
    versions = (f"{name} {version}" for name, version in record.versions().items())
    yield "versions", ", ".join((python, *versions))
    for name in SETTINGS:
        if name in os.environ:
            yield "set", f"{name}={os.environ[name]}"


def backend_lines(why_not: str) -> Iterator[tuple[str, str]]:
    """What would run, and why."""
    if why_not:
        yield "cpu", f"not available: {why_not}"
    else:
        unit = compile.host_unit()
        lanes = f"{unit.lanes(4)} float32 or {unit.lanes(8)} float64"
        yield "registers", f"{UNIT_NAMES[unit]}: {unit.registers} of {lanes}"
        came = prebuilt.load(("forward", FLOAT32))
        source = f"from the package, for {prebuilt.host_name()}" if came else "compiled here"
        yield "cpu", f"available: kernels {source}"
    yield "numpy", "available" + (": what backend='auto' uses here" if why_not else "")
    yield "cache", cache_text()


def cache_text() -> str:
    """Where compiled kernels are kept, how many, or why they are not."""
    folder, reason = cache.folder_or_reason()
    if folder is None:
        return f"none: {reason}"
    sizes = [path.stat().st_size for path in folder.glob("*.obj")]
    text = f"{folder}: {len(sizes)} kernels of any version, {sum(sizes) / 1e6:.1f} MB"
    return text if os.access(folder, os.W_OK) else f"{text}; it cannot be written"


def measured_lines() -> Iterator[tuple[str, str]]:
    """Peaks and bandwidth of one thread and of all."""
    for number in sorted({1, get_num_threads()}):
        on = f"{number} thread" + "s" * (number > 1)
        single, double = (limits.multiply_add_peak(t, number) for t in ("float32", "float64"))
        yield "peak", f"{single:.1f} GFLOP/s float32, {double:.1f} float64 on {on}"
        yield "memory", f"{limits.read_bandwidth(number):.1f} GB/s read by {on}"
