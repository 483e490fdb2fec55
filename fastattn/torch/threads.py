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
from torch import Tensor

from ..cpu.threads import get_num_threads, lend, num_threads
from .dispatch import is_large

FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


def _parallel() -> Callable[..., None] | None:
    """The entry of torch's OpenMP library to a parallel region, where it has one of that name."""
    try:
        parallel = ctypes.CDLL(torch._C.__file__).GOMP_parallel
    except (AttributeError, OSError):
        return None
    parallel.argtypes = (FUNCTION, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
    parallel.restype = None
    return parallel


_open_region = _parallel()


def run(work: Callable[[], object], count: int) -> None:
    """Call work() on up to `count` of torch's threads, this one included; the first error is
    raised when all have ended.
    """
    errors: list[BaseException] = []

    def begin(_: Any) -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    region = _open_region
    if region is None:  # forked since
        begin(None)
    else:
        region(FUNCTION(begin), None, count, 0)
    if errors:
        raise errors[0]


def _reset_after_fork() -> None:
    """OpenMP's threads are gone in a forked child, but it waits for them: fastattn's own do."""
    global _open_region
    _open_region = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reset_after_fork)


def on_threads_of_torch(
    of: tuple[Tensor, ...], function: Callable[..., Any], *arguments: Any, **options: Any
) -> Any:
    """Return function(...), with at most as many threads as torch.set_num_threads() allows.

    of: query, key and value. Where they are small, fastattn's own pool is as fast, and does not
    wait for a thread that the system has stopped.
    """
    most = torch.get_num_threads()
    if most < get_num_threads():
        with num_threads(most):
            return on_threads_of_torch(of, function, *arguments, **options)
    if _open_region is None or not is_large(*of):
        return function(*arguments, **options)
    lend(run)
    try:
        return function(*arguments, **options)
    finally:
        lend(None)
