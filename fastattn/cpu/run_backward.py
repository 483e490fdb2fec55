"""Scratch, the job, threads for the gradients' kernel."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from ctypes import addressof
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from ..large_rows import is_large, is_ordinary, is_same
from ..machine import VectorUnit
from ..problem import Gradients, Operands, Plan, Problem, Variant
from . import compile
from .job import ITEM_SIZE, LINE, LN_2, Counter, pack_gradients
from .job_fields import base_2, extras, lanes_of, score_fields, sizes_of
from .layout import address, layouts
from .run import FLOP_PER_CALL, row_states
from .share import Share

SPLIT_BLOCKS = 4  # key blocks of one run of the online softmax, as in the forward pass


def unavailable(variant: Variant) -> str:
    """Why this backend cannot run the variant, in one line; "" if it can."""
    return compile.unavailable(("backward", variant))


def kernel(variant: Variant) -> compile.Kernel:
    """The compiled kernel."""
    return compile.kernel(("backward", variant), builder(variant))


def builder(variant: Variant) -> Callable[[VectorUnit], Callable]:
    """What compile.kernel() builds it with; see run.builder()."""

    def build(unit: VectorUnit):
        from .backward import backward_kernel

        return backward_kernel(variant, unit)

    return build


@dataclass(frozen=True)
class _Prepared:
    """What run() needs of a plan besides arrays."""

    kernel: compile.Kernel
    sizes: tuple[float, ...]  # the first fields of the job, up to num_threads
    heads: int  # key heads of the whole batch
    n_blocks: int
    strides: tuple[int, int]  # q_stride, d_stride
    scratch_bytes: int
    blocks_per_call: int  # key blocks of one head after which a kernel returns, to let Python act


@lru_cache(maxsize=1024)
def _prepare(plan: Plan) -> _Prepared:
    problem, variant = plan.problem, plan.problem.variant
    lanes = lanes_of(variant)
    # Whole registers and one more: rows a power of two apart share few sets of the cache.
    q_stride, d_stride = (
        (-(-dim // lanes) + 1) * lanes for dim in (problem.head_dim, problem.head_dim_v)
    )
    heads, n_blocks = problem.batch * problem.heads_kv, -(-problem.seqlen_k // plan.block_n)
    # What backward.scratch_places() shares out.
    rows = plan.block_m * (2 * q_stride + d_stride + 2)
    keys = plan.block_n * (3 * q_stride + 2 * d_stride)
    elements = rows + keys + 3 * plan.block_m * (plan.block_n + lanes) + lanes
    flop = max(problem.flop * 5 // 2, 1)
    return _Prepared(
        kernel=kernel(variant),
        sizes=sizes_of(plan),
        heads=heads,
        n_blocks=n_blocks,
        strides=(q_stride, d_stride),
        scratch_bytes=elements * np.dtype(variant.dtype).itemsize + 8 * ITEM_SIZE + LINE,
        blocks_per_call=max(1, FLOP_PER_CALL * n_blocks * heads // flop),
    )


class _Call(NamedTuple):
    """The job's fields of one call that are no arrays of the caller's."""

    num_items: int
    heads_per_item: int
    together: int
    counter: int
    progress: int
    dalibi: int
    row_lse: int
    row_weight: int


def run(plan: Plan, problem: Problem, operands: Operands, gradients: Gradients) -> None:
    """Add to all of gradients that is written but dsinks."""
    prepared = _prepare(plan)
    heads, n_blocks = prepared.heads, prepared.n_blocks
    shared, num_threads = _sharing(gradients, plan)
    heads_per_item = heads if shared else 1
    lse, weights = _references(plan, problem, operands, gradients)
    counter, progress = Counter(), np.zeros((heads, n_blocks), np.int64)
    dalibi = None
    if gradients.dalibi is not None:
        dalibi = np.zeros((*gradients.dalibi.shape, n_blocks))
    call = _Call(
        num_items=n_blocks * (heads // heads_per_item),
        heads_per_item=heads_per_item,
        # Few heads at a time, whose rows then stay in the last-level cache (8 heads of 4096 tokens:
        # 89.4 -> 90.7 % of the multiply-add peak), and still no two threads at one.
        together=num_threads,
        counter=addressof(counter),
        progress=address(progress),
        dalibi=address(dalibi),
        row_lse=address(lse),
        row_weight=address(weights),
    )
    # Arrays that must outlive the kernel.
    kept: list[Any] = [operands, gradients, progress, dalibi, lse, weights]
    job = pack_gradients(_fields(prepared, call, problem, operands, gradients, kept))
    share = Share(prepared.kernel, job, counter, prepared.scratch_bytes, tuple(kept))
    share.run(num_threads, max(1, prepared.blocks_per_call // heads_per_item))
    if dalibi is not None:
        gradients.dalibi[...] += dalibi.sum(axis=-1)  # type: ignore[index]


def _fields(
    prepared: _Prepared,
    call: _Call,
    problem: Problem,
    operands: Operands,
    gradients: Gradients,
    kept: list[Any],
) -> Iterator[float]:
    """The job's fields, in their order."""
    dlse = None if gradients.dlse is None else np.ascontiguousarray(gradients.dlse)
    kept.append(dlse)
    packed = operands.starts is not None
    heads, rows = operands.lse.shape[-2:]  # type: ignore[union-attr]
    yield from (*prepared.sizes, call.num_items)
    yield from (*score_fields(problem, operands), call.counter)
    # lse and partial results are the forward pass's; the strides are those of row_lse.
    yield from (0, 0 if packed else heads * rows, rows, 0)
    yield from extras(problem, operands, kept)
    yield from layouts((*operands[:3], operands.out, operands.mask, operands.bias), packed, kept)
    yield from (abs(problem.scale), call.row_lse, call.row_weight, address(dlse))
    yield from (call.dalibi, call.progress)
    yield from (prepared.n_blocks, call.heads_per_item, call.together, *prepared.strides)
    yield from layouts((gradients.dout, *gradients[2:6]), packed, kept)


def _references(
    plan: Plan, problem: Problem, operands: Operands, gradients: Gradients
) -> tuple[np.ndarray, np.ndarray | None]:
    """The job's row_lse and row_weight."""
    lse = np.ascontiguousarray(operands.lse)
    if is_ordinary(lse):
        return lse, None
    state = _states(plan, problem, operands)
    reference, total = state[..., 0], state[..., 1]
    with np.errstate(all="ignore"):
        chosen = is_large(lse) & is_same(lse, reference * LN_2 + np.log(total))
        weight = np.where(chosen, 1 / total, 1).astype(lse.dtype)
        if gradients.sink_weights is not None:
            sinks = base_2(operands.sinks)[:, None]  # type: ignore[arg-type]
            shares = np.exp2(sinks - reference) * weight
            np.copyto(gradients.sink_weights, shares, where=chosen)
        others = np.where(np.isfinite(lse), base_2(lse), lse)
    return np.where(chosen, reference, others).astype(lse.dtype), weight


def _states(plan: Plan, problem: Problem, operands: Operands) -> np.ndarray:
    """run.row_states() for the keys as these are differentiated; of the values one column."""
    v = operands.v[..., :1]
    variant = replace(problem.variant, score_mod_grad=None)
    problem = replace(problem, variant=variant, head_dim_v=v.shape[-1], dropout_p=0.0)
    out = np.empty((*operands.out.shape[:-1], v.shape[-1]), operands.out.dtype)
    operands = operands._replace(v=v, out=out, dropout_keys=None)
    plan = replace(plan, problem=problem, mc=plan.block_m, split_n=SPLIT_BLOCKS * plan.block_n)
    return row_states(plan, problem, operands)  # type: ignore[return-value]


def _sharing(gradients: Gradients, plan: Plan) -> tuple[bool, int]:
    """(whether heads share dbias, threads): then an item has its keys of all heads, one by one, and
    if keys share it too, one thread does all.
    """
    if gradients.dbias is None:
        return False, plan.num_threads
    pairs = zip(gradients.dbias.strides, gradients.dbias.shape, strict=True)
    summed = [stride == 0 and size > 1 for stride, size in pairs]
    return any(summed[:-2]) or summed[-1], 1 if summed[-1] else plan.num_threads
