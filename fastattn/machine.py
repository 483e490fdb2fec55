"""Facts about this computer, each read once and lazily. Nothing here imports a compiler."""

from __future__ import annotations

import os
import platform
import re
import sys
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path, PurePosixPath


@dataclass(frozen=True, slots=True)
class VectorUnit:
    """The SIMD registers that kernels are written for."""

    nbytes: int  # of one register
    registers: int

    def lanes(self, itemsize: int) -> int:
        """Elements of one register."""
        return self.nbytes // itemsize


AVX512 = VectorUnit(64, 32)
AVX2 = VectorUnit(32, 16)
NEON = VectorUnit(16, 32)


def vector_unit(architecture: str, features: frozenset[str]) -> VectorUnit | None:
    """The widest unit with fused multiply-add, or None: without it a kernel would call libm per
    lane.

    architecture is the first word of an LLVM triple, features are LLVM's names.
    """
    if architecture in ("aarch64", "arm64"):
        return NEON if "neon" in features else None
    if {"avx512f", "avx512vl", "avx512dq", "avx512bw"} <= features:
        return AVX512
    return AVX2 if {"avx2", "fma"} <= features else None


# Machines with a name to compile for, and what a CPU must have to be one, in LLVM's words.
_V3 = frozenset({"avx2", "fma", "bmi", "bmi2", "f16c", "lzcnt", "movbe"})
TARGETS = {
    "x86-64-v3": _V3,
    "x86-64-v4": _V3 | {"avx512f", "avx512vl", "avx512dq", "avx512bw", "avx512cd"},
    "aarch64": frozenset({"neon"}),
}


@lru_cache(maxsize=1)
def listed_features() -> frozenset[str]:
    """What Linux says that the CPU can do, in LLVM's words; empty under other systems and on
    processors that are in no TARGETS.
    """
    if sys.platform != "linux" or sys.maxsize < 1 << 32:
        return frozenset()
    architecture = os.uname().machine
    if architecture == "aarch64":
        return frozenset({"neon"})  # no such processor lacks it
    flags = re.search(r"^flags\s*:(.*)$", _read("/proc/cpuinfo"), re.MULTILINE)
    if architecture != "x86_64" or flags is None:
        return frozenset()
    others = {"bmi1": "bmi", "abm": "lzcnt"}  # Linux's names: LLVM's
    return frozenset(others.get(flag, flag) for flag in flags[1].split())


def runnable_targets(features: frozenset[str]) -> list[str]:
    """The names in TARGETS that a CPU with these features runs, the best last."""
    return [name for name, needed in TARGETS.items() if needed <= features]


def _read(path: str) -> str:
    try:
        # A control group's name may be in any encoding: it is read as names of files are.
        return os.fsdecode(Path(path).read_bytes()).strip()
    except OSError:
        return ""


@lru_cache(maxsize=1)
def cpu_name() -> str:
    """The processor as it names itself; else its architecture. Under a hypervisor, where all of a
    maker have one name, with family and model.
    """
    entries = re.findall(r"^([^:\n]*?)\s*:\s*(.+?)\s*$", _read("/proc/cpuinfo"), re.MULTILINE)
    facts = dict(reversed(entries))  # the first of each
    name = facts.get("model name") or facts.get("Model")
    if name is None:
        return platform.processor() or platform.machine()
    if re.search(r"\d", name) or not {"cpu family", "model"} <= facts.keys():
        return name
    return f"{name} (family {facts['cpu family']}, model {facts['model']})"


@lru_cache(maxsize=1)
def cache_bytes() -> tuple[int, int]:
    """(level-1 data, level-2) cache of one core in bytes; common sizes where the system does not
    tell.
    """
    sizes = {1: 32 << 10, 2: 512 << 10}
    for index in range(4):
        base = f"/sys/devices/system/cpu/cpu0/cache/index{index}/"
        level, kind, size = _read(base + "level"), _read(base + "type"), _read(base + "size")
        if level in ("1", "2") and kind in ("Data", "Unified") and size.endswith("K"):
            sizes[int(level)] = int(size[:-1]) << 10
    return sizes[1], sizes[2]


def _cgroup_quota() -> float:
    """CPUs that the control group and those around it grant (v2, then v1); infinity without a
    limit.
    """
    limits = [float("inf")]
    for line in _read("/proc/self/cgroup").splitlines():
        own = PurePosixPath("/sys/fs/cgroup") / line.rpartition(":")[2].strip("/")
        for folder in (own, *own.parents):
            quota, _, period = _read(f"{folder}/cpu.max").partition(" ")
            if quota.isdigit() and period.isdigit():
                limits.append(int(quota) / int(period))
    quota, period = (_read(f"/sys/fs/cgroup/cpu/cpu.cfs_{name}_us") for name in ("quota", "period"))
    if quota.isdigit() and period.isdigit():
        limits.append(int(quota) / int(period))
    return min(limits)


@lru_cache(maxsize=1)
def default_num_threads() -> int:
    """Threads to use unless the user says otherwise: the least of affinity, control-group quota
    and OMP_NUM_THREADS.
    """
    try:
        available = len(os.sched_getaffinity(0))
    except AttributeError:  # not on this system
        available = os.cpu_count() or 1
    limit = os.environ.get("OMP_NUM_THREADS", "").split(",")[0]
    asked = int(limit) if limit.isdigit() and int(limit) > 0 else available
    # A quota of 1.5 CPUs is best served by 2 threads: they are throttled, not starved.
    quota = _cgroup_quota()
    return max(1, min(available, asked, available if quota == float("inf") else -int(-quota // 1)))
