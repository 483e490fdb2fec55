"""Scratch, the job, threads for the gradients' kernel."""

from __future__ import annotations

from collections.abc import Callable
from ctypes import addressof, c_int64
from functools import lru_cache
from typing import Any

import numpy as np

from ..machine import VectorUnit
from ..problem import Gradients, Operands, Plan, Problem, Variant
from . import compile
from .job import FIELDS, GRADIENT_OPERANDS, ITEM_SIZE, OPERANDS, PARTS, pack_gradients
from .run import LINE, Share, address, extras, lanes_of, layout, score_fields, sizes_of

FLOP_PER_CALL = 500_000_000  # see run.py


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


def strides(problem: Problem, lanes: int) -> tuple[int, int]:
    """(q_stride, d_stride): whole registers and one more, as powers of two share cache sets."""
    q_stride, d_stride = (
        (-(-dim // lanes) + 1) * lanes for dim in (problem.head_dim, problem.head_dim_v)
    )
    return q_stride, d_stride


@lru_cache(maxsize=1024)
def scratch_elements(plan: Plan, lanes: int) -> int:
    """What backward.scratch_places() shares out."""
    q_stride, d_stride = strides(plan.problem, lanes)
    block_m, block_n = plan.block_m, plan.block_n
    rows = block_m * (2 * q_stride + d_stride + 2)
    keys = block_n * (3 * q_stride + 2 * d_stride)
    return rows + keys + 3 * block_m * (block_n + lanes) + lanes


def run(plan: Plan, problem: Problem, operands: Operands, gradients: Gradients) -> None:
    """Add to all of gradients that is written but dsinks."""
    variant = problem.variant
    dtype = np.dtype(variant.dtype)
    lanes = lanes_of(variant)
    kept: list[Any] = [operands, gradients]
    heads, n_blocks = problem.batch * problem.heads_kv, -(-problem.seqlen_k // plan.block_n)
    shared, num_threads = _sharing(gradients, plan)
    heads_per_item = heads if shared else 1
    counter, progress = c_int64(), np.zeros((heads, n_blocks), np.int64)
    dalibi = None
    if gradients.dalibi is not None:
        dalibi = np.zeros((*gradients.dalibi.shape, n_blocks))
    values = _values(plan, problem, operands, gradients, lanes, kept)
    values |= {
        "counter": addressof(counter),
        "progress": address(progress),
        "n_blocks": n_blocks,
        "num_items": n_blocks * (heads // heads_per_item),
        "heads_per_item": heads_per_item,
        # Few heads at a time, whose rows then stay in the last-level cache (8 heads of 4096 tokens:
        # 89.4 -> 90.7 % of the multiply-add peak), and still no two threads at one.
        "together": num_threads,
        "dalibi": address(dalibi),
    }
    kept += [counter, progress, dalibi]
    job = pack_gradients(values)
    share = Share(
        kernel(variant),
        job,
        counter,
        scratch_elements(plan, lanes) * dtype.itemsize + 8 * ITEM_SIZE + LINE,
        tuple(kept),
    )
    flop = max(problem.flop * 5 // 2, 1)
    share.run(num_threads, max(1, FLOP_PER_CALL * n_blocks * heads // heads_per_item // flop))
    if dalibi is not None:
        gradients.dalibi[...] += dalibi.sum(axis=-1)  # type: ignore[index]


def _sharing(gradients: Gradients, plan: Plan) -> tuple[bool, int]:
    """(whether heads share dbias, threads): then an item has its keys of all heads, one by one, and
    if keys share it too, one thread does all.
    """
    if gradients.dbias is None:
        return False, plan.num_threads
    pairs = zip(gradients.dbias.strides, gradients.dbias.shape, strict=True)
    summed = [stride == 0 and size > 1 for stride, size in pairs]
    return any(summed[:-2]) or summed[-1], 1 if summed[-1] else plan.num_threads


def _values(
    plan: Plan,
    problem: Problem,
    operands: Operands,
    gradients: Gradients,
    lanes: int,
    kept: list[Any],
) -> dict[str, float]:
    """The job's fields by name, but for those of one call; arrays that must live go to `kept`."""
    changes_scores, bias_kind = score_fields(problem, operands)
    q_stride, d_stride = strides(problem, lanes)
    lse = np.ascontiguousarray(operands.lse)
    dlse = None if gradients.dlse is None else np.ascontiguousarray(gradients.dlse)
    kept += [lse, dlse]
    packed = operands.starts is not None
    values: dict[str, float] = dict(zip(FIELDS, sizes_of(plan), strict=False))
    values |= {
        "scale": abs(problem.scale),
        "q_stride": q_stride,
        "d_stride": d_stride,
        "changes_scores": changes_scores,
        "bias_kind": bias_kind,
        "row_lse": address(lse),
        "dlse": address(dlse),
        "lse_batch": 0 if packed else lse.shape[-2] * lse.shape[-1],
        "lse_head": lse.shape[-1],
    }
    first = FIELDS.index("alibi")
    others = extras(problem, operands, kept)
    values |= dict(zip(FIELDS[first : first + len(others)], others, strict=True))
    for names, arrays in ((OPERANDS, operands), (GRADIENT_OPERANDS, gradients)):
        for name in names:
            fields = list(layout(getattr(arrays, name), kept))
            if packed:
                fields[1:3] = 0, 0  # one batch entry, in which `starts` says where each begins
            values |= {name + part: n for part, n in zip(PARTS, fields, strict=True)}
    return values
