"""What a call on dask arrays comes to: its grid, its operands, and the blocks that are computed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise, product
from math import prod
from typing import Any

import dask.array as da
import numpy as np
from dask.base import tokenize

from ..block_mask import SKIPPED
from ..kinds import numpy_view
from ..problem import Operands, Problem
from .arrays import Operand, operand
from .call import Call, Index
from .grid import (
    Edges,
    Grid,
    chunks_of,
    edges_of,
    head_edges,
    joined,
    longest_run,
    visible_chunks,
)
from .reading import Block

TRAILING = {
    "q": ("heads", "seqlen_q", ""),
    "k": ("heads_kv", "seqlen_k", ""),
    "v": ("heads_kv", "seqlen_k", ""),
    "mask": ("heads", "seqlen_q", "seqlen_k"),
    "bias": ("heads", "seqlen_q", "seqlen_k"),
    "dout": ("heads", "seqlen_q", ""),
    "out": ("heads", "seqlen_q", ""),
    "lse": ("heads", "seqlen_q"),
    "dlse": ("heads", "seqlen_q"),
}
OVER_KEYS = ("k", "v", "mask", "bias")
# Why batch entries may not share a block.
ALONE = "every batch entry has a chunk of its own, as {} counts keys from its kv_start"


@dataclass(frozen=True, eq=False)
class Layout:
    """Everything that is known of a call before a graph is made of it."""

    call: Call
    operands: Mapping[str, Operand | None]
    mask: np.ndarray | None  # where it is in memory: blocks that it hides make no task
    notes: tuple[str, ...]
    name: str  # the same for equal calls

    @property
    def rows(self) -> Iterator[tuple[Index, list[int]]]:
        """Blocks of rows (*lead, heads, rows), and the chunks of keys that each of them sees."""
        *lead_shape, heads, rows, _ = self.call.grid.shape
        looks_inside = self.mask is not None or self.call.block_mask is not None
        seen: list[list[int]] = []
        for lead in np.ndindex(*lead_shape):
            if self.call.ranges is not None or not seen:
                seen = [self._seen(lead, m) for m in range(rows)]
            for h, m in product(range(heads), range(rows)):
                index, keys = (*lead, h, m), seen[m]
                if looks_inside:
                    keys = [n for n in keys if self._may_see((*index, n))]
                yield index, keys

    @property
    def runs(self) -> Iterator[tuple[Index, list[list[int]]]]:
        """Blocks of rows, and the chunks of keys that each sees, as those of one task each."""
        longest = self._longest_run()
        for index, keys in self.rows:
            count = -(-len(keys) // longest)
            edges = [len(keys) * n // count for n in range(count)] + [len(keys)]
            yield index, [keys[a:b] for a, b in pairwise(edges) if a < b]

    def blocks(self, index: Index, names: Iterable[str]) -> dict[str, Block]:
        """Return the blocks of those operands that there are, by name."""
        place = self.place(index)
        found = {name: self.operands.get(name) for name in names}
        return {name: own.block(place) for name, own in found.items() if own is not None}

    def _longest_run(self) -> int:
        """Return how many chunks of keys a task may go through: one where they are computed."""
        arrays = (self.operands[name] for name in OVER_KEYS)
        if not all(a is None or a.is_read for a in arrays):
            return 1
        grid, problem = self.call.grid, self.call.problem
        rows, keys, heads, heads_kv = (
            max(chunks_of(edges)) for edges in (grid.rows, grid.keys, grid.heads, grid.heads_kv)
        )
        dim_v = problem.head_dim_v
        of_keys = heads_kv * keys * (problem.head_dim + dim_v)
        return longest_run(prod(grid.shape[:-1]), heads * rows * dim_v, of_keys)

    def _seen(self, lead: Index, m: int) -> list[int]:
        """Return the chunks of keys that window, chunk and lengths let a chunk of rows see."""
        problem, grid, ranges = self.call.problem, self.call.grid, self.call.ranges
        if ranges is None:
            one = problem.seqlen_q, 0, problem.seqlen_k, problem.offset
            ranges = np.array([one], np.int64)
        else:
            ranges = ranges[grid.lead_slices(lead)].reshape(-1, 4)
        return visible_chunks(problem, ranges, (grid.rows[m], grid.rows[m + 1]), grid.keys)

    def array(self, name: str) -> da.Array:
        """Return an operand that is always there, cut along the grid."""
        return self.operands[name].array  # type: ignore[union-attr]

    def place(self, index: Index) -> Index:
        """Return the place of a block: its index, and its chunk of key heads."""
        return (*index, self.call.grid.key_head_chunks[index[-3]])

    def _may_see(self, index: Index) -> bool:
        """Whether a block mask and a mask in memory hide not all pairs of a block."""
        grid, block_mask = self.call.grid, self.call.block_mask
        lead = grid.lead_slices(index)
        heads, rows, keys = (slice(*span) for span in grid.spans(index))
        if self.mask is not None:
            own = (*lead, heads, rows, keys)[-self.mask.ndim :] if self.mask.ndim else ()
            pairs = zip(self.mask.shape, own, strict=True)
            if not self.mask[tuple(at if size > 1 else slice(None) for size, at in pairs)].any():
                return False
        if block_mask is None:
            return True
        m, n = (
            slice(at.start // size, -(-at.stop // size))
            for at, size in zip((rows, keys), block_mask.block, strict=True)
        )
        kinds = block_mask.kinds[..., m, n]
        kinds = kinds[:, heads if kinds.strides[1] else slice(0, 1)]
        b = self.call.places[lead].ravel() if kinds.strides[0] else slice(0, 1)
        return bool((kinds[b] != SKIPPED).any())


def lay_out(
    problem: Problem,
    checked: Operands,
    arrays: Mapping[str, Any],
    arguments: Mapping[str, Any],
    backend: str,
    **extra: Any,
) -> Layout:
    """Return the layout of a call that has been checked.

    arrays   the caller's, of rank 3 and up but for mask and bias; None for those not given
    extra    fields of Call
    """
    notes: list[str] = []
    lead = checked.q.shape[:-3]
    ranges = None if checked.ranges is None else checked.ranges.reshape(*lead, 4)
    grid = _grid(problem, arrays, lead, ranges, notes)
    alibi = arguments.get("alibi")
    call = Call(
        problem,
        grid,
        ranges,
        None if alibi is None else numpy_view("alibi", alibi).astype(problem.variant.dtype),
        checked.sinks,
        checked.score_aux,
        checked.mask_aux,
        arguments.get("block_mask"),
        backend,
        **extra,
    )
    operands = {
        name: None if a is None else operand(name, a, grid, TRAILING[name], notes)
        for name, a in arrays.items()
    }
    mask = arrays.get("mask")
    mask = None if isinstance(mask, da.Array) or mask is None else numpy_view("mask", mask)
    names = [None if found is None else found.array.name for found in operands.values()]
    return Layout(call, operands, mask, tuple(notes), tokenize(names, call))


def _grid(
    problem: Problem,
    arrays: Mapping[str, Any],
    lead: tuple[int, ...],
    ranges: np.ndarray | None,
    notes: list[str],
) -> Grid:
    q, k, v = (arrays[name] for name in "qkv")
    heads, heads_kv = head_edges(q.chunks[-3], (k.chunks[-3], v.chunks[-3]), problem.group)
    edges = [_lead_edges(axis - len(lead), size, (q, k, v)) for axis, size in enumerate(lead)]
    if ranges is not None and (problem.chunk or problem.dropout_p) and np.ptp(ranges[..., 1]):
        edges = [edges_of((1,) * size) for size in lead]
        notes.append(ALONE.format("chunk" if problem.chunk else "dropout"))
    keys = joined((k.chunks[-2], v.chunks[-2]))
    rows = edges_of(q.chunks[-2])
    return Grid(tuple(edges), heads, rows, keys, heads_kv, problem.group)


def _lead_edges(axis: int, size: int, arrays: tuple[da.Array, ...]) -> Edges:
    """Return the edges of a batch axis (negative, before the last three), joined."""
    axis -= 3
    own = [a.chunks[axis] for a in arrays if a.ndim >= -axis and a.shape[axis] == size]
    return joined(own)
