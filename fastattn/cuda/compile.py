"""From a kernel to PTX, through Numba and NVVM, and a cache on disk: nothing here needs a GPU.

Numba's own way of linking spills registers, sets no limit for large shared memory and costs several
times a launch; its cache misses kernels that hold intrinsics. So it translates, and that is all:
driver.py loads the text, which the driver's compiler turns into code, and launches it.
"""

from __future__ import annotations

import functools
import importlib
import os
import re
import threading
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

from ..cpu import cache
from .driver import Code
from .job import FIELDS, FLOATS, MAP_BYTES, MAPS, Job, MappedJob

INSTALL = "pip install 'fastattn[cuda]'"
# Compute capability: the oldest version of PTX that knows it. NVVM stamps its own, newer one, which
# a driver of the same age as the GPU would refuse; the text uses nothing of it.
PTX_VERSIONS = {
    (7, 5): "6.3",
    (8, 0): "7.0",
    (8, 6): "7.1",
    (8, 7): "7.4",
    (8, 9): "7.8",
    (9, 0): "7.8",
    (10, 0): "8.6",
    (10, 3): "8.8",
    (12, 0): "8.7",
    (12, 1): "8.8",
}


@dataclass(frozen=True)
class Source:
    """A kernel as Numba gets it."""

    function: Callable[..., None]  # of one parameter
    threads: int  # of a block
    min_blocks: int = 0  # blocks that a multiprocessor should hold, which limits registers; 0 = any
    ptx_version: str = "6.3"  # the oldest that knows the instructions of its own
    suffix: str = ""  # "a": instructions of one compute capability alone
    job: Any = Job  # the type of its parameter


_known: dict[Hashable, Code] = {}
_lock = threading.RLock()
if hasattr(os, "register_at_fork"):  # as in cpu/compile.py
    os.register_at_fork(
        before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release
    )


def unavailable(key: Hashable, target: tuple[int, int]) -> str:
    """Why this kernel cannot be had here, in one line; "" if it can. Imports Numba only if it must
    be translated.
    """
    if (key, target) in _known or cache.find(key, _place(target)) is not None:
        return ""
    return _import_problem()


def ptx_target(capability: tuple[int, int]) -> tuple[int, int]:
    """The compute capability to translate for: the newest known one that the device runs."""
    return max(known for known in PTX_VERSIONS if known <= capability)


def code(key: Hashable, build: Callable[[], Source], target: tuple[int, int]) -> Code:
    """The PTX of a kernel: from this process, from the cache, or from build() through Numba.

    key    names the kernel and every constant that build() closes over; its repr must be stable
    build  called only if nothing is cached
    target one of PTX_VERSIONS

    Raises
    ------
    ImportError  it must be translated, and numba-cuda or NVVM is missing
    """
    found = _known.get((key, target))
    if found is not None:
        return found
    with _lock:
        if (key, target) not in _known:
            _known[key, target] = _cached_or_translated(key, build, target)
        return _known[key, target]


def _cached_or_translated(
    key: Hashable, build: Callable[[], Source], target: tuple[int, int]
) -> Code:
    entry = cache.find(key, _place(target))
    if entry is not None:
        return Code(entry[0], entry[1].decode())
    found = translate(build(), target)
    cache.keep(key, _place(target), found.entry, found.ptx.encode())
    return found


def _place(target: tuple[int, int]) -> Hashable:
    return "cuda", target, cache.version("numba-cuda")


def translate(source: Source, target: tuple[int, int]) -> Code:
    """The PTX of a kernel, made anew."""
    problem = _import_problem()
    if problem:
        raise ImportError(problem)
    from numba import cuda, types

    fields = [types.float64 if name in FLOATS else types.int64 for name in source.job._fields]
    bounds = (source.threads, source.min_blocks) if source.min_blocks else source.threads
    ptx, _ = cuda.compile(
        source.function,
        types.void(types.NamedTuple(fields, source.job)),
        cc=(*target, source.suffix) if source.suffix else target,
        device=False,
        abi="numba",
        output="ptx",
        launch_bounds=bounds,
    )
    found = finished(ptx, target, source.ptx_version)
    return Code(found.entry, with_maps(found.ptx)) if source.job is MappedJob else found


def with_maps(ptx: str) -> str:
    """The last parameters, MAPS, are maps themselves instead of addresses, which Numba cannot say:
    constants of the launch, where copies may read them without a fence.
    """
    for number in range(len(FIELDS), len(FIELDS) + len(MAPS)):
        name = f"kernel_param_{number}"
        ptx = ptx.replace(f".param .u64 {name}", f".param .align 64 .b8 {name}[{MAP_BYTES}]", 1)
        ptx = re.sub(
            rf"ld\.param\.[ub]64\s+(%rd\d+), \[{name}\];",
            rf"mov.b64 \1, {name}; cvta.param.u64 \1, \1;",
            ptx,
        )
    return ptx


def finished(ptx: str, target: tuple[int, int], ptx_version: str) -> Code:
    """NVVM's text with the version that it needs, and its kernel's name."""
    version = max((PTX_VERSIONS[target], ptx_version), key=_number)
    ptx = re.sub(r"\.version \d+\.\d+", f".version {version}", ptx, count=1)
    found = re.search(r"\.entry\s+(\w+)", ptx)
    if found is None:
        raise ValueError("ptx must hold a kernel, got none")
    # Numba's names spell out all argument types, once a parameter; its environments have no use.
    ptx = re.sub(r"^\.common \.global .*NumbaEnv.*\n", "", ptx, flags=re.MULTILINE)
    return Code("kernel", ptx.replace(found[1], "kernel"))


def _number(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


@functools.cache
def _import_problem() -> str:
    """Why Numba cannot make PTX, in one line; "" if it can."""
    try:
        importlib.import_module("numba_cuda")
        cuda: Any = importlib.import_module("numba.cuda")
        importlib.import_module("numba.cuda.cudadrv.nvvm").NVVM()
        cuda.compile  # noqa: B018
    except Exception as error:  # one that does not fit this Numba or Python raises many things
        if isinstance(error, ModuleNotFoundError) and error.name in ("numba", "numba_cuda"):
            return f"numba-cuda is not installed: {INSTALL}"
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        return f"numba-cuda cannot be used: {reason}. Try {INSTALL}"
    return ""
