"""A call as a job: the numbers that a CUDA kernel is launched with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

import numpy as np

from .. import dropout
from ..problem import Gradients, Operands, Problem
from .choice import Pieces
from .job import (
    BIAS_KINDS,
    GRADIENT_FIELDS,
    GRADIENT_OPERANDS,
    OPERANDS,
    PARTS,
    PLACE,
    UNLIMITED,
    GradientJob,
    Job,
)

LOG2_E = 1.4426950408889634  # 1 / ln 2

AddressOf = Callable[[np.ndarray], int]


def job_of(
    problem: Problem, operands: Operands, pieces: Pieces, address_of: AddressOf, partial: int = 0
) -> Job:
    """The job of a call.

    operands    views of the memory of the device, but for sinks, ranges, starts, dropout_keys and
                block_table
    address_of  where a view lies; of these, and of tables made here, where a copy does, in C order
    partial     address of (batch, heads_q, seqlen_q, num_splits, head_dim_v + 2) numbers of
                Variant.dtype, if keys are split
    """
    job: list[float] = list(_template(problem, pieces))
    if partial:
        parts = problem.batch * problem.heads_q * problem.seqlen_q * pieces.num_splits
        itemsize = np.dtype(problem.variant.dtype).itemsize
        job[PLACE["partial"]] = partial
        job[PLACE["partial_state"]] = partial + parts * problem.head_dim_v * itemsize
    _lay_out(job, OPERANDS, operands, operands.starts is not None, address_of)
    for name, value in _extras(problem, operands, address_of).items():
        job[PLACE[name]] = value
    return Job(*job)


def gradient_job_of(
    problem: Problem,
    operands: Operands,
    gradients: Gradients,
    pieces: Pieces,
    address_of: AddressOf,
    **rows: int,
) -> GradientJob:
    """The job of the kernels of gradients: job_of() with what they get besides.

    rows  addresses of the numbers of gradient_rows.py
    """
    job: list[float] = [0] * len(GRADIENT_FIELDS)
    job[: len(Job._fields)] = job_of(problem, operands, pieces, address_of)
    packed = operands.starts is not None
    _lay_out(job, GRADIENT_OPERANDS[:-3], gradients, packed, address_of)
    _lay_out(job, GRADIENT_OPERANDS[-3:], gradients, False, address_of)  # of each batch entry
    for name, place in rows.items():
        job[PLACE[name]] = place
    return GradientJob(*job)


def _lay_out(
    job: list[float], names: tuple[str, ...], arrays: Any, packed: bool, address_of: AddressOf
) -> None:
    """Set address and strides of operands, as PARTS has them. Packed ones have one batch entry, in
    which Operands.starts says where each member begins.
    """
    for name in names:
        array = getattr(arrays, name)
        if array is None:
            continue
        place = address_of(array)
        if name in ("lse", "dlse"):
            array = array[..., None]  # of one column
        elif name in ("dsinks", "dalibi"):
            array = array[..., None, None]
        table, batch, *rest = _strides(array, address_of)
        layout = (place, 0, 0, *rest) if packed else (place, table, batch, *rest)
        job[PLACE[name] : PLACE[name] + len(PARTS)] = layout


@lru_cache(maxsize=1024)
def _template(problem: Problem, pieces: Pieces) -> Job:
    """A job without arrays. Cached: 15 of the 35 us that a job took."""
    return Job(**_numbers(problem), **pieces._asdict())


def _numbers(problem: Problem) -> dict[str, float]:
    # In the kernel's dtype, in which a tiny scale may be 0 and a large one infinite.
    largest = float(np.finfo(problem.variant.dtype).max)
    dtype = np.dtype(problem.variant.dtype).type
    scale_log2 = float(dtype(min(abs(problem.scale) * LOG2_E, largest)))
    return {
        "scale": problem.scale,
        "scale_log2": scale_log2 or 1.0,
        "q_sign": float(np.sign(problem.scale)) if scale_log2 else 0.0,
        "softcap": problem.softcap,
        "dropout_factor": dropout.factor(problem.dropout_p),
        "batch": problem.batch,
        "heads_q": problem.heads_q,
        "heads_kv": problem.heads_kv,
        "group": problem.group,
        "seqlen_q": problem.seqlen_q,
        "seqlen_k": problem.seqlen_k,
        "head_dim": problem.head_dim,
        "head_dim_v": problem.head_dim_v,
        "offset": problem.offset,
        "left": UNLIMITED if problem.left is None else problem.left,
        "right": UNLIMITED if problem.right is None else problem.right,
        "chunk": problem.chunk,
        "keys_before": problem.keys_before,
        "dropout_threshold": dropout.threshold(problem.dropout_p),
        "first_key": problem.first_key,
    }


def _strides(array: np.ndarray, address_of: AddressOf) -> Iterator[int]:
    """(table, batch, head, row, col) in elements."""
    itemsize = array.itemsize
    *lead, head, row, col = (stride // itemsize for stride in array.strides)
    if len(lead) > 1:
        offsets = np.zeros(1, np.int64)
        for length, step in zip(array.shape, lead, strict=False):
            offsets = (offsets[:, None] + np.arange(length, dtype=np.int64) * step).ravel()
        yield from (address_of(offsets), 0)
    else:
        yield from (0, lead[0] if lead else 0)
    yield from (head, row, col)


def _extras(problem: Problem, operands: Operands, address_of: AddressOf) -> dict[str, int]:
    modifies = problem.variant.score_mod is not None
    kind = 0 if operands.bias is None else BIAS_KINDS.index(operands.bias.dtype.name)
    changes = problem.softcap > 0 or operands.alibi is not None or modifies or kind > 0
    found = {"changes_scores": int(changes), "bias_kind": kind}
    for name in ("sinks", "ranges", "starts", "dropout_keys", "block_table"):
        array = getattr(operands, name)
        if array is not None:
            found[name] = address_of(array)
    if operands.block_table is not None:
        found["max_pages"] = operands.block_table.shape[-1]
        found["page_size"] = operands.k.shape[-2]
    if operands.alibi is not None:
        found["alibi"], found["alibi_batch"] = address_of(operands.alibi), _step(operands.alibi)
    for name in ("score_aux", "mask_aux"):
        arrays = getattr(operands, name)
        if arrays:
            found[name] = address_of(_aux_table(arrays, address_of))
    if operands.block_mask is not None:
        parts = ("_batch", "_head", "_row", "_col")
        found |= zip(("block_mask" + p for p in parts), operands.block_mask.strides, strict=True)
        found |= {"block_mask": address_of(operands.block_mask)}
        found |= {"block_mask_m": problem.block_mask_m, "block_mask_n": problem.block_mask_n}
    return found


def _step(array: np.ndarray) -> int:
    """Elements from the slopes of a batch entry to those of the next: 0, or one for each head."""
    lead = [s for s, n in zip(array.strides[:-1], array.shape, strict=False) if n > 1]
    return array.shape[-1] if any(lead) else 0


def _aux_table(arrays: tuple[np.ndarray, ...], address_of: AddressOf) -> np.ndarray:
    """int64: of each array the address, its sizes, and its strides in elements."""
    numbers: list[int] = []
    for array in arrays:
        steps = (stride // array.itemsize for stride in array.strides)
        numbers += [address_of(array), *array.shape, *steps]
    return np.array(numbers, np.int64)
