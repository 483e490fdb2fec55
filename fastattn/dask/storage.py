"""Arrays in files, read by the task that needs a block of them."""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import dask.array as da
import numpy as np
from dask.base import tokenize
from dask.task_spec import Task

from .grid import edges_of


@dataclass(frozen=True)
class Source:
    """Where an array lies, for whoever reads a part of it."""

    path: str
    dtype: np.dtype
    offset: int  # bytes
    shape: tuple[int, ...]  # in C order


# Bytes that are mapped at a time. Linux maps more of a file than what is read: 25 MiB of it for a
# block of 4, which count as the worker's memory.
PIECE = 1 << 20


def from_memmap(array: np.memmap, chunks: Any = "auto") -> da.Array:
    """Return a dask array of a memory-mapped file; each task reads its own block of it.

    dask.array.from_array() would read the whole file first, and a cluster send it to its workers.
    Here they open it themselves, so they must all see it under this path.

    Parameters
    ----------
    array : np.memmap, as np.memmap() or np.load(mmap_mode="r") returned it, not a view of one
    chunks : as in dask.array.from_array()

    Raises
    ------
    TypeError    no np.memmap
    ValueError   a view, or a map without a file
    """
    if not isinstance(array, np.memmap):
        raise TypeError(f"array must be an np.memmap, got {type(array).__name__}")
    if not isinstance(array.base, mmap.mmap) or array.filename is None:
        rule = "array must be a map of a file itself, not a view of one"
        raise ValueError(f"{rule}. Slice the dask array instead.")
    if not array.flags.c_contiguous:  # in Fortran's order, then
        chunks = da.core.normalize_chunks(chunks, array.shape, dtype=array.dtype)
        return _blocks(array, array.shape[::-1], chunks[::-1]).transpose()
    return _blocks(array, array.shape, chunks)


def _blocks(array: np.memmap, shape: tuple[int, ...], chunks: Any) -> da.Array:
    """Return a dask array of the file of a map, in C order."""
    path = Path(array.filename).resolve()  # type: ignore[arg-type]
    source = Source(str(path), array.dtype, array.offset, shape)
    chunks = da.core.normalize_chunks(chunks, shape, dtype=array.dtype)
    name = "memmap-" + tokenize(source, path.stat().st_mtime_ns, chunks)
    graph = {}
    for index in product(*(range(len(sizes)) for sizes in chunks)):
        spans = ((edges_of(sizes), n) for sizes, n in zip(chunks, index, strict=True))
        at = tuple(slice(edges[n], edges[n + 1]) for edges, n in spans)
        key = (name, *index)
        graph[key] = Task(key, read_memmap, source, at)
    return da.Array(graph, name, chunks, dtype=array.dtype)


def read_memmap(source: Source, at: tuple[slice, ...]) -> np.ndarray:
    """Return a part of an array in memory."""
    where: Any = (source.path, source.dtype, "r", source.offset, source.shape)
    if not at:
        return np.array(np.memmap(*where))
    block = np.empty([span.stop - span.start for span in at], source.dtype)
    rows = max(1, PIECE // max(block[:1].nbytes, 1))
    for start in range(0, len(block), rows):
        piece = block[start : start + rows]
        first = at[0].start + start
        piece[...] = np.memmap(*where)[(slice(first, first + len(piece)), *at[1:])]
    return block
