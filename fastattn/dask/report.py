"""What explain() says of a call on dask arrays."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import Any

from .. import api
from ..cpu.threads import num_threads
from ..plan import plan
from ..problem import Plan, Problem
from ..signatures import passing_keywords_to
from .forward import FOREIGN, layout_of
from .grid import chunk_text, chunks_of
from .layout import Layout


@dataclass(frozen=True)
class Tasks:
    """How a call on dask arrays is cut into tasks. `print()` it."""

    grid: tuple[tuple[str, str], ...]  # axis, its chunks
    parts: int  # tasks that call fastattn
    seen: int  # pairs of chunks of which some row sees some key; a part has one or a run of them
    pairs: int  # all there are
    merges: int
    plan: Plan  # of the largest pair, if its rows see all of its keys
    nbytes: int  # of its q, k, v and out
    notes: tuple[str, ...]

    def __str__(self) -> str:
        rows = [(f"{axis}", text) for axis, text in self.grid]
        share = f"{100 * self.seen / self.pairs:.3g} % of" if self.pairs else "of"
        rows.append(("pairs", f"{self.seen}, {share} {self.pairs}"))
        rows.append(("tasks", f"{self.parts} parts, {self.merges} merges"))
        rows.append(("a pair", f"{self.nbytes / 2**20:.3g} MiB of q, k, v and out"))
        rows += [("note", note) for note in self.notes]
        text = "\n".join(f"{name:<11} {what}" for name, what in rows)
        return f"{text}\n-- a whole pair --\n{self.plan}"


@passing_keywords_to(api.attention, *FOREIGN, "return_lse")
def explain(q: Any, k: Any, v: Any, *, backend: str = "auto", **arguments: Any) -> Tasks:
    """Return how attention() would cut these arguments into tasks, and run one. Print it.

    Parameters and errors are those of attention(). Nothing is computed.
    """
    layout, _ = layout_of(q, k, v, backend=backend, **arguments)
    grid = layout.call.grid
    problem = _largest(layout)
    with num_threads(1):
        chosen = plan(problem, backend)
    itemsize = layout.array("q").dtype.itemsize
    heads = problem.heads_q * problem.seqlen_q + problem.heads_kv * problem.seqlen_k
    elements = problem.batch * heads * (problem.head_dim + problem.head_dim_v)
    runs = [own for _, own in layout.runs]
    axes = [*(f"batch {n}" for n in range(len(grid.lead))), "heads", "seqlen_q", "seqlen_k"]
    edges = (*grid.lead, grid.heads, grid.rows, grid.keys)
    return Tasks(
        tuple((axis, chunk_text(chunks_of(own))) for axis, own in zip(axes, edges, strict=True)),
        sum(map(len, runs)),
        sum(len(keys) for own in runs for keys in own),
        prod(grid.shape),
        sum(len(own) - 1 for own in runs if own),
        chosen,
        itemsize * elements,
        layout.notes,
    )


def _largest(layout: Layout) -> Problem:
    """Return the largest block as a problem of its own, all of it visible."""
    grid, problem = layout.call.grid, layout.call.problem
    *lead, heads, rows, keys, heads_kv = (
        max(chunks_of(edges))
        for edges in (*grid.lead, grid.heads, grid.rows, grid.keys, grid.heads_kv)
    )
    sizes: Any = {"heads_q": heads, "heads_kv": heads_kv, "seqlen_q": rows, "seqlen_k": keys}
    visible: Any = {"offset": 0, "left": None, "right": None, "chunk": 0, "block_mask_m": 0}
    return replace(problem, batch=prod(lead), **sizes, **visible)
