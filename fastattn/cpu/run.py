"""Scratch, the job, threads: the only caller of the CPU kernels."""

from __future__ import annotations

import ctypes
import threading
from itertools import product

import numpy as np

from ..problem import Operands, Plan, Problem, Variant
from . import compile, threads
from .job import Job, pack

LOG2_E = 1.4426950408889634  # 1 / ln 2
LN_2 = 0.6931471805599453
UNLIMITED = 1 << 40  # a window side of None: past any key
SCRATCH_KEPT = 8 << 20  # bytes of scratch that a thread keeps for its next call
_scratch = threading.local()


def unavailable(variant: Variant) -> str:
    """Why this backend cannot run the variant, in one line; "" if it can."""
    return compile.unavailable(("forward", variant))


def _kernel(name: str, variant: Variant) -> compile.Kernel:
    """A compiled kernel; the module that defines it, and with it Numba, is imported only if it must be compiled."""

    def build(unit):
        if name == "forward":
            from .forward import forward_kernel as factory
        else:
            from .decode import combine_kernel as factory
        return factory(variant, unit)

    return compile.kernel((name, variant), build)


def scratch(elements: int, dtype: str) -> int:
    """Address of this thread's scratch, aligned to a cache line; its contents are whatever the last call left."""
    nbytes = elements * np.dtype(dtype).itemsize + 64
    kept = getattr(_scratch, "buffer", None)
    if kept is None or kept.nbytes < nbytes:
        kept = np.empty(nbytes, np.uint8)
        if nbytes <= SCRATCH_KEPT:
            _scratch.buffer = kept
        _scratch.current = kept
    return (kept.ctypes.data + 63) & -64


def _layout(name: str, array: np.ndarray | None, axes: str) -> tuple[dict[str, int], np.ndarray | None]:
    """Job fields of one operand: address, strides in elements, and a table of offsets where one stride cannot do."""
    if array is None:
        return dict.fromkeys([name, name + "_table", name + "_batch", *(name + a for a in axes.split())], 0), None
    size = array.itemsize
    steps = [s // size for s in array.strides]
    lead = array.ndim - 3
    fields = {name: array.ctypes.data, name + "_table": 0, name + "_batch": 0}
    fields |= {name + axis: step for axis, step in zip(axes.split(), steps[lead:], strict=True)}
    table = None
    if lead == 1:
        fields[name + "_batch"] = steps[0]
    elif lead > 1:
        table = _offsets(array.shape[:lead], steps[:lead])
        fields[name + "_table"] = table.ctypes.data
    return fields, table


def _offsets(shape: tuple[int, ...], steps: list[int]) -> np.ndarray:
    """(batch,) int64: offset of each leading index, in C order."""
    offsets = np.zeros(1, np.int64)
    for length, step in zip(shape, steps, strict=True):
        offsets = (offsets[:, None] + np.arange(length, dtype=np.int64) * step).ravel()
    return offsets


def run(plan: Plan, problem: Problem, operands: Operands) -> None:
    """Write operands.out and operands.lse."""
    variant = problem.variant
    dtype = np.dtype(variant.dtype)
    unit = compile.host_target().unit
    lanes = unit.lanes(dtype.itemsize)
    nr = 2 * lanes
    acc_stride = -(-problem.head_dim_v // lanes) * lanes
    rows = problem.group * problem.seqlen_q
    heads = problem.batch * problem.heads_kv
    m_blocks = -(-rows // plan.block_m)
    s_stride = -(-plan.block_n // nr) * nr + lanes
    counter = np.zeros(16, np.int64)
    state = None if operands.lse is None else np.empty((*operands.lse.shape, 2), dtype)
    partial = np.empty((heads * rows * plan.num_splits, acc_stride + 2), dtype) if plan.num_splits > 1 else None
    fields: dict[str, int] = {}
    tables = []
    for name, array, axes in (
        ("q", operands.q, "_head _row _col"),
        ("k", operands.k, "_head _row _col"),
        ("v", operands.v, "_head _row _col"),
        ("out", operands.out, "_head _row _col"),
        ("mask", operands.mask, "_head _row _col"),
        ("bias", operands.bias, "_head _row _col"),
    ):
        layout, table = _layout(name, array, axes)
        fields |= layout
        tables.append(table)
    job = Job(
        scale_log2=problem.scale * LOG2_E,
        counter=counter.ctypes.data,
        num_items=heads * m_blocks * plan.num_splits,
        lse=0 if state is None else state.ctypes.data,
        partial=0 if partial is None else partial.ctypes.data,
        heads_kv=problem.heads_kv,
        group=problem.group,
        rows=rows,
        seqlen_k=problem.seqlen_k,
        head_dim=problem.head_dim,
        head_dim_v=problem.head_dim_v,
        offset=problem.offset,
        left=UNLIMITED if problem.left is None else problem.left,
        right=UNLIMITED if problem.right is None else problem.right,
        block_m=plan.block_m,
        m_blocks=m_blocks,
        block_n=plan.block_n,
        mc=plan.mc,
        s_stride=s_stride,
        acc_stride=acc_stride,
        split_n=plan.split_n,
        num_splits=plan.num_splits,
        **fields,
    )
    keys = -(-plan.block_n // nr) * nr
    elements = plan.block_m * (problem.head_dim + 2 * acc_stride + 4) + keys * (problem.head_dim + acc_stride) + plan.mc * s_stride + 64
    packed = pack(job)
    address = ctypes.cast(packed, ctypes.c_void_p).value
    kernel = _kernel("forward", variant)

    def work():
        where = scratch(elements, variant.dtype)
        while kernel(address, where, 1 << 60):
            pass

    threads.run_on_threads(work, min(plan.num_threads, job.num_items))
    if partial is not None:
        counter[0] = 0
        packed = pack(job._replace(num_items=heads * rows))
        address = ctypes.cast(packed, ctypes.c_void_p).value
        combine = _kernel("combine", variant)
        combine(address, 0, 1 << 60)
    if state is not None:
        with np.errstate(divide="ignore"):
            np.add(state[..., 0] * LN_2, np.log(state[..., 1]), out=operands.lse)
