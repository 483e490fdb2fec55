"""Where the chunks of the scores begin, which chunks of keys a chunk of rows sees. No arrays of the
caller's, no dask.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

from ..problem import Problem

Chunks = tuple[int, ...]  # sizes of the chunks along an axis
Edges = tuple[int, ...]  # where they begin, and the end
# A task that reads its keys itself goes through this many chunks of them at most, one after the
# other: half a minute for chunks of suggest_chunks(), which is what a lost worker costs.
LONGEST_RUN = 32


@dataclass(frozen=True)
class Grid:
    """The chunks of the scores (*lead, heads_q, seqlen_q, seqlen_k), by their edges.

    A block of the grid has an index (*lead, heads, rows, keys).
    """

    lead: tuple[Edges, ...]
    heads: Edges  # of query heads
    rows: Edges
    keys: Edges
    heads_kv: Edges  # chunks of key heads; each serves one chunk of query heads or several
    group: int  # query heads per key head

    @property
    def shape(self) -> tuple[int, ...]:
        """Number of chunks along (*lead, heads, rows, keys)."""
        return tuple(len(edges) - 1 for edges in (*self.lead, self.heads, self.rows, self.keys))

    @cached_property
    def key_head_chunks(self) -> tuple[int, ...]:
        """Which chunk of key heads each chunk of query heads reads."""
        starts = (h // self.group if self.group else 0 for h in self.heads[:-1])
        last = len(self.heads_kv) - 2
        return tuple(min(bisect_right(self.heads_kv, start) - 1, last) for start in starts)

    def lead_slices(self, index: Sequence[int]) -> tuple[slice, ...]:
        """Which batch entries the block with this index has."""
        return tuple(slice(*e[n : n + 2]) for e, n in zip(self.lead, index, strict=False))

    def spans(self, index: Sequence[int]) -> tuple[tuple[int, int], ...]:
        """(start, stop) of the query heads, rows and keys of a block."""
        axes = zip((self.heads, self.rows, self.keys), index[-3:], strict=True)
        return tuple((edges[n], edges[n + 1]) for edges, n in axes)


def edges_of(chunks: Chunks) -> Edges:
    """Return the edges of chunks, without empty ones; (0, 0) for an axis of size 0."""
    edges = sorted({0, *np.cumsum(chunks, dtype=np.int64).tolist()})
    return tuple(edges) if len(edges) > 1 else (0, 0)


def chunks_of(edges: Edges) -> Chunks:
    return tuple(stop - start for start, stop in pairwise(edges))


def joined(chunkings: Iterable[Chunks]) -> Edges:
    """Return the edges of all chunkings of one axis together."""
    edges = sorted({edge for chunks in chunkings for edge in edges_of(chunks)})
    return tuple(edges) if len(edges) > 1 else (0, 0)


def head_edges(query: Chunks, key: Iterable[Chunks], group: int) -> tuple[Edges, Edges]:
    """Return the edges along the query heads and the key heads, joined.

    A chunk of query heads has whole groups, or lies within one: else its edge is moved to the start
    of the group.
    """
    edges_k = joined(key)
    if not group or not edges_k[-1]:
        return edges_of(query), edges_k
    edges = sorted({*edges_of(query), *(group * edge for edge in edges_k)})
    if any(a % group + b % group and a // group != (b - 1) // group for a, b in pairwise(edges)):
        edges = sorted({edge // group * group for edge in edges})
    starts = {edge // group for edge in edges}
    return tuple(edges), tuple(sorted({*starts, edges_k[-1]}))


def visible_chunks(
    problem: Problem, ranges: np.ndarray, rows: tuple[int, int], edges: Edges
) -> list[int]:
    """Return the chunks of keys of which some row sees some key, as window, chunk and lengths say.

    ranges  (entries, 4): Operands.ranges, of the batch entries of a block
    rows    (start, stop)
    """
    q_len, kv_start, kv_stop, offset = ranges.T
    last = np.minimum(rows[1], q_len) - 1
    # What rows see starts and ends no earlier than what the row before sees, with no gap: a row
    # sees its own position, if there is a key. key_range() adds the problem's offset.
    start, _ = problem.key_range(rows[0] + offset - problem.offset)
    _, stop = problem.key_range(last + offset - problem.offset)
    stop = np.minimum(stop, kv_stop - kv_start)
    sees = (rows[0] <= last) & (start < stop)
    first = np.searchsorted(edges, (kv_start + start)[sees], "right") - 1
    end = np.searchsorted(edges, (kv_start + stop)[sees], "left")
    return sorted(
        {n for a, b in {*zip(first.tolist(), end.tolist(), strict=True)} for n in range(a, b)}
    )


def longest_run(blocks: int, result: int, keys: int) -> int:
    """Return how many chunks of keys a task may go through if it reads them itself.

    Results that wait to be merged take memory (up to three for each worker: half as much again as
    the task at work), so tasks are as long as there are others for other workers. Where a result
    is small beside the keys, as for few queries, short tasks keep all threads at work.

    blocks        chunks of queries, of all batch entries and heads
    result, keys  elements of out for a chunk of queries, of a chunk of k and v
    """
    most = min(LONGEST_RUN, max(blocks, 8))
    return max(1, min(most, 2 * most * result // max(keys, 1)))


def chunk_text(chunks: Chunks) -> str:
    """Return chunk sizes in short: "8 x 4096 + 100"."""
    runs: list[list[int]] = []
    for size in chunks:
        if runs and runs[-1][1] == size:
            runs[-1][0] += 1
        else:
            runs.append([1, size])
    return " + ".join(f"{count} x {size}" if count > 1 else str(size) for count, size in runs)
