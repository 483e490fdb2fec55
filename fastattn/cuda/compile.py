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
from typing import Any, NamedTuple

from ..cpu import cache
from .driver import Code
from .job import FIELDS, FLOATS, MAP_BYTES, MAPS, Job, MappedJob

INSTALL = "pip install 'fastattn[cuda]'"


class Target(NamedTuple):
    """The oldest GPU that a kernel's text is for, and the oldest version of PTX that knows it.

    Newer GPUs run the same text, so that what tests prove of it holds on all of them. (From 10.0
    on, NVVM has another compiler; its texts for older ones differ in nothing but this.)
    """

    capability: tuple[int, int]
    ptx_version: str  # NVVM stamps its own, newer one, which an older driver would refuse
    suffix: str = ""  # "a": of this compute capability alone


ANY_GPU = Target((7, 5), "6.3")
TENSOR_CORES = Target((8, 0), "7.0")  # they multiply both 16-bit types
WARPGROUPS = Target((9, 0), "8.0", "a")  # no other GPU has these instructions, newer ones neither


@dataclass(frozen=True)
class Source:
    """A kernel as Numba gets it."""

    function: Callable[..., None]  # of one parameter
    threads: int  # of a block
    min_blocks: int = 0  # blocks that a multiprocessor should hold, which limits registers; 0 = any
    target: Target = ANY_GPU
    job: Any = Job  # the type of its parameter


_known: dict[Hashable, Code] = {}
_lock = threading.RLock()
if hasattr(os, "register_at_fork"):  # as in cpu/compile.py
    os.register_at_fork(
        before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release
    )


def unavailable(key: Hashable) -> str:
    """Why this kernel cannot be had here, in one line; "" if it can. Imports Numba only if it must
    be translated.
    """
    if key in _known or cache.find(key, _place()) is not None:
        return ""
    return _import_problem()


def code(key: Hashable, build: Callable[[], Source]) -> Code:
    """The PTX of a kernel: from this process, from the cache, or from build() through Numba.

    key    names the kernel and every constant that build() closes over; its repr must be stable
    build  called only if nothing is cached

    Raises
    ------
    ImportError  it must be translated, and numba-cuda or NVVM is missing
    """
    found = _known.get(key)
    if found is not None:
        return found
    with _lock:
        if key not in _known:
            _known[key] = _cached_or_translated(key, build)
        return _known[key]


def _cached_or_translated(key: Hashable, build: Callable[[], Source]) -> Code:
    entry = cache.find(key, _place())
    if entry is not None:
        return Code(entry[0], entry[1].decode())
    found = translate(build())
    cache.keep(key, _place(), found.entry, found.ptx.encode())
    return found


def _place() -> Hashable:
    return "cuda", cache.version("numba-cuda")


def translate(source: Source) -> Code:
    """The PTX of a kernel, made anew."""
    problem = _import_problem()
    if problem:
        raise ImportError(problem)
    from numba import cuda, types

    fields = [types.float64 if name in FLOATS else types.int64 for name in source.job._fields]
    bounds = (source.threads, source.min_blocks) if source.min_blocks else source.threads
    target = source.target
    ptx, _ = cuda.compile(
        source.function,
        types.void(types.NamedTuple(fields, source.job)),
        cc=(*target.capability, target.suffix) if target.suffix else target.capability,
        device=False,
        abi="numba",
        output="ptx",
        launch_bounds=bounds,
    )
    found = finished(ptx, target.ptx_version)
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


def finished(ptx: str, version: str) -> Code:
    """NVVM's text with the version that it needs, and its kernel's name."""
    ptx = re.sub(r"\.version \d+\.\d+", f".version {version}", ptx, count=1)
    found = re.search(r"\.entry\s+(\w+)", ptx)
    if found is None:
        raise ValueError("ptx must hold a kernel, got none")
    # Numba's names spell out all argument types, once a parameter; its environments have no use.
    ptx = re.sub(r"^\.common \.global .*NumbaEnv.*\n", "", ptx, flags=re.MULTILINE)
    return Code("kernel", ptx.replace(found[1], "kernel"))


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
