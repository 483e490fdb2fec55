"""A GPU whose kernels' PTX is interpreted, for calls with backend="cuda".

Everything above the driver is the real thing; its memory is one where each access is looked at.
"""

from __future__ import annotations

import contextlib
import ctypes
from unittest import mock

import numpy as np
from ptx_launch import launch
from ptx_memory import GlobalMemory

import fastattn.plan as planning
from fastattn.cuda import choice, driver

DEVICE = driver.Device(0, "emulator", (8, 0), 1, 163 << 10, 1 << 16, 1 << 20)


class Memory:
    """Blocks of memory by address, filled with NaN."""

    def __init__(self):
        self.all, self.left = GlobalMemory(), set()

    def allocate(self, nbytes, stream):
        self.left.add(self.all.put(np.full(nbytes, 0xFF, np.uint8)))
        return max(self.left)

    def free(self, address, stream):
        self.left.remove(address)

    def to_device(self, address, array, stream):
        self.all.get(address, np.empty(array.nbytes, np.uint8))[:] = array.reshape(-1).view(
            np.uint8
        )

    def clear(self, address, nbytes, stream):
        self.all.get(address, np.empty(nbytes, np.uint8))[:] = 0

    def to_host(self, array, address, stream):
        content = self.all.get(address, np.empty(array.nbytes, np.uint8))
        ctypes.memmove(array.ctypes.data, content.ctypes.data, array.nbytes)

    def launch(self, code, grid, threads, shared_bytes, stream, job):
        assert grid[1:] == (1, 1), grid
        launch(code.ptx, self.all, job, grid[0], shared_bytes)


@contextlib.contextmanager
def emulated_gpu(device=DEVICE, **choices):
    """Calls with backend="cuda" run here; yields the memory. choices: what takes the place of
    functions that cuda/choice.py calls.
    """
    memory = Memory()
    functions = {
        "unavailable": lambda: "",
        "device": lambda ordinal: device,
        "using": lambda ordinal: contextlib.nullcontext(),
        "load": lambda code, ordinal, shared_bytes: code,
        "synchronize": lambda stream: None,
    }
    functions |= {
        name: getattr(memory, name)
        for name in ("allocate", "free", "to_device", "to_host", "clear", "launch")
    }
    caches = choice.choose, choice.choose_gradients, planning._cuda_plan
    with contextlib.ExitStack() as stack:
        for name, new in functions.items():
            stack.enter_context(mock.patch.object(driver, name, new))
        for name, new in choices.items():
            stack.enter_context(mock.patch.object(choice, name, new))
        for cache in caches:
            cache.cache_clear()
            stack.callback(cache.cache_clear)
        yield memory
    assert not memory.left, "memory that was not given back"
