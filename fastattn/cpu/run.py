"""Scratch, the job, threads: the only caller of the CPU kernels."""

from __future__ import annotations

import threading
from ctypes import addressof, c_int64
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from ..machine import VectorUnit
from ..problem import Operands, Plan, Problem, Variant
from . import compile, threads
from .job import PARTS, pack

LOG2_E = 1.4426950408889634  # 1 / ln 2
LN_2 = 0.6931471805599453
UNLIMITED = 1 << 40  # a window side of None: past any key
SPARE_REGISTERS = 5  # products.few_scores() and masking.mask_row() use them
LINE = 64  # bytes of a cache line
SCRATCH_KEPT = (
    8 << 20
)  # bytes of scratch that a thread keeps for its next call: fresh pages cost 0.1 ms a call
ITEMS_PER_CALL = 1 << 30
_kept = threading.local()
_ABSENT = (0,) * len(PARTS)


_LACKING = ("softcap", "alibi", "sinks", "dropout", "ranges", "chunk")


def unavailable(variant: Variant) -> str:
    """Why this backend cannot run the variant, in one line; "" if it can."""
    lacks = [name for name in _LACKING if getattr(variant, name)]
    if variant.storage != variant.dtype or variant.bias_dtype == "bfloat16":
        lacks.append("half precision")
    if lacks:
        return f"the compiled kernel has no {' and no '.join(lacks)} yet"
    return compile.unavailable(("forward", variant))


def kernel(name: str, variant: Variant) -> compile.Kernel:
    """A compiled kernel. The module that defines it, and Numba with it, is imported only if it
    must be compiled.
    """

    def build(unit: VectorUnit):
        if name == "forward":
            from .forward import forward_kernel as factory
        else:
            from .decode import combine_kernel as factory
        return factory(variant, unit)

    return compile.kernel((name, variant), build)


@dataclass(frozen=True)
class _Prepared:
    """What run() needs of a plan besides arrays: made once, as it costs more than a small call."""

    forward: compile.Kernel
    combine: compile.Kernel | None
    sizes: tuple  # the first fields of the job, up to num_splits
    num_items: int
    num_rows: int
    acc_stride: int
    scratch_bytes: int


@lru_cache(maxsize=1024)
def _prepare(plan: Plan) -> _Prepared:
    problem, variant = plan.problem, plan.problem.variant
    itemsize = np.dtype(variant.dtype).itemsize
    lanes = compile.vector_unit_of(compile.host_target()).lanes(itemsize)
    acc_stride = -(-problem.head_dim_v // lanes) * lanes
    # Not a power of two, whose rows would fall into the same sets of the cache.
    s_stride = plan.block_n + lanes
    rows = problem.group * problem.seqlen_q
    heads = problem.batch * problem.heads_kv
    m_blocks = -(-rows // plan.block_m)
    elements = (
        plan.block_m * (problem.head_dim + 2 * acc_stride + 4)
        + plan.block_n * (problem.head_dim + acc_stride)
        + plan.mc * s_stride
        + SPARE_REGISTERS * lanes
    )
    sizes = (
        abs(problem.scale) * LOG2_E or 1.0,
        float(np.sign(problem.scale)),
        problem.heads_kv,
        problem.group,
        rows,
        problem.seqlen_k,
        problem.head_dim,
        problem.head_dim_v,
        problem.offset,
        UNLIMITED if problem.left is None else problem.left,
        UNLIMITED if problem.right is None else problem.right,
        plan.block_m,
        m_blocks,
        plan.block_n,
        plan.mc,
        s_stride,
        acc_stride,
        plan.split_n,
        plan.num_splits,
    )
    return _Prepared(
        forward=kernel("forward", variant),
        combine=kernel("combine", variant) if plan.num_splits > 1 else None,
        sizes=sizes,
        num_items=heads * m_blocks * plan.num_splits,
        num_rows=heads * rows,
        acc_stride=acc_stride,
        scratch_bytes=elements * itemsize + LINE,
    )


def run(plan: Plan, problem: Problem, operands: Operands) -> None:
    """Write operands.out and operands.lse."""
    prepared = _prepare(plan)
    dtype = operands.out.dtype
    counter = c_int64()
    state = None if operands.lse is None else np.empty((*operands.lse.shape, 2), dtype)
    partial = None
    if prepared.combine is not None:
        partial = np.empty((prepared.num_rows * plan.num_splits, prepared.acc_stride + 2), dtype)
    addresses = (addressof(counter), _address(state), _address(partial))
    tables: list[np.ndarray] = []
    layouts = [
        field
        for array in (
            operands.q,
            operands.k,
            operands.v,
            operands.out,
            operands.mask,
            operands.bias,
        )
        for field in _layout(array, tables)
    ]
    job = pack((*prepared.sizes, prepared.num_items, *addresses, *layouts))
    _share_out(prepared.forward, job, plan.num_threads, prepared.scratch_bytes)
    if prepared.combine is not None:
        counter.value = 0
        job = pack((*prepared.sizes, prepared.num_rows, *addresses, *layouts))
        _share_out(prepared.combine, job, plan.num_threads, 0)
    if state is not None:
        # log(0) of a row that saw nothing is -inf, as it should be
        with np.errstate(divide="ignore", invalid="ignore"):
            np.add(state[..., 0] * LN_2, np.log(state[..., 1]), out=operands.lse)


def _share_out(function: compile.Kernel, job, num_threads: int, scratch_bytes: int) -> None:
    """Run a kernel on the job's items until none is left."""
    address = addressof(job)

    def work() -> None:
        scratch = _scratch(scratch_bytes)
        place = (_address(scratch) + LINE - 1) & -LINE
        # The kernel comes back now and then, so that Python can act on a signal.
        while function(address, place, ITEMS_PER_CALL):
            pass

    if num_threads == 1:
        work()
    else:
        threads.run_on_threads(work, num_threads)


def _scratch(nbytes: int) -> np.ndarray:
    """This thread's scratch; it holds whatever the last call left."""
    buffer = getattr(_kept, "buffer", None)
    if buffer is None or buffer.nbytes < nbytes:
        buffer = np.empty(nbytes, np.uint8)
        if nbytes <= SCRATCH_KEPT:
            _kept.buffer = buffer
    return buffer


def _address(array: np.ndarray | None) -> int:
    return 0 if array is None else array.__array_interface__["data"][0]


def _layout(array: np.ndarray | None, tables: list[np.ndarray]) -> tuple[int, ...]:
    """The job's fields of one operand, in the order of PARTS; a table of offsets, if it needs one,
    goes to `tables`.
    """
    if array is None:
        return _ABSENT
    itemsize = array.itemsize
    *lead, head, row, col = [stride // itemsize for stride in array.strides]
    if len(lead) < 2:
        return _address(array), 0, lead[0] if lead else 0, head, row, col
    table = _offsets(array.shape[:-3], lead)
    tables.append(table)
    return _address(array), _address(table), 0, head, row, col


def _offsets(shape: tuple[int, ...], strides: list[int]) -> np.ndarray:
    """(batch,) int64: offset of each leading index, in C order."""
    offsets = np.zeros(1, np.int64)
    for length, stride in zip(shape, strides, strict=True):
        offsets = (offsets[:, None] + np.arange(length, dtype=np.int64) * stride).ravel()
    return offsets
