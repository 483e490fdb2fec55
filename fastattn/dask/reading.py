"""Blocks of operands: read by the task that needs them, or computed by other tasks before."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from dask.array import chunk as chunk_functions
from dask.array import core
from dask.task_spec import Alias, GraphNode, Task
from dask.utils import M

from .storage import read_memmap

Key = tuple[Any, ...]
# What takes no longer than to read: blocks that are made by these alone are made anew by every
# task that needs them, so that none waits in memory for the last of them.
READING = {
    *(core.getter, core.getter_nofancy, core.getter_inline, operator.getitem),
    *(chunk_functions.getitem, chunk_functions.astype, core.concatenate3, core.concatenate_shaped),
    *(np.transpose, np.swapaxes, M.reshape, read_memmap),
}


@dataclass(frozen=True, eq=False)
class Block:
    """A block of an operand, for a task that needs it.

    reads  the task that makes it from what is stored; None if its key is computed before
    """

    key: Key
    reads: GraphNode | None

    @property
    def needs(self) -> Iterable[Any]:
        """Keys of which the results are given to get()."""
        return (self.key,) if self.reads is None else self.reads.dependencies

    def get(self, results: Mapping[Any, Any]) -> Any:
        """Return the block as an array."""
        return results[self.key] if self.reads is None else self.reads(results)


def block_of(graph: Mapping[Any, Any], key: Key) -> Block:
    """Return the block of this key, with the tasks of a graph that read it, if only these do."""
    found: dict[Any, GraphNode] = {}
    missing: list[Any] = [key]
    while missing:
        missing_key = missing.pop()
        task = graph.get(missing_key)
        if isinstance(task, Alias):
            missing += task.dependencies
        elif isinstance(task, Task):
            if task.func not in READING:
                return Block(key, None)
            missing += [k for k in task.dependencies if k not in found]
        else:  # an array, or where one is stored
            continue
        found[missing_key] = task
    return Block(key, Task.fuse(*found.values(), key=key) if found else None)
