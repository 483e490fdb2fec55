"""Scratch, the job, threads: the only caller of the CPU kernels."""

from __future__ import annotations

from collections.abc import Callable
from ctypes import Array, addressof
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from .. import guards
from ..machine import VectorUnit
from ..problem import Operands, Others, Plan, Problem, Variant
from ..results import maker
from . import compile
from .job import ITEM_SIZE, LINE, LN_2, PLACE, ROWS_AFTER, SPARE_REGISTERS, Counter, Job, pack
from .job_fields import base_2, extras, lanes_of, score_fields, sizes_of, state_fields, widths
from .layout import address, layouts
from .share import Share, run_alone

FLOP_PER_CALL = 500_000_000  # a kernel returns after this much, 5 to 50 ms, to let Python act
MERGED_PER_THREAD = 200_000  # elements of partial results: some 40 us, as plan.FLOP_PER_THREAD
_UNTOUCHED = -1.0  # no sum of exponentials
_Q, _K, _V, _MASK, _BIAS, _OUT, _LSE = (
    PLACE[name] for name in ("q", "k", "v", "mask", "bias", "out", "lse")
)
_RANGES, _TABLE, _MAX_PAGES, _ALIBI, _SINKS, _COUNTER = (
    PLACE[name] for name in ("ranges", "block_table", "max_pages", "alibi", "sinks", "counter")
)


def unavailable(variant: Variant) -> str:
    """Why this backend cannot run the variant, in one line; "" if it can."""
    return compile.unavailable(("forward", variant))


def not_kept(variant: Variant) -> str:
    """Why every process compiles the variant anew, in one line; "" if it need not."""
    return compile.not_kept(("forward", variant))


def can_split(variant: Variant) -> bool:
    """Whether keys can be split over work items, which takes one more kernel."""
    return not compile.unavailable(_combine_key(variant))


def _combine_key(variant: Variant) -> tuple[str, Variant]:
    """The splits of all modifiers merge alike."""
    return "combine", Variant(variant.dtype, variant.storage)


def built_in_kernels() -> list[tuple[str, Variant]]:
    """(name, variant) of every kernel that calls without modifiers may need."""
    stored = [("float32", "float32"), ("float64", "float64")]
    stored += [("float32", "float16"), ("float32", "bfloat16")]
    kernels = [(name, Variant(*types)) for types in stored for name in ("forward", "combine")]
    return kernels + [("forward", Variant(*types, paged=True)) for types in stored]


def kernel(name: str, variant: Variant) -> compile.Kernel:
    """A compiled kernel."""
    return compile.kernel((name, variant), builder(name, variant))


def builder(name: str, variant: Variant) -> Callable[[VectorUnit], Callable]:
    """What compile.kernel() and compile.store() build the kernel (name, variant) with. The module
    that defines it, and Numba with it, is imported only if it must be compiled.
    """

    def build(unit: VectorUnit) -> Callable:
        if name == "forward":
            from .forward import forward_kernel as factory
        else:
            from .decode import combine_kernel as factory
        return factory(variant, unit)

    return build


@dataclass(frozen=True)
class _Prepared:
    """What run() needs of a plan besides arrays: made once, as it costs more than a small call."""

    forward: compile.Kernel
    combine: compile.Kernel | None
    sizes: tuple  # the first fields of the job, up to num_threads
    num_items: int
    items_per_call: int
    num_rows: int
    acc_stride: int
    scratch_bytes: int
    combine_threads: int


@lru_cache(maxsize=1024)
def _prepare(plan: Plan) -> _Prepared:
    problem, variant = plan.problem, plan.problem.variant
    itemsize, lanes = np.dtype(variant.dtype).itemsize, lanes_of(variant)
    s_stride, acc_stride = widths(plan)
    rows = problem.group * problem.seqlen_q
    heads = problem.batch * problem.heads_kv
    m_blocks = -(-rows // plan.block_m)
    num_items = heads * m_blocks * plan.num_splits
    merged = heads * rows * plan.num_splits * acc_stride
    tables = 2 if variant.paged else 0
    elements = (
        8 * (ITEM_SIZE + tables * (plan.block_n + ROWS_AFTER)) // itemsize
        + -(-plan.block_m // lanes) * lanes * (problem.head_dim + 2 * acc_stride + 4)
        + plan.block_n * (problem.head_dim + acc_stride)
        + (plan.mc + 1) * s_stride
        + SPARE_REGISTERS * lanes
    )
    return _Prepared(
        forward=kernel("forward", variant),
        combine=kernel(*_combine_key(variant)) if plan.num_splits > 1 else None,
        sizes=sizes_of(plan),
        num_items=num_items,
        items_per_call=max(1, FLOP_PER_CALL * num_items // max(problem.flop, 1)),
        num_rows=heads * rows,
        acc_stride=acc_stride,
        scratch_bytes=elements * itemsize + LINE,
        combine_threads=max(1, min(plan.num_threads, merged // MERGED_PER_THREAD)),
    )


def run(plan: Plan, problem: Problem, operands: Operands) -> None:
    """Write operands.out and operands.lse."""
    state = row_states(plan, problem, operands)
    if state is not None and operands.lse is not None:
        _write_lse(operands.lse, state, operands.ranges, operands.sinks)


def row_states(plan: Plan, problem: Problem, operands: Operands) -> np.ndarray | None:
    """Write operands.out; return base-2 reference and sum of exponentials of each row, (*lse.shape,
    2), if operands.lse is not None. Rows past q_len hold anything, and a sum below 0.
    """
    kept: list[np.ndarray] = []  # arrays that must outlive the kernels
    state = None
    if operands.lse is not None:
        state = np.empty((*operands.lse.shape, 2), problem.variant.dtype)
        if operands.ranges is not None:
            state[..., 1] = _UNTOUCHED
        kept.append(state)
    prepared = _prepare(plan)
    job = _job(prepared, problem, operands, state, kept)
    _draw(plan, prepared, job, (operands, kept))
    return state


def _job(
    prepared: _Prepared,
    problem: Problem,
    operands: Operands,
    state: np.ndarray | None,
    kept: list[np.ndarray],
) -> Array:
    """The job, but for what _draw() fills in."""
    arrays = (operands.q, operands.k, operands.v, operands.out, operands.mask, operands.bias)
    return pack(
        (
            *prepared.sizes,
            prepared.num_items,
            *score_fields(problem, operands),
            0,
            *state_fields(operands, state),
            0,
            *extras(problem, operands, kept),
            *layouts(arrays, operands.starts is not None, kept),
        )
    )


def _draw(plan: Plan, prepared: _Prepared, job: Array, keep: tuple[Any, ...]) -> None:
    """Run the job on the plan's threads; `keep` is all that it reaches."""
    counter = Counter()
    job[_COUNTER] = addressof(counter)
    if prepared.combine is None:
        if plan.num_threads == 1 and not guards.ON:
            run_alone(prepared.forward, job, prepared.scratch_bytes, prepared.items_per_call)
            return
        share = Share(prepared.forward, job, counter, prepared.scratch_bytes, keep)
        share.run(plan.num_threads, prepared.items_per_call)
        return
    shape = (prepared.num_rows * plan.num_splits, prepared.acc_stride + 2)
    partial = np.empty(shape, plan.problem.variant.dtype)
    job[PLACE["partial"]] = address(partial)
    share = Share(prepared.forward, job, counter, prepared.scratch_bytes, (keep, partial))
    share.run(plan.num_threads, prepared.items_per_call)
    # A job of its own: another thread may still be on its way out of the first.
    job, counter = Job.from_buffer_copy(job), Counter()
    job[_COUNTER], job[PLACE["num_items"]] = addressof(counter), prepared.num_rows
    share = share._replace(kernel=prepared.combine, job=job, counter=counter)
    share.run(prepared.combine_threads, prepared.num_rows)


class Repeat:
    """A call without modifiers, dropout and q_len, ready for more of its layout."""

    def __init__(self, plan: Plan, operands: Operands, shape: tuple[int, ...]):
        """shape: of the result, as many elements as operands.out."""
        self.problem, self.lead = plan.problem, operands.q.shape[:-3]
        self._plan, self._prepared = plan, _prepare(plan)
        in_memory, self._axes = _order(operands.out, shape)
        self._new_out = maker(in_memory, operands.out.dtype)
        self._lse_dtype = plan.problem.variant.dtype
        self._low_bits = operands.out.itemsize - 1
        self._bias_bits = 0 if operands.bias is None else operands.bias.itemsize - 1
        self._lse_shape, self._state_shape, state = None, (), None
        if operands.lse is not None:
            self._lse_shape, self._state_shape = shape[:-1], (*operands.lse.shape, 2)
            state = np.empty(self._state_shape, self._lse_dtype)
        self._job = _job(self._prepared, plan.problem, operands, state, [])

    def run(
        self,
        arrays: tuple[np.ndarray | None, ...],
        out: np.ndarray | None = None,
        others: Others | None = None,
    ) -> tuple[np.ndarray, np.ndarray | None] | None:
        """Return (out, lse or None) for q, k and v, or these with mask and bias; None if write()
        cannot.

        out     of the layout that the call had, if it had one
        others  what the call had of them
        """
        out, lse = self.new_out() if out is None else out, self.new_lse()
        masks = (0, 0) if len(arrays) == 3 else ()
        places = (*map(address, arrays), *masks, address(out))
        return (out, lse) if self.write(places, (arrays, out), lse, others) else None

    def new_out(self) -> np.ndarray:
        """A result without contents."""
        out = self._new_out()
        return out if self._axes is None else out.transpose(self._axes)

    def new_lse(self) -> np.ndarray | None:
        """lse without contents, if the call had it."""
        return None if self._lse_shape is None else np.empty(self._lse_shape, self._lse_dtype)

    def write(
        self,
        places: tuple[int, ...],
        keep: tuple[Any, ...],
        lse: np.ndarray | None = None,
        others: Others | None = None,
    ) -> bool:
        """Write the result of q, k, v, mask and bias at these addresses, 0 for none, to that of
        out, all of which `keep` keeps alive, and to lse. False if one is not aligned, which the
        layout does not say, or if there is too little memory.
        """
        job = Job.from_buffer_copy(self._job)
        job[_Q], job[_K], job[_V], job[_MASK], job[_BIAS], job[_OUT] = q, k, v, _, bias, out = (
            places
        )
        if (q | k | v | out) & self._low_bits or bias & self._bias_bits:
            return False
        sinks = None
        if others is not None:
            ranges, table, alibi, sinks = others
            job[_RANGES], job[_ALIBI], job[_SINKS] = address(ranges), address(alibi), address(sinks)
            if table is not None:
                job[_TABLE], job[_MAX_PAGES] = address(table), table.shape[-1]
            keep = (keep, others)
        try:
            if lse is None:
                _draw(self._plan, self._prepared, job, keep)
            else:
                state = np.empty(self._state_shape, self._lse_dtype)
                job[_LSE] = address(state)
                _draw(self._plan, self._prepared, job, (keep, state))
                _write_lse(lse.reshape(self._state_shape[:-1]), state, sinks=sinks)
        except MemoryError:
            return False
        return True


def _order(
    out: np.ndarray, shape: tuple[int, ...]
) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
    """Return `shape` as its axes lie in memory where those of `out` lie in another order, and how
    to transpose it back.
    """
    if out.flags.c_contiguous or out.ndim != len(shape):
        return shape, None
    axes = sorted(range(out.ndim), key=lambda axis: -out.strides[axis])
    return tuple(shape[axis] for axis in axes), tuple(axes.index(n) for n in range(out.ndim))


def _write_lse(
    lse: np.ndarray,
    state: np.ndarray,
    ranges: np.ndarray | None = None,
    sinks: np.ndarray | None = None,
) -> None:
    """Turn references and sums into lse, but for rows past q_len, which api has written."""
    written: Any = True if ranges is None else state[..., 1] != _UNTOUCHED
    # log(0) of a row that saw nothing is -inf, as it should be.
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        np.add(state[..., 0] * LN_2, np.log(state[..., 1]), out=lse, where=written)
        if sinks is not None:
            # A row that saw no key gets its sink to the bit: api writes it where there are no keys.
            is_sink = (state[..., 1] == 1) & (state[..., 0] == base_2(sinks)[:, None])
            np.copyto(lse, sinks[:, None], where=is_sink)
