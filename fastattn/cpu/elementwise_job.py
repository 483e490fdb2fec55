"""What the kernels over rows receive: operands, sizes, addresses, strides. Plain Python, so that
elementwise.py needs no Numba.

All operands are rows of elements that lie side by side, and broadcast to the axes of the output
before that. An operand may be absent.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import lru_cache
from math import prod
from struct import Struct
from typing import NamedTuple

_ACTIVATION = ("out", "x", "bias", "up")
_NORM = ("out", "x", "bias", "residual", "total", "weight", "shift")
_ROTARY = ("out", "x", "cos", "sin")
OPERANDS = {
    "relu": _ACTIVATION,
    "silu": _ACTIVATION,
    "gelu": _ACTIVATION,
    "gelu_tanh": _ACTIVATION,
    "layer_norm": _NORM,
    "rms_norm": _NORM,
    "rotary_halves": _ROTARY,
    "rotary_interleaved": _ROTARY,
}
WRITTEN = ("out", "total")

# A kernel receives int64s: these, the address of each operand's first row, 0 if it is absent, the
# lengths of three axes of rows, and each operand's strides along them in bytes.
COUNTER = 0  # the number of the next item
EPS = 1  # of a normalisation, float64
PAIRS = 2  # of a rotation
NUM_ITEMS = 3
ROWS_PER_ITEM = 4
ROWS = 5
WIDTH = 6  # elements of a row
LAST = 7  # of the last row
ADDRESSES = 8
MOST_OPERANDS = max(map(len, OPERANDS.values()))
AXES = ADDRESSES + MOST_OPERANDS
STRIDES = AXES + 3
_PACKER = Struct(f"=qd{STRIDES + 3 * MOST_OPERANDS - 2}q")
_Buffer = ctypes.c_char * _PACKER.size

FLAT = 4096  # elements of a row, where arrays are one long row
ELEMENTS_PER_ITEM = 16384  # 5 to 20 us: many times what drawing an item costs

Form = tuple[tuple[int, ...], tuple[int, ...]]  # shape and strides of an array


class Layout(NamedTuple):
    """All of a job that does not change with addresses."""

    sizes: tuple[int, ...]  # from NUM_ITEMS to LAST
    rest: tuple[int, ...]  # from the addresses that are not there on


def pack(eps: float, pairs: int, addresses: Sequence[int], layout: Layout) -> ctypes.Array:
    """The struct. Keep it alive while a kernel runs; addressof() is its address."""
    job = _Buffer()
    _PACKER.pack_into(job, 0, 0, eps, pairs, *layout.sizes, *addresses, *layout.rest)
    return job


@lru_cache(maxsize=1024)
def layout_of(function: str, itemsize: int, out: Form, *inputs: Form | None) -> Layout | None:
    """The layout of arrays of these forms; None if their rows are not contiguous or lie along more
    than three axes.
    """
    forms = (out, *inputs)
    (*lead, width), _ = out
    places = [_row_strides(form, lead) for form in forms]
    if any(form and form[0][-1] > 1 and form[1][-1] != itemsize for form in forms):
        return None
    axes = _merged([*zip(lead, *places, strict=True)])
    last = width
    if OPERANDS[function] is _ACTIVATION:
        axes, width, last = _flattened(axes, width, itemsize, forms)
    if len(axes) > 3:
        return None
    axes = [(1, *[0] * len(forms))] * (3 - len(axes)) + axes
    rows = prod(length for length, *_ in axes)
    rows_per_item = max(1, ELEMENTS_PER_ITEM // width)
    lengths, *strides = zip(*axes, strict=True)
    absent = MOST_OPERANDS - len(forms)
    strides += [(0, 0, 0)] * absent
    return Layout(
        sizes=(-(-rows // rows_per_item), rows_per_item, rows, width, last),
        rest=(*[0] * absent, *lengths, *(step for steps in strides for step in steps)),
    )


def _row_strides(form: Form | None, lead: Sequence[int]) -> list[int]:
    """Strides along the axes of rows, 0 where an operand is broadcast or absent."""
    if form is None:
        return [0] * len(lead)
    lengths, strides = form[0][:-1], form[1][:-1]
    steps = [0 if length == 1 else step for length, step in zip(lengths, strides, strict=True)]
    return [0] * (len(lead) - len(steps)) + steps


def _merged(axes: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Axes (length, stride of each operand), fewer where two neighbours are one to all operands."""
    merged: list[tuple[int, ...]] = []
    for length, *steps in axes:
        if length == 1:
            continue
        if merged and all(
            outer == inner * length for outer, inner in zip(merged[-1][1:], steps, strict=True)
        ):
            length *= merged.pop()[0]
        merged.append((length, *steps))
    return merged


def _flattened(axes, width, itemsize, forms):
    """(axes, width, elements of the last row) where rows that follow each other are one, and a
    single long row is cut.
    """
    row = tuple(0 if form is None else width * itemsize for form in forms)
    if axes and axes[-1][1:] == row:
        width *= axes[-1][0]
        axes = axes[:-1]
    if axes or width <= FLAT:
        return axes, width, width
    count = -(-width // FLAT)
    steps = (0 if form is None else FLAT * itemsize for form in forms)
    return [(count, *steps)], FLAT, width - (count - 1) * FLAT
