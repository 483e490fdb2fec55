"""What the tasks of one call share, and what they do: each a call of the core on chunks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

import numpy as np
from dask.base import normalize_token

from ..backward import attention_backward
from ..block_mask import PARTIAL, BlockMask
from ..cpu.threads import num_threads
from ..modifier import Modifier
from ..part import Part, attend, differentiate, placed
from ..problem import Problem
from .grid import Grid

Index = tuple[int, ...]  # of a block of the grid: (*lead, heads, rows, keys)
KINDS = (ValueError, TypeError, ImportError, MemoryError, NotImplementedError)


@dataclass(frozen=True, eq=False)
class Call:
    """The arguments of the whole call but for arrays that are cut into chunks: a node of the graph,
    sent to a worker once.
    """

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


# --- tasks ----------------------------------------------------------------------------------------


def attend_block(
    call: Call, index: Index, first: bool, alone: bool, q: Any, k: Any, v: Any, mask: Any, bias: Any
) -> tuple[np.ndarray, np.ndarray]:
    """Return (out, lse) of the rows of a block over its keys, and their sinks if it is the first.

    Unless it is alone, out is to be merged with others, and rounded only then.
    """
    with _as_block(index):
        if not alone:
            q, k, v = _wide(call, q, k, v)
        part, arguments = call.arguments(index)
        sinks = call.sinks_of(index) if first else None
        arguments |= {"mask": mask, "bias": bias, "sinks": sinks}
        return attend(part, q, k, v, call.backend, arguments)


def empty_block(call: Call, index: Index) -> tuple[np.ndarray, np.ndarray]:
    """Return (out, lse) of rows that see no key."""
    problem, sizes, sinks = call.problem, call.sizes(index), call.sinks_of(index)
    lse = np.full(sizes, -np.inf, problem.variant.dtype)
    if sinks is not None:
        lse[...] = sinks[:, None]
    return np.zeros((*sizes, problem.head_dim_v), lse.dtype), lse


def differentiate_block(
    call: Call,
    index: Index,
    wanted: tuple[str, ...],
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    dlse: Any,
    mask: Any,
    bias: Any,
) -> tuple[np.ndarray, ...]:
    """Return what a block adds to dq, dk and dv, and to `wanted`, of dbias and dalibi."""
    with _as_block(index):
        dout, q, k, v, out = _wide(call, dout, q, k, v, out)
        if bias is not None and bias.dtype.itemsize < lse.dtype.itemsize:
            (bias,) = _wide(call, bias)  # dbias is rounded once, too
        part, arguments = call.arguments(index)
        arguments |= {"mask": mask, "bias": bias}
        if call.score_mod_grad is not None:
            arguments["score_mod_grad"] = placed(call.score_mod_grad)
        arrays = dout, q, k, v, out, lse
        return differentiate(part, arrays, dlse, call.backend, wanted, arguments)


def sink_gradients(call: Call, index: Index, dout: Any, out: Any, lse: Any, dlse: Any) -> Any:
    """Return what the rows of a block add to dsinks, which takes no key."""
    with _as_block(index):
        dout, out = _wide(call, dout, out)
        sizes, head_dim_v = call.sizes(index), call.problem.head_dim_v
        q = np.broadcast_to(np.zeros(1, dout.dtype), (*sizes, 1))
        k, v = (np.zeros((sizes[-2], 0, dim), dout.dtype) for dim in (1, head_dim_v))
        sinks = call.sinks_of(index)
        given = (dout, q, k, v, out, lse)
        return attention_backward(*given, dlse=dlse, sinks=sinks, return_dsinks=True)[-1]


def pick(results: tuple[np.ndarray, ...], which: int, dtype: Any = None) -> np.ndarray:
    """Return one of a task's results."""
    return results[which] if dtype is None else results[which].astype(dtype, copy=False)


def add(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return a + b


def convert(a: np.ndarray, dtype: Any) -> np.ndarray:
    return a.astype(dtype, copy=False)


@contextmanager
def _as_block(index: Index) -> Iterator[None]:
    """One thread, as the scheduler has as many tasks at work as it has threads; an error says
    where it arose.
    """
    try:
        with num_threads(1):
            yield
    except Exception as error:
        kind = next((kind for kind in KINDS if isinstance(error, kind)), RuntimeError)
        where = f"block {index} of (batch..., heads, rows, keys)"
        raise kind(f"{error} [in {where}]") from error


def _wide(call: Call, *arrays: np.ndarray) -> list[np.ndarray]:
    """Return arrays in the dtype that is computed in, which is exact."""
    return [a.astype(call.problem.variant.dtype, copy=False) for a in arrays]
