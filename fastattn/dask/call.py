"""What the tasks of one call share: its arguments, cut to a block."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

import numpy as np
from dask.base import normalize_token

from ..block_mask import PARTIAL, BlockMask
from ..modifier import Modifier
from ..part import Part, placed
from ..problem import Problem
from .grid import Grid

Index = tuple[int, ...]  # of a block of the grid: (*lead, heads, rows, keys)


@dataclass(frozen=True, eq=False)
class Call:
    """The arguments of the whole call but for arrays that are cut into chunks."""

    problem: Problem
    grid: Grid
    ranges: np.ndarray | None  # (*lead, 4): Operands.ranges; None if one answer serves all
    alibi: np.ndarray | None  # as the caller gave it, in Variant.dtype
    sinks: np.ndarray | None  # (heads_q,)
    score_aux: tuple[np.ndarray, ...]
    mask_aux: tuple[np.ndarray, ...]
    block_mask: BlockMask | None
    backend: str
    score_mod_grad: Modifier | None = None  # if the caller gave one

    @cached_property
    def places(self) -> np.ndarray:
        """The place of each batch entry in the batch, (*lead)."""
        lead = tuple(edges[-1] for edges in self.grid.lead)
        return np.arange(prod(lead), dtype=np.int64).reshape(lead)

    @property
    def nbytes(self) -> int:
        """Bytes of its arrays."""
        kinds = None if self.block_mask is None else self.block_mask.kinds
        mask_aux = () if self.block_mask is None else self.block_mask.aux
        arrays = self.ranges, self.alibi, self.sinks, kinds
        aux = *self.score_aux, *self.mask_aux, *mask_aux
        return sum(a.nbytes for a in (*arrays, *aux) if a is not None)

    def __dask_tokenize__(self) -> Any:
        mask = self.block_mask
        mask_parts = (
            None if mask is None else (repr(mask.mask_mod), mask.aux, mask.shape, mask.block)
        )
        arrays = (self.ranges, self.alibi, self.sinks, self.score_aux, self.mask_aux)
        records = repr((self.problem, self.grid, self.score_mod_grad, self.backend))
        return normalize_token((records, arrays, mask_parts))

    def arguments(self, index: Index) -> tuple[Part, dict[str, Any]]:
        """Return where a block lies, and the keywords of attention() for it that are no arrays of
        the block's size.
        """
        problem, (heads, rows, keys) = self.problem, self.grid.spans(index)
        lengths, before = self._lengths(index)
        b, whole = self.places[self.grid.lead_slices(index)], (problem.batch, problem.heads_q)
        part = Part(b, heads[0], rows[0], keys[0], before, whole)
        return part, {
            "scale": problem.scale,
            "window": (problem.left, problem.right),
            "chunk": problem.chunk,
            "softcap": problem.softcap,
            "dropout_p": problem.dropout_p,
            "dropout_seed": problem.dropout_seed,
            "precision": "tf32" if problem.tf32 else None,
            "alibi": self._alibi(index),
            **lengths,
            **self._modifiers(index, part),
        }

    def sizes(self, index: Index) -> tuple[int, ...]:
        """Return (*lead, heads_q, seqlen_q) of a block."""
        lead = (at.stop - at.start for at in self.grid.lead_slices(index))
        heads, rows, _ = self.grid.spans(index)
        return (*lead, heads[1] - heads[0], rows[1] - rows[0])

    def sinks_of(self, index: Index) -> np.ndarray | None:
        return None if self.sinks is None else self.sinks[slice(*self.grid.spans(index)[0])]

    def _alibi(self, index: Index) -> np.ndarray | None:
        if self.alibi is None:
            return None
        at = (*self.grid.lead_slices(index), slice(*self.grid.spans(index)[0]))
        pairs = zip(self.alibi.shape, at[len(at) - self.alibi.ndim :], strict=True)
        return self.alibi[tuple(own if size > 1 else slice(None) for size, own in pairs)]

    def _lengths(self, index: Index) -> tuple[dict[str, Any], int]:
        """Return align and lengths of a block, and how many keys come before it.

        The block's j counts from its own first key: positions move by as many keys as come before.
        Those that have to know how many have the same number in all entries of a block.
        """
        problem, (_, rows, keys) = self.problem, self.grid.spans(index)
        if self.ranges is None:
            return {"align": problem.offset + rows[0] - keys[0]}, keys[0]
        ranges = self.ranges[self.grid.lead_slices(index)]
        q_len, kv_start, kv_stop, offset = np.moveaxis(ranges, -1, 0)
        before = np.maximum(keys[0] - kv_start, 0)
        height, width = rows[1] - rows[0], keys[1] - keys[0]
        lengths = {
            "align": offset + rows[0] - before,
            "q_len": np.clip(q_len - rows[0], 0, height),
            "kv_start": np.clip(kv_start - keys[0], 0, width),
            "kv_len": np.clip(kv_stop - keys[0], 0, width),
        }
        return lengths, int(before.flat[0])

    def _modifiers(self, index: Index, part: Part) -> dict[str, Any]:
        """Return score_mod, mask_mod, aux and block_mask of a block."""
        score, mask = self.problem.variant.score_mod, self.problem.variant.mask_mod
        found: dict[str, Any] = {}
        if score is not None:
            found |= {"score_mod": placed(score), "aux": (*self.score_aux, part.places())}
        if self.block_mask is not None:
            found["block_mask"] = self._block_mask(self.block_mask, index, part)
        elif mask is not None:
            found |= {"mask_mod": placed(mask), "aux": (*self.mask_aux, part.places())}
        return found

    def _block_mask(self, whole: BlockMask, index: Index, part: Part) -> BlockMask:
        """Return the block mask of a block; one partial block where it cuts through blocks."""
        heads, rows, keys = self.grid.spans(index)
        sizes = rows[1] - rows[0], keys[1] - keys[0]
        block, m, n = whole.block, slice(0, 1), slice(0, 1)
        is_cut = rows[0] % block[0] or keys[0] % block[1]
        if not is_cut:
            spans = zip((rows, keys), block, strict=True)
            m, n = (slice(start // size, -(-stop // size)) for (start, stop), size in spans)
        kinds = whole.kinds[..., m, n]
        kinds = kinds[part.b.ravel()] if whole.shape[0] > 1 else kinds
        kinds = kinds[:, slice(*heads)] if whole.shape[1] > 1 else kinds
        if is_cut:
            block, kinds = sizes, np.full_like(kinds, PARTIAL)
        return BlockMask(
            placed(whole.mask_mod),
            (*whole.aux, part.places()),
            (*kinds.shape[:2], *sizes),
            block,
            np.ascontiguousarray(kinds),
            np.count_nonzero(kinds, axis=-1),
        )
