"""What a kernel's job says of a plan and of the arrays of a call, beside the operands' layouts."""

from __future__ import annotations

import numpy as np

from .. import dropout
from ..problem import Operands, Plan, Problem, Variant
from . import compile
from .job import BIAS_KINDS, LOG2_E, aux_table
from .layout import address

UNLIMITED = 1 << 40  # a window side of None: past any key


def sizes_of(plan: Plan) -> tuple[float, ...]:
    """The first fields of the job, up to num_threads."""
    problem, variant = plan.problem, plan.problem.variant
    rows = problem.group * problem.seqlen_q
    # In the kernel's dtype, in which a tiny scale may be 0 and a large one infinite.
    largest = float(np.finfo(variant.dtype).max)
    scale_log2 = float(np.dtype(variant.dtype).type(min(abs(problem.scale) * LOG2_E, largest)))
    return (
        scale_log2 or 1.0,
        float(np.sign(problem.scale)) if scale_log2 else 0.0,
        problem.softcap,
        dropout.factor(problem.dropout_p),
        problem.heads_kv,
        problem.group,
        rows,
        problem.seqlen_k,
        problem.head_dim,
        problem.head_dim_v,
        problem.offset,
        UNLIMITED if problem.left is None else problem.left,
        UNLIMITED if problem.right is None else problem.right,
        problem.chunk,
        problem.keys_before,
        dropout.threshold(problem.dropout_p),
        plan.block_m,
        -(-rows // plan.block_m),
        plan.block_n,
        plan.mc,
        *widths(plan),
        plan.split_n,
        plan.num_splits,
        plan.num_threads,
    )


def lanes_of(variant: Variant) -> int:
    """Elements of a vector register of this machine."""
    return compile.host_unit().lanes(np.dtype(variant.dtype).itemsize)


def widths(plan: Plan) -> tuple[int, int]:
    """(s_stride, acc_stride)."""
    lanes = lanes_of(plan.problem.variant)
    # Not a power of two, whose rows would fall into the same sets of the cache.
    return plan.block_n + lanes, -(-plan.problem.head_dim_v // lanes) * lanes


def base_2(x: np.ndarray) -> np.ndarray:
    """x / ln 2, clipped to the range of its dtype, as kernels compute it."""
    largest = np.finfo(x.dtype).max
    return np.clip(x * x.dtype.type(LOG2_E), -largest, largest)


def score_fields(problem: Problem, operands: Operands) -> tuple[int, int]:
    """The job's changes_scores and bias_kind."""
    kind = 0 if operands.bias is None else BIAS_KINDS.index(operands.bias.dtype.name)
    changes = problem.softcap > 0 or operands.alibi is not None
    changes = changes or problem.variant.score_mod is not None
    return int(kind > 0 or changes), kind


def state_fields(operands: Operands, state: np.ndarray | None) -> tuple[int, int, int]:
    """The job's lse, lse_batch and lse_head."""
    if state is None:
        return 0, 0, 0
    heads, rows = state.shape[-3:-1]
    return address(state), 0 if operands.starts is not None else heads * rows, rows


def _page_fields(operands: Operands) -> tuple[int, ...]:
    """The job's fields from block_table to v_page."""
    table, k, v = operands.block_table, operands.k, operands.v
    if table is None:
        return (0,) * 5
    strides = (a.strides[0] // a.itemsize for a in (k, v))
    return address(table), table.shape[-1], k.shape[-2], *strides


def extras(problem: Problem, operands: Operands, kept: list[np.ndarray]) -> tuple[int, ...]:
    """The job's fields from alibi to dropout_keys; the arrays go to `kept`."""
    score_aux = mask_aux = None
    blocks = operands.block_mask
    if operands.score_aux:
        score_aux = aux_table(operands.score_aux)
    if operands.mask_aux:
        mask_aux = aux_table(operands.mask_aux)
    arrays = (operands.alibi, operands.sinks, operands.ranges, operands.starts)
    plain = tuple(None if a is None else np.ascontiguousarray(a) for a in arrays)
    kept += [a for a in (*plain, score_aux, mask_aux) if a is not None]
    return (
        *map(address, plain),
        *_page_fields(operands),
        problem.first_key,
        address(score_aux),
        address(mask_aux),
        address(blocks),
        *((0,) * 4 if blocks is None else blocks.strides),
        problem.block_mask_m,
        problem.block_mask_n,
        address(operands.dropout_keys),
    )
