"""Which kernels compute gradients on the tensor cores, as data."""

from __future__ import annotations

from dataclasses import dataclass

from ...problem import Problem
from .tilings import HEAD_DIMS, ITEM

WIDEST = 128  # head_dim: dk and dv of more do not fit into the registers beside the scores
BLOCK = 64  # queries and keys of a block; 32 of those that stream through where head_dim is large


@dataclass(frozen=True, slots=True)
class GradientTiling:
    """What the kernels of gradients are specialised for."""

    storage: str  # "float16" or "bfloat16"
    head_dim: int  # of HEAD_DIMS, for head_dim and head_dim_v
    block_m: int = BLOCK  # rows that a thread block keeps: queries for dq, keys for dk and dv
    block_n: int = BLOCK  # rows of a step
    warps: int = 4
    padded: bool = False
    strided: bool = False

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def shared_bytes(self) -> int:
        row = -(-self.head_dim * ITEM // 128) * 128
        return row * (2 * self.block_m + 4 * self.block_n)


def gradient_tiling(
    problem: Problem, *, options: bool, strided: bool, shared_limit: int
) -> GradientTiling | None:
    """The kernels for the gradients of a problem, or None if these do not know one of its options.

    options       a mask, a bias or ALiBi slopes are among the operands
    strided       a row of q, k, v or dout is not whole chunks of 16 aligned bytes
    shared_limit  bytes of shared memory that a thread block may have
    """
    variant, largest = problem.variant, max(problem.head_dim, problem.head_dim_v)
    if variant.storage not in ("float16", "bfloat16") or largest > WIDEST:
        return None
    modified = variant.score_mod is not None or variant.mask_mod is not None
    special = problem.dropout_p or problem.softcap or problem.chunk or problem.block_mask_m
    if options or modified or special:
        return None
    head_dim = next(width for width in HEAD_DIMS if width >= largest)
    padded = min(problem.head_dim, problem.head_dim_v) < head_dim
    tiling = GradientTiling(problem.variant.storage, head_dim, padded=padded, strided=strided)
    return tiling if tiling.shared_bytes <= shared_limit else None
