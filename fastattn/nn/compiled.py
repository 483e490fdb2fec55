"""Which of the functions over rows are compiled here."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import numpy as np

from ..check import CPU_BACKENDS, check_backend


@lru_cache(maxsize=256)
def compiled(function: str, dtype: np.dtype, backend: str) -> Callable[..., None] | None:
    """Return cpu.elementwise.run, or None where NumPy has to do, by the rules of plan()."""
    check_backend(backend, CPU_BACKENDS)
    if backend == "numpy":
        return None
    # Here, as in plan(): asking for a kernel loads the compiler's run-time part.
    from ..cpu.elementwise import run, unavailable

    why_not = unavailable(function, dtype.name)
    if why_not and backend == "cpu":
        raise ImportError(
            f"backend='cpu' cannot run here: {why_not}. backend='auto' falls back to NumPy."
        )
    return None if why_not else run
