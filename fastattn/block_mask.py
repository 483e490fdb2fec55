"""A mask_mod looked at block by block: which key blocks a query block need not read at all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from .arguments import count
from .modifier import Modifier, aux_arrays, aux_types, evaluate
from .optional import pyplot
from .trace import trace

SKIPPED, PARTIAL, FULL = 0, 1, 2
SIGNS = " ░█"  # of SKIPPED, PARTIAL, FULL
# Pairs that a mask is evaluated on, so that the steps stay in the cache: 2**20 take twice as long.
PIECE = 1 << 16
SIZE_LIMIT = 2**31  # kernels hold places in 32 bits
PICTURE = (32, 64)  # rows and columns of the text picture at most


@dataclass(frozen=True, eq=False, repr=False)
class BlockMask:
    """What create_block_mask() returns: a mask_mod, and the kind of every block of scores.

    kinds    (batch, heads, m_blocks, n_blocks) uint8, C order unless broadcast: SKIPPED where no
             row of the query block may see a key of the key block, FULL where all rows see all keys
             (that exist: the last blocks may be short), else PARTIAL. Read-only.
    visited  (batch, heads, m_blocks) int64: key blocks that are not skipped. Read-only.
    Along batch and heads both have stride 0 where the mask is the same for all.

    Query block m holds rows [m * block_m, (m + 1) * block_m), and key block n likewise. A kernel
    skips the SKIPPED, runs the mask_mod on the PARTIAL, and masks nothing in the FULL.

    Two block masks are equal only if they are the same object.
    """

    mask_mod: Modifier
    aux: tuple[np.ndarray, ...]
    shape: tuple[int, int, int, int]  # batch, heads, seqlen_q, seqlen_k; 1 broadcasts
    block: tuple[int, int]  # block_m, block_n
    kinds: np.ndarray
    visited: np.ndarray

    @property
    def sparsity(self) -> float:
        """Share of the blocks that are skipped; 0 without blocks."""
        return float(np.mean(self._distinct == SKIPPED)) if self.kinds.size else 0.0

    @cached_property
    def pairs(self) -> int:
        """(query, key) pairs of a head in blocks that are not skipped, on average: the work."""
        if not self.kinds.size:
            return 0  # and all strides are 0, not only those of axes along which they are the same
        sizes = zip(self.shape[2:], self.block, self.kinds.shape[2:], strict=True)
        high, wide = (
            np.minimum(step, size - step * np.arange(count)) for size, step, count in sizes
        )
        of_heads = (self._distinct != SKIPPED) @ wide @ high
        return int(of_heads.mean())

    @property
    def _distinct(self) -> np.ndarray:
        """The kinds without the axes along which they are the same."""
        return self.kinds[tuple(slice(None) if step else slice(1) for step in self.kinds.strides)]

    def to_dense(self) -> np.ndarray:
        """Return the mask itself, bool of `shape`, True where visible: for small sizes, as it is
        what a block mask avoids to store.
        """
        batch, heads, seqlen_q, seqlen_k = (np.arange(size) for size in self.shape)
        dense = evaluate(
            self.mask_mod,
            np.dtype(np.float64),
            self.aux,
            batch[:, None, None, None],
            heads[:, None, None],
            seqlen_q[:, None],
            seqlen_k,
        )
        return np.broadcast_to(dense, self.shape).copy()

    def __repr__(self) -> str:
        skipped = f"{100 * self.sparsity:.1f} % skipped"
        return f"BlockMask(shape={self.shape}, block={self.block}, {skipped})"

    def __str__(self) -> str:
        """The picture of the first batch and head: a block, or several, to a sign."""
        if not self.kinds.size:
            return repr(self)
        rows = ("".join(SIGNS[kind] for kind in row) for row in _shrunk(self.kinds[0, 0], PICTURE))
        legend = f"{SIGNS[FULL]} full, {SIGNS[PARTIAL]} partial, blank skipped"
        return "\n".join([repr(self), *(f"|{row}|" for row in rows), legend])

    def plot(self, batch: int = 0, head: int = 0, ax: Any = None) -> Any:
        """Draw the blocks of one batch and head; return the matplotlib axes.

        Raises ImportError if matplotlib is not installed.
        """
        ax = pyplot("BlockMask.plot()").subplots()[1] if ax is None else ax
        m_blocks, n_blocks = self.kinds.shape[2:]
        (block_m, block_n), (_, _, seqlen_q, seqlen_k) = self.block, self.shape
        extent = (0, n_blocks * block_n, m_blocks * block_m, 0)
        ax.imshow(self.kinds[batch, head], "Blues", vmin=0, vmax=2, aspect="auto", extent=extent)
        ax.set(xlim=(0, seqlen_k), ylim=(seqlen_q, 0), xlabel="key", ylabel="query")
        ax.set_title(f"blocks of {block_m} x {block_n}, {100 * self.sparsity:.1f} % skipped")
        return ax


def create_block_mask(
    mask_mod: Callable,
    batch: int | None,
    heads: int | None,
    seqlen_q: int,
    seqlen_k: int,
    *,
    aux: Sequence[Any] = (),
    block: tuple[int, int] = (64, 64),
) -> BlockMask:
    """Find the skipped, full and partial blocks of a mask, in O(block) memory beside the result.

    Parameters
    ----------
    mask_mod : function (b, h, i, j, aux) -> bool
        True where query i may attend to key j; see fastattn.mods. Its floats are float64 here.
    batch, heads : int or None
        None or 1: the mask is the same for all, and broadcasts. heads counts query heads.
    seqlen_q, seqlen_k : int
    aux : tuple of arrays and numbers
        Handed to mask_mod. The arrays are kept, not copied: do not change them afterwards.
    block : (block_m, block_n)
        Query rows and keys of a block.

    Raises
    ------
    ValueError   a size below 0 or from 2**31 on, an empty block, or a mask_mod that uses b (h)
                 without a batch (heads)
    TypeError    what mask_mod cannot do, with its line; sizes that are not integers
    """
    shape = (
        1 if batch is None else _size("batch", batch, 0),
        1 if heads is None else _size("heads", heads, 0),
        _size("seqlen_q", seqlen_q, 0),
        _size("seqlen_k", seqlen_k, 0),
    )
    if not isinstance(block, (tuple, list)) or len(block) != 2:
        raise TypeError(f"block must be (block_m, block_n), got {block!r}")
    blocks = _size("block_m", block[0], 1), _size("block_n", block[1], 1)
    arrays = aux_arrays(aux)
    modifier = trace(mask_mod, "mask_mod", aux_types(arrays))
    for name, argument, given in (("b", "batch", batch), ("h", "heads", heads)):
        if given is None and modifier.uses(name):
            raise ValueError(f"{argument} must be given for a mask_mod that uses {name}, got None")
    kinds = _kinds(modifier, arrays, shape, blocks)
    visited = np.count_nonzero(kinds, axis=-1)
    full_shape = (*shape[:2], *kinds.shape[2:])
    return BlockMask(
        modifier,
        arrays,
        shape,
        blocks,
        np.broadcast_to(kinds, full_shape),
        np.broadcast_to(visited, full_shape[:-1]),
    )


def _size(name: str, value: Any, least: int) -> int:
    size = count(name, value, least)
    if size >= SIZE_LIMIT:
        raise ValueError(f"{name} must be below 2**31, got {size}")
    return size


def _kinds(
    modifier: Modifier,
    aux: Sequence[np.ndarray],
    shape: tuple[int, int, int, int],
    block: tuple[int, int],
) -> np.ndarray:
    """Return the kinds, of size 1 along batch and heads if the mask does not depend on them."""
    batch, heads, seqlen_q, seqlen_k = shape
    batch = batch if modifier.uses("b") else min(batch, 1)
    heads = heads if modifier.uses("h") else min(heads, 1)
    m_blocks, n_blocks = -(-seqlen_q // block[0]), -(-seqlen_k // block[1])
    kinds = np.empty((batch, heads, m_blocks, n_blocks), np.uint8)
    # Whole blocks, as many as fit into PIECE: first along the keys, then the queries.
    wide = min(max(PIECE // (block[0] * block[1]), 1), max(n_blocks, 1))
    high = max(PIECE // (block[0] * block[1] * wide), 1)
    for b, h in np.ndindex(batch, heads):
        for m in range(0, m_blocks, high):
            i = np.arange(m * block[0], min((m + high) * block[0], seqlen_q))
            for n in range(0, n_blocks, wide):
                j = np.arange(n * block[1], min((n + wide) * block[1], seqlen_k))
                seen = evaluate(modifier, np.dtype(np.float64), aux, b, h, i[:, None], j)
                seen = np.broadcast_to(seen, (i.size, j.size))
                kinds[b, h, m : m + high, n : n + wide] = _kinds_of(seen, block)
    return kinds


def _kinds_of(seen: np.ndarray, block: tuple[int, int]) -> np.ndarray:
    """Return the kinds of the blocks of one piece of a mask, which starts with a whole block."""
    starts = [np.arange(0, size, step) for size, step in zip(seen.shape, block, strict=True)]
    every = np.logical_and.reduceat(np.logical_and.reduceat(seen, starts[0], 0), starts[1], 1)
    some = np.logical_or.reduceat(np.logical_or.reduceat(seen, starts[0], 0), starts[1], 1)
    return np.where(every, FULL, np.where(some, PARTIAL, SKIPPED)).astype(np.uint8)


def _shrunk(kinds: np.ndarray, limits: tuple[int, int]) -> np.ndarray:
    """Return a picture of at most `limits`: a cell of unlike blocks is PARTIAL."""
    steps = [-(-size // limit) for size, limit in zip(kinds.shape, limits, strict=True)]
    starts = [np.arange(0, size, step) for size, step in zip(kinds.shape, steps, strict=True)]
    low = np.minimum.reduceat(np.minimum.reduceat(kinds, starts[0], 0), starts[1], 1)
    high = np.maximum.reduceat(np.maximum.reduceat(kinds, starts[0], 0), starts[1], 1)
    return np.where(low == high, low, PARTIAL)
