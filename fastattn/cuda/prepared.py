"""Calls of plain arrays of a GPU, made once and then again: what is left of one is addresses."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import Any, NamedTuple

import numpy as np

from ..cpu.layout import address
from ..problem import Plan
from . import compile, driver
from .choice import Kernel, builder
from .job import PLACE
from .memory import DeviceMemory, device_memory

MOST = 512  # calls to keep
AXES = 4  # of arrays: more leading ones want a table, which is copied


class Prepared(NamedTuple):
    """A call that is ready for other arrays of its layout."""

    launches: driver.Launches
    scratch_bytes: int = 0
    scratch: tuple[tuple[str, int], ...] = ()  # fields that are addresses in it, at so many bytes


_kept: dict[Hashable, tuple[Plan, Prepared]] = {}  # keys name plans by their ids: these stay alive


def launch_again(
    plan: Plan,
    arrays: dict[str, np.ndarray],
    memory: DeviceMemory,
    prepare: Callable[[], Prepared],
) -> bool:
    """Launch a call as it was once prepared, or False, if this cannot be.

    arrays   by the fields of the job that have their addresses, all that depends on the call
    memory   of q, whose stream all must share
    prepare  makes one of a call of this plan, with arrays of these strides
    """
    for array in arrays.values():
        owner = device_memory(array)
        if owner is None or owner.stream != memory.stream or array.ndim > AXES:
            return False
    key = id(plan), memory.ordinal, *arrays, *(a.strides for a in arrays.values())
    with driver.using(memory.ordinal):
        _, (launches, nbytes, fields) = _kept.get(key) or _keep(key, plan, prepare())
        addresses = [(PLACE[name], address(array)) for name, array in arrays.items()]
        if not nbytes:
            launches.start(memory.stream, addresses)
            return True
        scratch = driver.allocate(nbytes, memory.stream)
        try:
            addresses += [(PLACE[name], scratch + first) for name, first in fields]
            launches.start(memory.stream, addresses)
        finally:
            driver.free(scratch, memory.stream)
    return True


def _keep(key: Hashable, plan: Plan, prepared: Prepared) -> tuple[Plan, Prepared]:
    if len(_kept) >= MOST:
        _kept.clear()
    _kept[key] = plan, prepared
    return plan, prepared


def launches_of(kernels: Iterable[tuple[Kernel, Any]], ordinal: int) -> driver.Launches:
    """Kernels, each with its job, ready to be started on a device."""
    return driver.Launches(
        (job, (function_of(kernel, ordinal), kernel.grid, kernel.threads, kernel.shared_bytes))
        for kernel, job in kernels
    )


def function_of(kernel: Kernel, ordinal: int) -> int:
    """The driver's function of a kernel on a device, whose context is the current one."""
    code = compile.code(kernel.key, builder(kernel.key))
    return driver.load(code, ordinal, kernel.shared_bytes)
