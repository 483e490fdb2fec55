"""The rules of score_mod, mask_mod, aux and block_mask.

Imported by calls that have one: tracing is nothing that a plain call should wait for.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from .block_mask import BlockMask
from .modifier import Modifier, aux_arrays, aux_types
from .trace import traced


class Modifying(NamedTuple):
    """What modifiers add to Variant, Problem and Operands."""

    modifiers: tuple[Modifier | None, Modifier | None] = None, None  # score_mod, mask_mod
    score_aux: tuple[np.ndarray, ...] = ()
    mask_aux: tuple[np.ndarray, ...] = ()
    block_mask: np.ndarray | None = None
    block: tuple[int, int, int] = 0, 0, 0  # block_mask_m, block_mask_n, block_mask_pairs


def modifying_of(
    score_mod: Any, mask_mod: Any, aux: Any, block_mask: Any, scores: tuple[int, int, int, int]
) -> Modifying:
    """Return the canonical values of one call; `scores` is (batch, heads_q, seqlen_q, seqlen_k)."""
    arrays = aux_arrays(aux)
    if arrays and score_mod is None and mask_mod is None:
        rule = "aux must be empty without score_mod and mask_mod"
        hint = ", as a block mask has its own" if block_mask is not None else ""
        raise ValueError(f"{rule}{hint}, got {len(arrays)} of them")
    types = aux_types(arrays)
    score = None if score_mod is None else traced(score_mod, "score_mod", types)
    score_aux = () if score is None else arrays
    if block_mask is None:
        if mask_mod is None:
            return Modifying((score, None), score_aux)
        return Modifying((score, traced(mask_mod, "mask_mod", types)), score_aux, arrays)
    if mask_mod is not None:
        raise ValueError("mask_mod must be None with block_mask, which has its own, got both")
    kinds = _kinds_of(block_mask, scores)
    mask = block_mask.mask_mod
    block = (*block_mask.block, block_mask.pairs)
    return Modifying((score, mask), score_aux, block_mask.aux, kinds, block)


def _kinds_of(block_mask: Any, scores: tuple[int, int, int, int]) -> np.ndarray:
    """Return Operands.block_mask."""
    if not isinstance(block_mask, BlockMask):
        rule = "block_mask must be what create_block_mask() returns"
        raise TypeError(f"{rule}, got {type(block_mask).__name__}")
    shape = block_mask.shape
    fits = all(size in (1, wanted) for size, wanted in zip(shape[:2], scores[:2], strict=True))
    if not fits or shape[2:] != scores[2:]:
        rule = f"block_mask must have shape {scores}, or 1 for batch or heads"
        raise ValueError(f"{rule}, got {shape}")
    for axis, name in enumerate("bh"):
        # Its blocks were looked at for index 0 alone.
        if shape[axis] != scores[axis] and block_mask.mask_mod.uses(name):
            rule = f"block_mask must have shape {scores}, as its mask_mod uses {name}"
            raise ValueError(f"{rule}, got {shape}")
    return np.broadcast_to(block_mask.kinds, scores[:2] + block_mask.kinds.shape[2:])
