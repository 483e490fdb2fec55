"""What tasks do: each a call of the core on chunks, or what joins their results."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from ..backward import attention_backward
from ..cpu.threads import num_threads
from ..merging import merge, merge_into
from ..part import attend, differentiate, placed
from .call import Call, Index
from .reading import Block

KINDS = (ValueError, TypeError, ImportError, MemoryError, NotImplementedError, OSError)
WIDENED = ("dout", "q", "k", "v", "out")

Blocks = Mapping[str, Block]  # by the names of their operands


def attend_run(
    call: Call,
    rows: Index,
    first: bool,
    alone: bool,
    q: Block,
    pairs: Sequence[tuple[int, Blocks]],
    needs: Sequence[Any],
    *results: Any,
) -> tuple[np.ndarray, np.ndarray]:
    """Return (out, lse) of a block of rows over one chunk of keys after the other.

    pairs  which chunk of keys, and the blocks of k, v, mask and bias; sinks come with the first of
           all. Unless they are alone, out is to be merged with others, and rounded only then.
    needs  keys of the results that the blocks need
    """
    found = dict(zip(needs, results, strict=True))
    with _as_block((*rows, pairs[0][0])):
        queries = q.get(found)
        if not alone:
            (queries,) = _wide(call, queries)

    def attend_block(n: int, blocks: Blocks, has_sinks: bool) -> tuple[np.ndarray, np.ndarray]:
        return _attend_block(call, (*rows, n), alone, has_sinks, queries, blocks, found)

    total = attend_block(*pairs[0], first)
    for pair in pairs[1:]:
        # Nothing of a pair is kept while the next is at work.
        total = merge_into(*total, *attend_block(*pair, False))
    return total


def _attend_block(
    call: Call,
    index: Index,
    alone: bool,
    has_sinks: bool,
    q: np.ndarray,
    blocks: Blocks,
    found: Mapping[Any, Any],
) -> tuple[np.ndarray, np.ndarray]:
    """Return (out, lse) over one chunk of keys, which is forgotten."""
    with _as_block(index):
        arrays = {name: block.get(found) for name, block in blocks.items()}
        k, v = arrays.pop("k"), arrays.pop("v")
        if not alone:
            k, v = _wide(call, k, v)
        part, arguments = call.arguments(index)
        sinks = call.sinks_of(index) if has_sinks else None
        return attend(part, q, k, v, call.backend, {**arguments, **arrays, "sinks": sinks})


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
    blocks: Blocks,
    needs: Sequence[Any],
    *results: Any,
) -> tuple[np.ndarray, ...]:
    """Return what a block adds to dq, dk and dv, and to `wanted`, of dbias and dalibi."""
    with _as_block(index):
        found = dict(zip(needs, results, strict=True))
        arrays = {name: block.get(found) for name, block in blocks.items()}
        dout, q, k, v, out = _wide(call, *(arrays.pop(name) for name in WIDENED))
        lse, dlse = arrays.pop("lse"), arrays.pop("dlse", None)
        bias = arrays.get("bias")
        if bias is not None and bias.dtype.itemsize < lse.dtype.itemsize:
            (arrays["bias"],) = _wide(call, bias)  # dbias is rounded once, too
        part, arguments = call.arguments(index)
        arguments |= arrays
        if call.score_mod_grad is not None:
            arguments["score_mod_grad"] = placed(call.score_mod_grad)
        return differentiate(part, (dout, q, k, v, out, lse), dlse, call.backend, wanted, arguments)


def sink_gradients(
    call: Call, index: Index, blocks: Blocks, needs: Sequence[Any], *results: Any
) -> np.ndarray:
    """Return what the rows of a block add to dsinks, which takes no key."""
    with _as_block(index):
        found = dict(zip(needs, results, strict=True))
        arrays = {name: block.get(found) for name, block in blocks.items()}
        dout, out = _wide(call, arrays["dout"], arrays["out"])
        sizes, head_dim_v = call.sizes(index), call.problem.head_dim_v
        q = np.broadcast_to(np.zeros(1, dout.dtype), (*sizes, 1))
        k, v = (np.zeros((sizes[-2], 0, dim), dout.dtype) for dim in (1, head_dim_v))
        given, sinks = (dout, q, k, v, out, arrays["lse"]), call.sinks_of(index)
        dlse = arrays.get("dlse")
        return attention_backward(*given, dlse=dlse, sinks=sinks, return_dsinks=True)[-1]


def join(a: tuple[Any, Any], b: tuple[Any, Any]) -> tuple[Any, Any]:
    """Return (out, lse) of two sets of keys together."""
    return merge(*a, *b)


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
