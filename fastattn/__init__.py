"""Fused attention for NumPy arrays, compiled for the CPU at hand."""

from __future__ import annotations

from .api import attention, attention_varlen, dropout_mask, explain, merge
from .cpu.threads import get_num_threads, num_threads, set_num_threads
from .sdpa import scaled_dot_product_attention
from .weights import attention_key_sums, attention_weights

__all__ = [
    "__version__",
    "attention",
    "attention_key_sums",
    "attention_varlen",
    "attention_weights",
    "dropout_mask",
    "explain",
    "get_num_threads",
    "merge",
    "num_threads",
    "scaled_dot_product_attention",
    "set_num_threads",
]


def __getattr__(name: str) -> str:
    # Looked up on demand: importlib.metadata costs as much to import as half of this package.
    if name != "__version__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(__name__)
    except PackageNotFoundError:
        return "0+unknown"
