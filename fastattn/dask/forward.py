"""attention() on dask arrays: parts of the keys, merged by lse."""

from __future__ import annotations

from typing import Any

import dask.array as da
from dask.task_spec import Task, TaskRef

from .. import api
from ..arguments import flag
from ..check import check, check_backend
from ..signatures import passing_keywords_to
from .arrays import check_array, check_small, stand_in
from .call import Index
from .graph import Graph
from .grid import Chunks, Grid, chunks_of
from .layout import OVER_KEYS, Layout, lay_out
from .reading import Key
from .tasks import attend_run, empty_block, join, pick

# Keywords of attention() that make no sense here.
FOREIGN = ("out", "block_table")


@passing_keywords_to(api.attention, *FOREIGN)
def attention(
    q: da.Array, k: da.Array, v: da.Array, *, return_lse: bool = False, **arguments: Any
) -> Any:
    """Return fastattn.attention() of dask arrays, to be computed by any of dask's schedulers.

    Each pair of a chunk of queries and a chunk of keys of which some row sees some key is a task,
    which calls fastattn on one thread; their results are merged by lse, two by two. Pairs of which
    no row sees a key, by window, causal, chunk, lengths, a block mask or a mask in memory, make no
    task.

    Parameters
    ----------
    q, k, v : dask arrays, shapes and dtypes as in fastattn.attention()
        In chunks along any axis. Where they do not line up, their edges are joined: explain() says
        which arrays are rechunked. Chunks of k and v that only have to be read from storage are
        read by each task that needs them, and never wait in memory.
    mask, bias : dask arrays or arrays, rechunked to the chunks of q and k
    return_lse : bool
    others : as in fastattn.attention(), without `out` and `block_table`
        align, alibi, sinks and lengths may be no dask arrays: they decide which tasks there are.
        Without a dropout_seed, each call draws one; computing its result again gives the same.

    Returns
    -------
    out : dask array (..., heads_q, seqlen_q, head_dim_v), dtype of q
        In the chunks of q. Equal calls have equal names. For the same chunks, the bits do not
        depend on the scheduler, if all machines have the same kind of processor.
    lse : dask array (..., heads_q, seqlen_q). Only if return_lse.

    Raises
    ------
    As fastattn.attention(), when it is called; ValueError for chunks of unknown sizes, TypeError
    for arrays that are no dask arrays. What fails in a task raises when the result is computed,
    and names the block.

    References
    ----------
    Dao 2023, FlashAttention-2, arXiv:2307.08691: lse of parts, and how they merge.
    """
    has_lse = flag("return_lse", return_lse)
    layout, is_matrix = layout_of(q, k, v, **arguments)
    out, lse = _arrays(layout)
    if is_matrix:
        out, lse = out[0], lse[0]
    return (out, lse) if has_lse else out


def layout_of(
    q: Any, k: Any, v: Any, *, backend: str = "auto", **arguments: Any
) -> tuple[Layout, bool]:
    """Check the arguments of attention(); return its layout, and whether all have rank 2."""
    check_backend(backend)
    check_small(arguments)
    arrays = {name: check_array(name, a) for name, a in zip("qkv", (q, k, v), strict=True)}
    given = {name: arguments.pop(name, None) for name in ("mask", "bias")}
    stubs = {name: stand_in(name, a) for name, a in (arrays | given).items()}
    problem, operands = check(**stubs, **arguments, fold=False, results=False)
    is_matrix = all(a.ndim == 2 for a in arrays.values())
    whole = {name: with_heads(a) for name, a in arrays.items()} | given
    return lay_out(problem, operands, whole, arguments, backend), is_matrix


def with_heads(array: da.Array) -> da.Array:
    """Return an array of rank 3 or more."""
    return array[None] if array.ndim == 2 else array


def row_chunks(grid: Grid) -> list[Chunks]:
    """Return the chunks of an array (*lead, heads_q, seqlen_q)."""
    return [chunks_of(edges) for edges in (*grid.lead, grid.heads, grid.rows)]


def _arrays(layout: Layout) -> tuple[da.Array, da.Array]:
    """Return out and lse."""
    graph, problem, q = Graph(layout, "attention"), layout.call.problem, layout.array("q")
    parts, part_tasks = graph.layer("part")
    merges, merge_tasks = graph.layer("merge", "part")
    out, out_tasks = graph.layer("", "part", "merge")
    lse, lse_tasks = graph.layer("lse", "part", "merge")
    for index, runs in layout.runs:
        results = []
        for keys in runs:
            key = (parts, *index, keys[0])
            part_tasks[key] = _run(graph, key, index, keys, keys is runs[0], len(runs))
            results.append(key)
        if not runs:
            results.append((parts, *index, 0))
            task = Task(results[0], empty_block, graph.call, results[0][1:])
            part_tasks[task.key] = task
        last = TaskRef(graph.tree(merge_tasks, (merges, *index), results, join))
        whole = (out, *index, 0)
        out_tasks[whole] = Task(whole, pick, last, 0, q.dtype)
        of_rows = (lse, *index)
        lse_tasks[of_rows] = Task(of_rows, pick, last, 1)
    rows = row_chunks(layout.call.grid)
    found = graph.array("", [*rows, (problem.head_dim_v,)], q.dtype)
    return found, graph.array("lse", rows, problem.variant.dtype)


def _run(graph: Graph, key: Key, rows: Index, keys: list[int], first: bool, runs: int) -> Task:
    """Return the task of a block of rows and a run of chunks of keys."""
    layout = graph.layout
    alone = runs == len(keys) == 1
    (q,) = layout.blocks((*rows, keys[0]), ("q",)).values()
    pairs = [(n, layout.blocks((*rows, n), OVER_KEYS)) for n in keys]
    blocks = [q, *(block for _, own in pairs for block in own.values())]
    return graph.task(key, attend_run, rows, first, alone, q, pairs, blocks=blocks)
