"""FASTATTN_DEBUG=1: memory that shows who touched it wrongly, or never. Slow, for tests.

Arrays and scratch lie between guards, and all bytes that nobody has written are 0xFF. As a float
that is a NaN which arithmetic passes on and does not make, so that it shows in a result whether the
result was not written, or comes from scratch that was not, or from outside an input.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
from numpy.lib.stride_tricks import as_strided

ON = os.environ.get("FASTATTN_DEBUG", "") not in ("", "0")
GUARD = 256  # bytes on either side
INPUTS = ("q", "k", "v", "mask", "bias")  # of Operands
LARGEST = 64 << 20  # bytes of an array that gets a twin
Record = TypeVar("Record", bound=Any)  # a NamedTuple


class Damage(RuntimeError):
    """Memory that was written or read where it must not be."""


class Guarded:
    """Memory between guards."""

    def __init__(self, nbytes: int):
        # Aligned as NumPy aligns large arrays.
        raw = np.full(nbytes + 2 * GUARD + 64, 0xFF, np.uint8)
        start = GUARD - raw.ctypes.data % 64 + 64
        self.memory = raw[start : start + nbytes]
        self._edges = raw[:start], raw[start + nbytes :]

    def check(self, name: str) -> None:
        """Raise Damage if a guard was written."""
        for where, edge in zip(("before", "after"), self._edges, strict=True):
            if (edge != 0xFF).any():
                raise Damage(f"memory {where} {name} was written")


class Twin:
    """An array of the shape and strides of another, whose gaps are guards too."""

    def __init__(self, name: str, a: np.ndarray):
        self.name, self._original = name, a
        spans = [(size - 1) * stride for size, stride in zip(a.shape, a.strides, strict=True)]
        below, above = -sum(s for s in spans if s < 0), sum(s for s in spans if s > 0)
        self._guarded = Guarded(below + above + a.itemsize if a.size else 0)
        own = self._guarded.memory[below : below + a.itemsize].view(a.dtype)
        self.array = as_strided(own, a.shape, a.strides) if a.size else a
        self._before: np.ndarray | None = None

    def copied(self) -> Twin:
        """This one, with the values of the original."""
        self.array[...] = self._original
        self._before = self._guarded.memory.copy()
        return self

    def check_read(self) -> None:
        """Raise Damage if anything was written."""
        self._guarded.check(self.name)
        if self._before is not None and (self._guarded.memory != self._before).any():
            raise Damage(f"{self.name} was written")

    def check_written(self) -> None:
        """Give the values to the original. Raise Damage unless every element was written, and
        nothing else.
        """
        self._guarded.check(self.name)
        self._original[...] = self.array
        self.array.view(f"u{self.array.itemsize}")[...] = _all_ones(self.array)
        if (self._guarded.memory != 0xFF).any():
            raise Damage(f"memory between the elements of {self.name} was written")

    def check_values(self) -> None:
        """Raise Damage if an element was not written, or with what nobody has written."""
        found = _untouched(self._original)
        if found:
            raise Damage(f"{self.name} has {found} elements that no input can give")


def _all_ones(a: np.ndarray) -> int:
    """The bits of an element that nobody has written."""
    return (1 << 8 * a.itemsize) - 1


def _untouched(a: np.ndarray) -> int:
    """Elements that nobody has written."""
    return int((a.view(f"u{a.itemsize}") == _all_ones(a)).sum())


@contextmanager
def watched(
    record: Record, inputs: tuple[str, ...], outputs: tuple[str, ...], begun: bool = False
) -> Iterator[Record]:
    """A record of arrays for a backend, with twins of those that it reads and writes; checked at
    the end. Raises Damage. `begun` is said of outputs whose values count.
    """
    given = {name: getattr(record, name) for name in (*inputs, *outputs)}
    given = {name: a for name, a in given.items() if a is not None and a.size}
    twins = {name: Twin(name, a) for name, a in given.items() if _extent(a) <= LARGEST}
    read = [twin.copied() for name, twin in twins.items() if name in inputs]
    written = [twin for name, twin in twins.items() if name in outputs]
    written = [twin.copied() for twin in written] if begun else written
    yield record._replace(**{name: twin.array for name, twin in twins.items()})
    for twin in read:
        twin.check_read()
    has_poison = any(_untouched(twin.array) for twin in read)
    for twin in written:
        twin.check_written()
        if not has_poison:
            twin.check_values()
    import logging  # here: it costs `import fastattn` 3 ms

    log = logging.getLogger("fastattn")
    log.debug("NaN: %s", {name: int(np.isnan(a).sum()) for name, a in given.items()})


def _extent(a: np.ndarray) -> int:
    """Bytes from the first to the last element."""
    pairs = zip(a.shape, a.strides, strict=True)
    return sum((size - 1) * abs(stride) for size, stride in pairs) + a.itemsize
