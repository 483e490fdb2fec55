"""What Numba keeps of a translation."""

from __future__ import annotations

import gc
import weakref

import pytest

pytest.importorskip("numba")


class Local:
    """Something that a caller has."""


def kernel(job, scratch, quota):
    return min(quota, quota, 3)  # which Numba tries as that of an array


def test_no_frame_of_the_caller_is_kept():
    """Numba notes what it tried, in cycles. Their garbage is found late: it counts as old."""
    from fastattn.cpu.translation import translate

    def call():
        local = Local()
        translate(kernel)
        return weakref.ref(local)

    gc.collect()
    gc.disable()
    try:
        assert call()() is None
    finally:
        gc.enable()
