"""dask arrays as operands: cut along the grid, with the keys of their blocks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import dask.array as da
import numpy as np
from dask.base import is_dask_collection

from ..kinds import numpy_view
from .grid import Chunks, Grid, chunk_text, chunks_of
from .reading import Block, Key, block_of

AXES = ("heads", "seqlen_q", "seqlen_k", "heads_kv")  # of a place, behind those of the batch
WHOLE = -1  # an axis with one chunk for all blocks


@dataclass(frozen=True, eq=False)
class Operand:
    """An array in chunks of the grid.

    axes  of each axis of the array, which axis of a block's place tells its chunk. A place is
          (*lead, heads, rows, keys, key heads); WHOLE means chunk 0.
    """

    array: da.Array
    axes: tuple[int, ...]

    @property
    def is_read(self) -> bool:
        """Whether tasks read its blocks from where they are stored, going by the first."""
        return self._block((self.array.name, *(0 for _ in self.axes))).reads is not None

    def block(self, place: tuple[int, ...]) -> Block:
        """Return the block that is needed at a place."""
        return self._block((self.array.name, *(0 if a == WHOLE else place[a] for a in self.axes)))

    def _block(self, key: Key) -> Block:
        if key not in self._blocks:
            self._blocks[key] = block_of(self._graph, key)
        return self._blocks[key]

    @cached_property
    def _blocks(self) -> dict[Key, Block]:
        return {}

    @cached_property
    def _graph(self) -> Mapping[Any, Any]:
        return dict(self.array.__dask_graph__())


def check_array(name: str, array: Any) -> da.Array:
    """Return a dask array whose chunks are known, or raise."""
    if not isinstance(array, da.Array):
        rule = f"{name} must be a dask array, got {type(array).__name__}"
        raise TypeError(f"{rule}. Use dask.array.from_array({name}, chunks=...).")
    if any(np.isnan(size) for sizes in array.chunks for size in sizes):
        rule = f"{name} must have known chunk sizes, got {array.chunks}"
        raise ValueError(f"{rule}. Call {name}.compute_chunk_sizes() first.")
    return array


def check_small(arguments: Mapping[str, Any]) -> None:
    """Raise for a dask array among what decides which tasks there are, or what all of them need."""
    names = ("align", "alibi", "sinks", "q_len", "kv_len", "kv_start")
    small = {name: arguments.get(name) for name in names}
    aux = arguments.get("aux", ())
    if isinstance(aux, (tuple, list)):
        small |= {f"aux[{slot}]": array for slot, array in enumerate(aux)}
    for name, value in small.items():
        if is_dask_collection(value):
            rule = f"{name} must be known when the graph is made, got a dask array"
            raise TypeError(f"{rule}. Pass {name}.compute().")


def stand_in(name: str, array: Any) -> Any:
    """Return a view of one 0 with the shape and dtype of a dask array; others as they are."""
    if not is_dask_collection(array):
        return array
    array = check_array(name, array)
    return np.broadcast_to(np.zeros((), array.dtype), array.shape)


def operand(
    name: str, array: Any, grid: Grid, trailing: tuple[str, ...], notes: list[str]
) -> Operand:
    """Return an array cut along the grid: rechunked, with a note, if it was not.

    trailing  names of its last axes, of AXES; others have one chunk. Those before are the batch's.
    An array of lower rank lacks the first axes; one of size 1 serves all of the grid's.
    """
    edges = (grid.heads, grid.rows, grid.keys, grid.heads_kv)
    known = {axis: (len(grid.lead) + n, edges[n]) for n, axis in enumerate(AXES)}
    wanted = [*enumerate(grid.lead), *(known.get(axis, (WHOLE, (0,))) for axis in trailing)]
    names = [*(f"batch axis {n}" for n in range(len(grid.lead))), *trailing]
    skipped = len(wanted) - np.ndim(array)
    axes: list[int] = []
    chunks: list[Chunks] = []
    for size, (axis, own) in zip(np.shape(array), wanted[skipped:], strict=True):
        fits = size == own[-1] and axis != WHOLE
        axes.append(axis if fits else WHOLE)
        chunks.append(chunks_of(own) if fits else (size,))
    if not isinstance(array, da.Array):
        array = numpy_view(name, array)
        return Operand(da.from_array(array, chunks=tuple(chunks)), tuple(axes))
    pairs = zip(names[skipped:], array.chunks, chunks, strict=True)
    for axis_name, old, new in pairs:
        if tuple(old) != new:
            sizes = f"from {chunk_text(old)} to {chunk_text(new)}"
            notes.append(f"{name} is rechunked along {axis_name} {sizes}")
    return Operand(array.rechunk(tuple(chunks)), tuple(axes))
