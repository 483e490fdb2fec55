"""Block masks: which blocks of keys are skipped, and what is asked of a mask_mod in the others."""

from __future__ import annotations

from collections.abc import Callable

from ...block_mask import FULL, SKIPPED
from ...modifier import Modifier
from .. import words
from ..modifiers import device_function
from ..words import device, load
from .operation import boolean, i32, i64
from .placement import near, quotient
from .tilings import Tiling


def allowed_key(mask_mod: Modifier) -> Callable:
    """A function (b, h, i, j, aux, kinds, row, col, m, n, last_i, last_j) for words.device():
    whether block mask and mask_mod let row i see key j, of those of the caller.

    kinds           address of the block mask of the head, or 0
    row, col, m, n  its strides, and the rows and keys of a block
    last_i, last_j  those that exist
    """
    allows, load_kind = device_function(mask_mod, "float32", words), load("uint8")

    def allowed(b, h, i, j, aux, kinds, row, col, m, n, last_i, last_j):
        if kinds != 0:
            place = quotient(min(i, last_i), m) * row + quotient(min(j, last_j), n) * col
            kind = load_kind(kinds, place)
            if kind == SKIPPED:
                return False
            if kind == FULL:
                return True
        return allows(b, h, i, j, aux)

    return allowed


@device(i64)
def kinds_of(job, batch, head):
    """The address of the block mask of a head, or 0."""
    if job.block_mask == 0:
        return 0
    return job.block_mask + batch * job.block_mask_batch + head * job.block_mask_head


def block_reached(tiling: Tiling) -> Callable:
    """Device function (job, batch, head, m_start, rows, n, start, keys, hidden): the first key of
    the first block from n downwards that the block mask does not skip for the rows from m_start;
    one below `start` if there is none.
    """
    load_kind, block_m, block_n = load("uint8"), tiling.block_m, tiling.block_n

    @device(boolean)
    def skips(job, batch, head, m_start, rows, n, keys, hidden):
        shift = hidden + job.first_key
        first = quotient(n + shift, job.block_mask_n)
        last = quotient(min(n + block_n, keys) - 1 + shift, job.block_mask_n)
        row = quotient(m_start, job.block_mask_m)
        last_row = quotient(m_start + min(rows, block_m) - 1, job.block_mask_m)
        kinds = kinds_of(job, batch, head)
        while row <= last_row:
            block = first
            while block <= last:
                place = row * job.block_mask_row + block * job.block_mask_col
                if load_kind(kinds, place) != SKIPPED:
                    return False
                block += 1
            row += 1
        return True

    @device(i32)
    def reached(job, batch, head, m_start, rows, n, start, keys, hidden):
        if job.block_mask != 0:
            while n >= start and skips(job, batch, head, m_start, rows, n, keys, hidden):
                n = near(n - block_n)
        return n

    return reached
