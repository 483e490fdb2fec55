"""Activations, norms and rotations over the rows of arrays, compiled: threads, and the only caller
of the kernels of elementwise_kernels.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from ctypes import c_int64
from functools import partial

import numpy as np

from ..machine import VectorUnit
from . import compile, threads
from .elementwise_job import OPERANDS, WRITTEN, layout_of, pack
from .layout import address
from .share import run_until_done

ITEMS_PER_CALL = 1024  # a kernel then returns, within 20 ms, to let Python act
# Fewer are faster on one thread: waking another costs about 10 us.
ELEMENTS_PER_THREAD = 131072
NAMES = {4: "float32", 8: "float64"}  # dtype.name takes 2 us


def unavailable(function: str, dtype: str) -> str:
    """Why this function cannot be had here, in one line; "" if it can."""
    return compile.unavailable(("elementwise", function, dtype))


def kernel(function: str, dtype: str) -> compile.Kernel:
    """A compiled kernel."""
    return compile.kernel(("elementwise", function, dtype), builder(function, dtype))


def builder(function: str, dtype: str) -> Callable[[VectorUnit], Callable]:
    """What compile.kernel() builds it with; see run.builder()."""

    def build(unit: VectorUnit):
        from .elementwise_kernels import elementwise_kernel

        return elementwise_kernel(function, dtype, unit)

    return build


def run(
    function: str,
    out: np.ndarray,
    *inputs: np.ndarray | None,
    eps: float = 0.0,
    pairs: int = 0,
    fresh: bool = False,
) -> None:
    """Write out.

    inputs  in the order of OPERANDS, None where absent; like out, float32 or float64 of the native
            byte order and all of one dtype, of any strides
    fresh   what is written was made for this call; else it may lie on inputs
    """
    if not out.size:
        return
    arrays = (out, *inputs)
    forms = [None if a is None else (a.shape, a.strides) for a in inputs]
    layout = layout_of(function, out.itemsize, (out.shape, out.strides), *forms)
    if layout is None or not (fresh or _disjoint(function, arrays)):
        _run_on_copies(function, out, inputs, eps, pairs)
        return
    addresses = [address(a) for a in arrays]
    job = pack(eps, pairs, addresses, layout)
    own, counter = kernel(function, NAMES[out.itemsize]), (c_int64 * 1).from_buffer(job)
    work = partial(run_until_done, own, job, 0, ITEMS_PER_CALL, counter, arrays)
    num_threads = min(threads.get_num_threads(), out.size // ELEMENTS_PER_THREAD)
    if num_threads > 1:
        threads.run_on_threads(work, num_threads)
    else:
        work()


def _disjoint(function: str, arrays: Sequence[np.ndarray | None]) -> bool:
    """Whether what is written holds nothing that is read, but for arrays that are the same."""
    present = [a for a in arrays if a is not None]
    return not any(
        np.may_share_memory(a, written) and not _same(a, written)
        for name, written in zip(OPERANDS[function], arrays, strict=True)
        if name in WRITTEN and written is not None
        for a in present
    )


def _same(a: np.ndarray, b: np.ndarray) -> bool:
    return a is b or (a.shape == b.shape and a.strides == b.strides and address(a) == address(b))


def _run_on_copies(
    function: str, out: np.ndarray, inputs: Sequence[np.ndarray | None], eps: float, pairs: int
) -> None:
    """run(), for arrays in any disorder."""
    lead = out.shape[:-1]
    copies = [
        None if a is None else np.broadcast_to(a, (*lead, a.shape[-1])).copy() for a in inputs
    ]
    new = np.empty_like(out, order="C")
    run(function, new, *copies, eps=eps, pairs=pairs, fresh=True)
    names = OPERANDS[function]
    for name, array, copy in zip(names, (out, *inputs), (new, *copies), strict=True):
        if name in WRITTEN and array is not None:
            array[...] = copy
