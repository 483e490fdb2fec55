"""The scratch memory that each thread keeps."""

from __future__ import annotations

import threading

import numpy as np

from .job import LINE
from .layout import address

# Bytes of scratch that a thread keeps for its next call: fresh pages cost 0.1 ms a call.
SCRATCH_KEPT = 8 << 20
_kept = threading.local()


def kept() -> tuple[np.ndarray, int]:
    """This thread's scratch, and where it begins; or nothing."""
    return getattr(_kept, "scratch", None) or (np.empty(0, np.uint8), 0)


def aligned(scratch: np.ndarray) -> int:
    """Where its first whole line begins."""
    return (address(scratch) + LINE - 1) & -LINE


def take(nbytes: int, most_kept: int = SCRATCH_KEPT) -> tuple[np.ndarray, int]:
    """This thread's scratch, which holds whatever the last call left, and where it begins."""
    found = getattr(_kept, "scratch", None)
    if found is None or found[0].nbytes < nbytes:
        buffer = np.empty(nbytes, np.uint8)
        found = buffer, aligned(buffer)
        if nbytes <= most_kept:
            _kept.scratch = found
    return found
