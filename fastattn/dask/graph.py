"""The graph of a call: a task for each visible pair of chunks, trees that join their results."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import dask.array as da
import numpy as np
from dask.highlevelgraph import HighLevelGraph
from dask.task_spec import Task, TaskRef

from .grid import Chunks
from .layout import Layout
from .reading import Block, Key

Tasks = dict[Any, Any]
# Bytes of a Call that every task carries. A larger one is a node, which workers wait for: those
# tasks that do so then start in no order, and the last ones to end have been the longest.
SMALL = 4096


class Graph:
    """Layers that are being made, all for one layout."""

    def __init__(self, layout: Layout, prefix: str):
        self.layout, self.prefix = layout, prefix
        self._layers: dict[str, Tasks] = {}
        self._needs: dict[str, set[str]] = {}
        self.call: Any = layout.call
        self._shared = set[str]()
        if layout.call.nbytes > SMALL:
            name = self.name("call")
            self._layers[name], self._needs[name] = {name: layout.call}, set()
            self.call, self._shared = TaskRef(name), {name}

    def layer(self, step: str, *needs: str) -> tuple[str, Tasks]:
        """Return (name, tasks to be filled in) of a new layer, which needs those of other steps."""
        name = self.name(step)
        self._layers[name], self._needs[name] = {}, self._shared | {*map(self.name, needs)}
        return name, self._layers[name]

    def name(self, step: str) -> str:
        return f"{self.prefix}{step and '-'}{step}-{self.layout.name}"

    def task(
        self, key: Key, run: Callable[..., Any], *arguments: Any, blocks: Iterable[Block]
    ) -> Task:
        """Return the task run(call, *arguments, keys that the blocks need, *results of these)."""
        needs = tuple(dict.fromkeys(needed for block in blocks for needed in block.needs))
        # A block's key is the name of its layer and the block's index.
        names = {k[0] if isinstance(k, tuple) else k for k in needs}
        self._needs[key[0]] |= names
        return Task(key, run, self.call, *arguments, needs, *map(TaskRef, needs))

    def tree(self, tasks: Tasks, key: Key, parts: Sequence[Key], join: Callable[..., Any]) -> Key:
        """Add the tasks that join parts two by two, neighbours first; return the last one's key.

        key  (name, *index): those of the tasks have two numbers more
        """
        level = 0
        while len(parts) > 1:
            joined: list[Key] = []
            for n in range(0, len(parts) - 1, 2):
                task = (*key, level, n // 2)
                tasks[task] = Task(task, join, TaskRef(parts[n]), TaskRef(parts[n + 1]))
                joined.append(task)
            parts = joined + list(parts[len(parts) // 2 * 2 :])
            level += 1
        return parts[0]

    def array(self, step: str, chunks: Sequence[Chunks], dtype: Any) -> da.Array:
        """Return the layer of this step as a dask array."""
        name = self.name(step)
        graph = self._finished(name)
        return da.Array(graph, name, tuple(chunks), meta=np.empty((0,) * len(chunks), dtype))

    def _finished(self, last: str) -> HighLevelGraph:
        """The layers that lead to one of them, and those of the caller's arrays that they need."""
        given = [found.array.dask for found in self.layout.operands.values() if found is not None]
        below = HighLevelGraph.merge(*given)
        own, missing = {last}, [last]
        while missing:
            more = {n for n in self._needs[missing.pop()] if self._layers.get(n)} - own
            own |= more
            missing += more
        needs = {
            name: {n for n in self._needs[name] if n in own or n in below.layers} for name in own
        }
        # dask keeps layers of which nothing is needed, once it has found all that is.
        below = below.cull_layers({n for names in needs.values() for n in names} - own)
        layers = {name: self._layers[name] for name in own}
        return HighLevelGraph({**below.layers, **layers}, {**below.dependencies, **needs})
