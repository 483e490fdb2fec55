"""torch's own threads, for fastattn's work on tensors.

After each operator they spin for some milliseconds, and would take the CPUs of a pool beside them:
16 x 12 heads of 256 after a linear layer, on two CPUs: 13.8 ms; on torch's threads 10.3.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from typing import Any

import torch

from ..cpu.threads import Region, get_num_threads, lend, num_threads


def _region() -> Region | None:
    """Parallel regions of torch's OpenMP library, where it has GCC's names for them."""
    try:
        library = ctypes.CDLL(torch._C.__file__)
        parallel, number = library.GOMP_parallel, library.omp_get_thread_num
    except (AttributeError, OSError):
        return None
    parallel.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
    parallel.restype = None
    no_flags = 0
    return Region(
        lambda body, data, count: parallel(body, data, count, no_flags),
        ctypes.cast(number, ctypes.c_void_p).value or 0,
    )


_of_torch = _region()


def _reset_after_fork() -> None:
    """OpenMP's threads are gone in a forked child, but it waits for them: fastattn's own do."""
    global _of_torch
    _of_torch = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reset_after_fork)


def on_threads_of_torch(function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Return function(...), with at most as many threads as torch.set_num_threads() allows."""
    most = torch.get_num_threads()
    if most < get_num_threads():
        with num_threads(most):
            return on_threads_of_torch(function, *arguments, **options)
    lend(_of_torch)
    try:
        return function(*arguments, **options)
    finally:
        lend(None)
