"""attention_backward() on dask arrays: what each pair of chunks adds to the gradients."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import dask.array as da
import numpy as np
from dask.task_spec import Task, TaskRef

from .. import backward as core
from ..backward import wanted_of
from ..check import check_backend
from ..check_backward import check_operands
from ..kinds import numpy_view
from ..modifier import aux_types
from ..signatures import passing_keywords_to
from ..trace import traced
from .arrays import WHOLE, check_array, check_small, stand_in
from .call import Index
from .forward import with_heads
from .graph import Graph, Tasks
from .grid import Chunks, chunks_of
from .layout import Layout, lay_out
from .reading import Key
from .tasks import add, convert, differentiate_block, pick, sink_gradients

INPUTS = ("dout", "q", "k", "v", "out", "lse", "dlse", "mask", "bias")
GIVEN = ("dout", "q", "k", "v", "out", "lse", "dlse")


class Target(NamedTuple):
    """A gradient, in the chunks of what it is the gradient by."""

    name: str
    axes: tuple[int, ...]  # as in arrays.Operand: which chunk of it a block adds to
    chunks: tuple[Chunks, ...]
    dtype: np.dtype

    @property
    def indices(self) -> Iterator[Index]:
        return np.ndindex(*(len(sizes) for sizes in self.chunks))

    def chunk(self, place: Index) -> Index:
        """Return which chunk the block at a place adds to."""
        return tuple(0 if axis == WHOLE else place[axis] for axis in self.axes)


@passing_keywords_to(core.attention_backward)
def attention_backward(
    dout: da.Array,
    q: da.Array,
    k: da.Array,
    v: da.Array,
    out: da.Array,
    lse: da.Array,
    *,
    dlse: da.Array | None = None,
    score_mod_grad: Any = None,
    return_dbias: bool = False,
    return_dsinks: bool = False,
    return_dalibi: bool = False,
    **arguments: Any,
) -> tuple[da.Array, ...]:
    """Return fastattn.attention_backward() of dask arrays, to be computed by any scheduler.

    Each pair of a chunk of queries and a chunk of keys that sees one another is a task; what they
    add to a chunk of dq, dk or dv is summed two by two.

    Parameters
    ----------
    dout, q, k, v, out, lse, dlse : dask arrays, shapes and dtypes as there
        out and lse are those of attention(..., return_lse=True).
    others : as in attention() here, and in fastattn.attention_backward()

    Returns
    -------
    dq, dk, dv : dask arrays, dtype of q, in the chunks of q, k and v after they are lined up
    dbias, dsinks, dalibi : in this order, those that were asked for

    Raises
    ------
    As attention(), and as fastattn.attention_backward().

    References
    ----------
    Dao 2023, FlashAttention-2, arXiv:2307.08691, algorithm 2.
    """
    flags = return_dbias, return_dsinks, return_dalibi
    wanted = wanted_of(*flags)
    given = dict(zip(GIVEN, (dout, q, k, v, out, lse, dlse), strict=True))
    layout, is_matrix = _layout_of(given, score_mod_grad, wanted, **arguments)
    found = _arrays(layout, wanted, arguments)
    if is_matrix:
        found = [a[0] for a in found[:3]] + found[3:]
    return tuple(found)


def _layout_of(
    given: dict[str, Any],
    score_mod_grad: Any,
    wanted: tuple[str, ...],
    *,
    backend: str = "auto",
    **arguments: Any,
) -> tuple[Layout, bool]:
    check_backend(backend)
    check_small(arguments)
    arrays: dict[str, Any] = {
        n: None if a is None and n == "dlse" else check_array(n, a) for n, a in given.items()
    }
    masks = {name: arguments.get(name) for name in ("mask", "bias")}
    stubs = {name: stand_in(name, a) for name, a in (arrays | masks).items()}
    stubbed = arguments | {name: stubs.pop(name) for name in masks}
    problem, operands, _, _ = check_operands(
        **stubs, score_mod_grad=score_mod_grad, wanted=wanted, arguments=stubbed
    )
    slopes = None
    if score_mod_grad is not None:
        slopes = traced(score_mod_grad, "score_mod_grad", aux_types(operands.score_aux))
    is_matrix = all(arrays[name].ndim == 2 for name in "qkv")
    whole = {n: a if a is None else _with_heads(n, a, is_matrix) for n, a in arrays.items()} | masks
    arguments = {n: a for n, a in arguments.items() if n not in masks}
    laid = lay_out(problem, operands, whole, arguments, backend, score_mod_grad=slopes)
    return laid, is_matrix


def _with_heads(name: str, array: da.Array, is_matrix: bool) -> da.Array:
    if name in ("lse", "dlse"):
        return array[None] if is_matrix else array
    return with_heads(array)


def _arrays(layout: Layout, wanted: tuple[str, ...], arguments: dict[str, Any]) -> list[da.Array]:
    """Return dq, dk, dv and those of `wanted`."""
    graph = Graph(layout, "attention-backward")
    targets = _targets(layout, wanted, arguments)
    terms = {
        target.name: _Terms(target, *graph.layer(f"{target.name}-part", "part"))
        for target in targets
    }
    sinks = terms.get("dsinks")
    _add_pairs(graph, [own for own in terms.values() if own is not sinks])
    if sinks is not None:
        for index, _ in layout.rows:
            here = (*index, 0)
            key = sinks.add(layout.place(here), index)
            blocks = layout.blocks(here, ("dout", "out", "lse", "dlse"))
            run = sink_gradients, here, blocks
            sinks.tasks[key] = graph.task(key, *run, blocks=blocks.values())
    return [_summed(graph, own) for own in terms.values()]


class _Terms:
    """What the chunks of a gradient are sums of."""

    def __init__(self, target: Target, name: str, tasks: Tasks):
        self.target, self.name, self.tasks = target, name, tasks
        self.of: dict[Index, list[Key]] = {}

    def add(self, place: Index, index: Index) -> Key:
        """Return the key of one more term, of the block at this place."""
        key = (self.name, *index)
        self.of.setdefault(self.target.chunk(place), []).append(key)
        return key


def _add_pairs(graph: Graph, terms: list[_Terms]) -> None:
    """Add the tasks of pairs, and those that take their results apart."""
    layout = graph.layout
    parts, tasks = graph.layer("part")
    of_pairs = tuple(own.target.name for own in terms[3:])
    for index, keys in layout.rows:
        for n in keys:
            here = (*index, n)
            part = (parts, *here)
            blocks = layout.blocks(here, INPUTS)
            run = differentiate_block, here, of_pairs, blocks
            tasks[part] = graph.task(part, *run, blocks=blocks.values())
            for which, own in enumerate(terms):
                key = own.add(layout.place(here), here)
                own.tasks[key] = Task(key, pick, TaskRef(part), which)


def _summed(graph: Graph, terms: _Terms) -> da.Array:
    """Return a gradient as the sums of what its chunks are given; 0 without any."""
    target = terms.target
    steps = [f"{target.name}-{step}" for step in ("part", "sum")]
    sums, sum_tasks = graph.layer(steps[1], steps[0])
    name, tasks = graph.layer(target.name, *steps)
    for index in target.indices:
        key = (name, *index)
        if index in terms.of:
            last = TaskRef(graph.tree(sum_tasks, (sums, *index), terms.of[index], add))
            tasks[key] = Task(key, convert, last, target.dtype)
        else:
            shape = tuple(sizes[n] for sizes, n in zip(target.chunks, index, strict=True))
            tasks[key] = Task(key, np.zeros, shape, target.dtype)
    return graph.array(target.name, target.chunks, target.dtype)


def _targets(layout: Layout, wanted: tuple[str, ...], arguments: dict[str, Any]) -> list[Target]:
    """Return what there are gradients by: q, k, v, then `wanted`."""
    found = [_target_of(layout, f"d{name}") for name in "qkv"]
    heads = layout.call.grid.heads
    rank = len(layout.call.grid.lead)
    for name in wanted:
        if name == "dbias":
            found.append(_target_of(layout, name))
            continue
        given = numpy_view(name[1:], arguments[name[1:]])
        edges = [*layout.call.grid.lead, heads][-given.ndim :]
        axes, chunks = [], []
        for axis, (size, own) in enumerate(zip(given.shape, edges, strict=True)):
            fits = size == own[-1]
            axes.append(rank + 1 - given.ndim + axis if fits else WHOLE)
            chunks.append(chunks_of(own) if fits else (size,))
        found.append(Target(name, tuple(axes), tuple(chunks), given.dtype))
    return found


def _target_of(layout: Layout, name: str) -> Target:
    operand = layout.operands[name[1:]]
    array = operand.array  # type: ignore[union-attr]
    return Target(name, operand.axes, array.chunks, array.dtype)  # type: ignore[union-attr]
