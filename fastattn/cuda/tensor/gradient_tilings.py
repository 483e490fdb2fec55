"""Which kernels compute gradients on the tensor cores, as data."""

from __future__ import annotations

from dataclasses import dataclass

from ...problem import Problem
from .tilings import HEAD_DIMS, ITEM

WIDEST = 128  # head_dim: dk and dv of more do not fit into the registers beside the scores
BLOCK = 64  # queries and keys of a block
# Rows of a step by head_dim. Beside more of 128, ptxas spills 44 bytes of dk and dv for sm_100 and
# 80 for sm_120; and with 32, two thread blocks fit into the shared memory of sm_80 instead of one.
STEP = {64: 64, 96: 32, 128: 32}


@dataclass(frozen=True, slots=True)
class GradientTiling:
    """What the kernels of gradients are specialised for."""

    storage: str  # "float16" or "bfloat16"
    head_dim: int  # of HEAD_DIMS, for head_dim and head_dim_v
    block_n: int  # rows of a step
    block_m: int = BLOCK  # rows that a thread block keeps: queries for dq, keys for dk and dv
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
) -> tuple[GradientTiling | None, str]:
    """(the kernels for the gradients of a problem, "") or (None, why they do not compute them).

    options       a mask, a bias or ALiBi slopes are among the operands
    strided       a row of q, k, v or dout is not whole chunks of 16 aligned bytes
    shared_limit  bytes of shared memory that a thread block may have
    """
    variant, largest = problem.variant, max(problem.head_dim, problem.head_dim_v)
    if problem.tf32:
        return None, "gradients of float32 are not rounded to tf32"
    if variant.storage not in ("float16", "bfloat16"):
        return None, f"tensor cores multiply 16-bit types, not {variant.storage}"
    if largest > WIDEST:
        return None, f"head_dim is above {WIDEST}"
    modified = variant.score_mod is not None or variant.mask_mod is not None
    special = problem.dropout_p or problem.softcap or problem.chunk or problem.block_mask_m
    if options or modified or special:
        return None, "masks, biases and other options change scores"
    head_dim = next(width for width in HEAD_DIMS if width >= largest)
    padded = min(problem.head_dim, problem.head_dim_v) < head_dim
    tiling = GradientTiling(
        variant.storage, head_dim, STEP[head_dim], padded=padded, strided=strided
    )
    fits = tiling.shared_bytes <= shared_limit
    return (tiling, "") if fits else (None, "a thread block has too little shared memory")
