"""This machine's limits in the run at hand, for all threads together."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial

from . import roofline
from .work import Limits


def multiply_add_peak(dtype: str, num_threads: int) -> float:
    """gflop_s of register-only loops that run on num_threads threads at once.

    Raises ImportError where no kernel can be compiled.
    """
    with ThreadPoolExecutor(num_threads) as pool:
        return sum(pool.map(roofline.multiply_add_peak, [dtype] * num_threads))


def read_bandwidth(num_threads: int) -> float:
    """gb_s of a plain read loop. Raises ImportError where no kernel can be compiled."""
    return roofline.read_bandwidth(num_threads)


def measure(dtype: str, num_threads: int) -> Limits | None:
    """Both limits, or None where no kernel can be compiled."""
    try:
        return Limits(multiply_add_peak(dtype, num_threads), read_bandwidth(num_threads))
    except ImportError:
        return None


def measure_again(limits: Limits, bound: str, dtype: str, num_threads: int) -> Limits:
    """The limits with the one that binds measured anew: shared machines drift within a minute."""
    measures = {
        "compute": ("gflop_s", partial(multiply_add_peak, dtype, num_threads)),
        "memory": ("gb_s", partial(read_bandwidth, num_threads)),
    }
    field, function = measures[bound]
    return limits._replace(**{field: function()})
