"""Helpers that call one micro-kernel alone, on buffers that notice what they should not suffer."""

from __future__ import annotations

import ctypes
import faulthandler
import functools
import hashlib
import mmap
import os
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from fastattn.cpu import compile
from fastattn.machine import AVX2, AVX512, VectorUnit

GUARD = 67  # elements around a buffer: an odd number, so that nothing is aligned by chance


@dataclass(frozen=True)
class Machine:
    """A target that this computer can run, and the registers to write kernels for."""

    name: str
    target: compile.Target
    unit: VectorUnit

    def __str__(self):
        return self.name


def machines():
    """The host's widest registers, and AVX2's where the host has wider ones."""
    try:
        host = compile.host_target()
    except ImportError:
        return []
    if host.unit is None:
        return []
    found = [Machine("host", host, host.unit)]
    if host.unit == AVX512:
        found.append(Machine("avx2", compile.Target(host.triple, "x86-64-v3", ""), AVX2))
    return found


def lanes_of(machine, dtype):
    return machine.unit.lanes(np.dtype(dtype).itemsize)


def tile_of(machine, dtype):
    """(mr, nv, nr) of the register tile."""
    from fastattn.cpu.microkernel import tile_shape

    mr, nv = tile_shape(machine.unit)
    return mr, nv, nv * lanes_of(machine, dtype)


def run(machine, name, build, *arguments):
    """Call the kernel build(unit), a Numba function of one pointer: the job.

    The job holds one int64 per argument: an int as it is, an array's address.
    """
    job = np.array([a if isinstance(a, int) else address(a) for a in arguments], np.int64)
    key = ("test", name, machine, _digest(build.__code__.co_filename))
    with mock.patch.object(compile, "host_target", return_value=machine.target):
        kernel = compile.kernel(key, lambda unit: _wrapped(build(unit)))
    kernel(job.ctypes.data, 0, 1)


@functools.cache
def _digest(path):
    """Of a test's source and this one: the cache knows only those of the package."""
    return hashlib.sha256(Path(path).read_bytes() + Path(__file__).read_bytes()).hexdigest()


def _wrapped(body):
    from fastattn.cpu.memory import address as address_of
    from fastattn.cpu.memory import pointer_to

    integers = pointer_to("int64")

    def kernel(job, scratch, quota):
        body(integers(address_of(job)))
        return 0

    return kernel


def address(a):
    """Where the first element of an array, or of a Guarded one, lies."""
    view = a.view if isinstance(a, Guarded) else a
    return view.__array_interface__["data"][0]


class Guarded:
    """An array amid canaries: rows may lie further apart than they are long.

    view is what the kernel may write; it starts as NaN, or as `value`.
    """

    def __init__(self, shape, dtype, gap=0, value=np.nan):
        self.dtype = np.dtype(dtype)
        rows, columns = shape if len(shape) == 2 else (1, *shape)
        self.stride = columns + gap  # between rows, in elements
        size = 2 * GUARD + rows * self.stride
        self.whole = np.full(size, -12345.678).astype(self.dtype)
        inside = np.zeros(size, bool)
        self.view, at = (self._window(a, rows, columns, len(shape)) for a in (self.whole, inside))
        at[...] = True
        self.outside = ~inside
        self.before = self.whole[self.outside]
        self.view[...] = value

    def _window(self, a, rows, columns, ndim):
        block = a[GUARD : GUARD + rows * self.stride].reshape(rows, self.stride)[:, :columns]
        return block if ndim == 2 else block[0]

    def check(self, expected=None):
        """Fail if a canary died, or if the view is not exactly `expected`."""
        np.testing.assert_array_equal(self.whole[self.outside], self.before)
        if expected is not None:
            np.testing.assert_array_equal(self.view, expected)


@contextmanager
def at_page_end(a):
    """A copy of an array behind which no byte can be read: who tries is killed."""
    page, size = mmap.PAGESIZE, -(-a.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    room = mmap.mmap(-1, size + page)
    bytes_ = np.frombuffer(room, np.uint8)
    last = bytes_.ctypes.data + size
    _protect(last, page, 0)
    copy = bytes_[size - a.nbytes : size].view(a.dtype).reshape(a.shape)
    copy[...] = a
    try:
        yield copy
    finally:
        _protect(last, page, mmap.PROT_READ | mmap.PROT_WRITE)


@contextmanager
def unreadable(a, hidden):
    """A copy of an array, of whole pages; those that hold nothing but `hidden` elements cannot be
    read: who tries is killed.
    """
    room = mmap.mmap(-1, a.nbytes)
    bytes_ = np.frombuffer(room, np.uint8)
    copy = bytes_.view(a.dtype).reshape(a.shape)
    copy[...] = a
    per_page = mmap.PAGESIZE // a.itemsize
    pages = np.broadcast_to(hidden, a.shape).reshape(-1, per_page).all(axis=1)
    places = bytes_.ctypes.data + mmap.PAGESIZE * np.flatnonzero(pages)
    for place in places.tolist():
        _protect(place, mmap.PAGESIZE, 0)
    try:
        yield copy
    finally:
        for place in places.tolist():
            _protect(place, mmap.PAGESIZE, mmap.PROT_READ | mmap.PROT_WRITE)


def _protect(place, size, rights):
    change = ctypes.CDLL(None, use_errno=True).mprotect
    change.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    assert change(place, size, rights) == 0


def survives(function):
    """Whether function() ends well, in a child of its own."""
    child = os.fork()
    if not child:
        faulthandler.disable()
        try:
            function()
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitpid(child, 0)[1] == 0


def numpy_dtype(name):
    """The NumPy dtype of a name, bfloat16 included."""
    return np.dtype(pytest.importorskip("ml_dtypes").bfloat16 if name == "bfloat16" else name)


def largest(dtype):
    """The largest finite number of a dtype, bfloat16 included."""
    return dtype.type(np.finfo(dtype).max if dtype.kind == "f" else float.fromhex("0x1.fep127"))


def whole_numbers(rng, shape, dtype):
    """Small integers as floats: their products and sums are exact, in any order."""
    return rng.integers(-8, 9, shape).astype(dtype)


def _everywhere():
    """Each machine with each dtype; the last of four is left to slow runs."""
    for machine in machines():
        for dtype in ("float32", "float64"):
            rare = machine.name == "avx2" and dtype == "float64"
            marks = [pytest.mark.slow] if rare else []
            yield pytest.param(machine, dtype, id=f"{machine}-{dtype}", marks=marks)


def _stored():
    """Each of those with each type that its operands may have in memory."""
    for case in _everywhere():
        machine, dtype = case.values
        for storage in ("float32", "float16", "bfloat16") if dtype == "float32" else (dtype,):
            yield pytest.param(machine, dtype, storage, id=f"{case.id}-{storage}", marks=case.marks)


everywhere = pytest.mark.parametrize(("machine", "dtype"), list(_everywhere()))
everywhere_stored = pytest.mark.parametrize(("machine", "dtype", "storage"), list(_stored()))
