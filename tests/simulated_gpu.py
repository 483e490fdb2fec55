"""A GPU that is Numba's simulator, for a process with NUMBA_ENABLE_CUDASIM=1.

The memory of the device is that of the CPU, and kernels run as Python: fastattn's own, with
simulated_words.py for what Python lacks. Everything above the driver is the real thing.
"""

from __future__ import annotations

import contextlib
import ctypes
from unittest import mock

import numpy as np
import simulated_words as words
from numba import cuda
from numba.cuda.simulator import kernel as simulator
from simulated_threads import one_thread_at_a_time

import fastattn.plan as planning
from fastattn.cuda import (
    choice,
    combine,
    compile,
    driver,
    entry,
    gradient_rows,
    gradient_scores,
    gradient_sums,
    place,
    products,
    simt,
    simt_gradients,
    softmax,
    writing,
)
from fastattn.cuda import tile as tiles
from fastattn.cuda.tile import ROW_THREADS, WARP, Tile

# As few threads and numbers as show every loop: Python takes about 1 us for each step of a thread.
TILE = Tile(threads_m=2, threads_n=2, rows=2, keys=2, values=2, depth=2)
DEVICE = driver.Device(0, "simulator", (8, 0), 1, 48 << 10, 1 << 16, 1 << 20)
FEW_THREADS = 2
FACTORIES = {
    "simt": simt.forward_kernel,
    "combine": combine.combine_kernel,
    "missing": combine.missing_kernel,
    "gradient_rows": lambda variant, weighs, words: gradient_rows.rows_kernel(
        variant, weighs, 1, words
    ),
    "simt_gradient_q": simt_gradients.query_kernel,
    "simt_gradient_kv": simt_gradients.key_kernel,
    "gradient_bias": gradient_sums.bias_kernel,
    "gradient_sums": lambda variant, of, stored, words: gradient_sums.row_sums_kernel(
        variant, of, stored, FEW_THREADS, words
    ),
}
THREADS = {"gradient_rows": ROW_THREADS // WARP, "gradient_sums": FEW_THREADS}


MODULES = (  # where `cuda` is used
    combine,
    entry,
    gradient_rows,
    gradient_scores,
    gradient_sums,
    place,
    products,
    simt,
    simt_gradients,
    softmax,
    writing,
)


class Present:
    """What `cuda` is to a running kernel; the simulator itself sees to the kernel's module only."""

    def __getattr__(self, name):
        return getattr(simulator._get_kernel_context(), name)


class Memory:
    """Blocks of memory by address; filled with a number that no kernel may read."""

    def __init__(self):
        self.blocks = {}

    def allocate(self, nbytes, stream):
        block = np.full(nbytes + 64, 0xFF, np.uint8)
        address = block.ctypes.data + -block.ctypes.data % 64
        self.blocks[address] = block
        return address

    def free(self, address, stream):
        del self.blocks[address]


def launch(key, grid, threads, shared_bytes, stream, job):
    name, *rest = key
    kernel = cuda.jit(FACTORIES[name](*rest, words))
    with np.errstate(all="ignore"):
        kernel[grid, THREADS.get(name, threads)](job)


def to_device(address, array, stream):
    ctypes.memmove(address, array.ctypes.data, array.nbytes)


def to_host(array, address, stream):
    ctypes.memmove(array.ctypes.data, address, array.nbytes)


@contextlib.contextmanager
def simulated_gpu(tile=TILE, split_n=4, few_rows=2):
    """Calls with backend="cuda" run here; yields the memory."""
    memory = Memory()
    functions = {
        "unavailable": lambda: "",
        "device": lambda ordinal: DEVICE,
        "using": lambda ordinal: contextlib.nullcontext(),
        "ordinal_of": lambda address: 0,
        "load": lambda key, ordinal, shared_bytes: key,
        "launch": launch,
        "allocate": memory.allocate,
        "free": memory.free,
        "clear": lambda address, nbytes, stream: ctypes.memset(address, 0, nbytes),
        "to_device": to_device,
        "to_host": to_host,
        "synchronize": lambda stream: None,
    }
    patches = [one_thread_at_a_time()]
    patches += [mock.patch.object(driver, name, new) for name, new in functions.items()]
    patches += [mock.patch.object(module, "cuda", Present()) for module in MODULES]
    patches += [
        mock.patch.object(compile, "code", lambda key, build: key),
        mock.patch.object(compile, "unavailable", return_value=""),
        mock.patch.object(choice, "tile_of", return_value=tile),
        mock.patch.object(choice, "gradient_tile", return_value=tile),
        mock.patch.object(choice, "gradient_tiling", return_value=(None, "")),
        mock.patch.object(choice, "forward_tiling", return_value=(None, "")),  # made of PTX
        mock.patch.object(choice, "SPLIT_N", split_n),
        mock.patch.object(tiles, "SPLIT_N", split_n),
        mock.patch.object(tiles, "FEW_ROWS", few_rows),
    ]
    choice.choose.cache_clear()
    choice.choose_gradients.cache_clear()
    planning._cuda_plan.cache_clear()
    with contextlib.ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        yield memory
