"""Attention on dask arrays: beyond one machine, and beyond memory. See docs/dask.md."""

from importlib import import_module

from ..optional import missing

try:
    array = import_module("dask.array")
except ImportError as error:
    raise missing("fastattn.dask", "dask", "'fastattn[dask]'") from error

if array.array_expr_enabled():
    raise ImportError(
        "fastattn.dask needs dask arrays without query planning, which dask's setting "
        "array.query-planning turned on. Set it to False before dask.array is imported."
    )

from .backward import attention_backward
from .forward import attention
from .report import Tasks, explain
from .sizes import suggest_chunks
from .storage import from_memmap

__all__ = [
    "Tasks",
    "attention",
    "attention_backward",
    "explain",
    "from_memmap",
    "suggest_chunks",
]
