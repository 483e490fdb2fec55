"""The part of NVIDIA's driver that is needed, through ctypes: no package, no toolkit.

Contexts are the devices' primary ones, which PyTorch, CuPy and Numba use as well. Nothing here
waits for a GPU but synchronize() and to_host().
"""

from __future__ import annotations

import ctypes
import functools
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from ctypes import byref, c_char_p, c_int, c_int64, c_size_t, c_ubyte, c_uint, c_uint64, c_void_p
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from .job import FIELDS, MAP_BYTES, MAPS, PACKERS, Job, MappedJob, TensorMap

OLDEST = 12000  # CUDA 12.0: it knows PTX 8.0, and memory in the order of a stream
OLDEST_CAPABILITY = (7, 5)
# Numbers from cuda.h.
COMPUTE_CAPABILITY_MAJOR, COMPUTE_CAPABILITY_MINOR = 75, 76
MULTIPROCESSORS, SHARED_BYTES, REGISTERS, L2_BYTES = 16, 97, 82, 38
POINTER_DEVICE = 9  # CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
FLOAT16, BFLOAT16 = 6, 9  # CU_TENSOR_MAP_DATA_TYPE_*
SWIZZLE_128, PROMOTE_256 = 3, 3  # CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B
STATIC_LIMIT = 48 << 10  # bytes of shared memory that need no leave


@dataclass(frozen=True, slots=True)
class Device:
    """What a plan depends on."""

    ordinal: int
    name: str
    capability: tuple[int, int]
    multiprocessors: int
    shared_bytes: int  # of one block, at most
    registers: int  # 32-bit, of one multiprocessor
    l2_bytes: int


class Code(NamedTuple):
    """What the driver loads."""

    entry: str  # the kernel's name in the text
    ptx: str


class DriverError(RuntimeError):
    """The driver refused a call."""


@functools.cache
def _library() -> Any:
    name = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
    library = ctypes.CDLL(name)
    library.cuLaunchKernel.argtypes = [c_void_p, *[c_uint] * 7, c_void_p, c_void_p, c_void_p]
    return library


def _call(function: str, *arguments: Any) -> None:
    """Call the driver, or raise with what it says."""
    status = getattr(_library(), function)(*arguments)
    if status:
        raise DriverError(_message(function, status))


def _message(function: str, status: int) -> str:
    text = c_char_p()
    _library().cuGetErrorString(c_int(status), byref(text))
    reason = text.value.decode() if text.value else "unknown error"
    return f"the CUDA driver's {function} failed with {status}: {reason}"


@functools.cache
def unavailable() -> str:
    """Why no GPU can be used, in one line; "" if one can."""
    try:
        library = _library()
    except OSError:
        return "there is no NVIDIA driver (libcuda)"
    version, count = c_int(), c_int()
    library.cuDriverGetVersion(byref(version))
    if version.value < OLDEST:
        has = f"CUDA {version.value // 1000}.{version.value % 1000 // 10}"
        return f"the NVIDIA driver is too old: it knows {has}, fastattn needs {OLDEST // 1000}.0"
    try:
        _call("cuInit", c_uint(0))
        _call("cuDeviceGetCount", byref(count))
    except DriverError as error:
        return str(error)
    if not count.value:
        return "there is no NVIDIA GPU"
    capability = device(0).capability
    if capability < OLDEST_CAPABILITY:
        has = "{}.{}".format(*capability)
        return f"the GPU is too old: it has compute capability {has}, fastattn needs 7.5"
    return ""


@functools.cache
def device(ordinal: int) -> Device:
    """Facts about a device."""
    name = ctypes.create_string_buffer(128)
    _call("cuDeviceGetName", name, c_int(128), _handle(ordinal))

    def attribute(number: int) -> int:
        value = c_int()
        _call("cuDeviceGetAttribute", byref(value), c_int(number), _handle(ordinal))
        return value.value

    return Device(
        ordinal,
        name.value.decode(),
        (attribute(COMPUTE_CAPABILITY_MAJOR), attribute(COMPUTE_CAPABILITY_MINOR)),
        attribute(MULTIPROCESSORS),
        attribute(SHARED_BYTES),
        attribute(REGISTERS),
        attribute(L2_BYTES),
    )


@functools.cache
def _handle(ordinal: int) -> c_int:
    found = c_int()
    _call("cuDeviceGet", byref(found), c_int(ordinal))
    return found


@functools.cache
def _primary_context(ordinal: int) -> int:
    context = c_void_p()
    _call("cuDevicePrimaryCtxRetain", byref(context), _handle(ordinal))
    return context.value or 0


@contextmanager
def using(ordinal: int) -> Iterator[None]:
    """The device's primary context is the current one of this thread; afterwards, the one before
    is.
    """
    wanted, found = _primary_context(ordinal), c_void_p()
    _call("cuCtxGetCurrent", byref(found))
    if found.value == wanted:
        yield
        return
    _call("cuCtxPushCurrent_v2", c_void_p(wanted))
    try:
        yield
    finally:
        _call("cuCtxPopCurrent_v2", byref(c_void_p()))


def ordinal_of(address: int) -> int:
    """The device that memory belongs to."""
    found = c_int()
    # Not through _call(), for 1 of 3 us of each array.
    status = _library().cuPointerGetAttribute(byref(found), POINTER_DEVICE, c_uint64(address))
    if status:
        raise DriverError(_message("cuPointerGetAttribute", status))
    return found.value


# --- kernels --------------------------------------------------------------------------------------


@functools.cache
def load(code: Code, ordinal: int, shared_bytes: int) -> int:
    """The function of a kernel, in the current context, which is that of the device `ordinal`."""
    module, function = c_void_p(), c_void_p()
    _call("cuModuleLoadData", byref(module), c_char_p(code.ptx.encode()))
    _call("cuModuleGetFunction", byref(function), module, c_char_p(code.entry.encode()))
    if shared_bytes > STATIC_LIMIT:
        limit = c_int(MAX_DYNAMIC_SHARED), c_int(shared_bytes)
        _call("cuFuncSetAttribute", function, *limit)
    return function.value or 0


class Parameters:
    """Where a job is packed; the driver copies it before a launch returns."""

    def __init__(self, count: int):
        """count: of numbers, of 8 bytes each."""
        self.numbers = (c_int64 * count)()
        first = ctypes.addressof(self.numbers)
        self._pointers = (c_void_p * count)(*range(first, first + 8 * count, 8))
        self.address = ctypes.addressof(self._pointers)
        self._maps: Any = None

    def pack(self, job: Any) -> None:
        """Set the first numbers to the fields of a job."""
        PACKERS[type(job)].pack_into(self.numbers, 0, *job)

    def with_maps(self, maps: Iterable[bytes]) -> int:
        """The address of pointers to the fields of a Job, and to the maps that come after them."""
        if self._maps is None:
            self._maps = ctypes.create_string_buffer(MAP_BYTES * len(MAPS))
            first = ctypes.addressof(self._maps)
            of_maps = range(first, first + MAP_BYTES * len(MAPS), MAP_BYTES)
            fields = self._pointers[: len(FIELDS)]
            self._mapped = (c_void_p * len((*FIELDS, *MAPS)))(*fields, *of_maps)
        self._maps.raw = b"".join(maps)
        return ctypes.addressof(self._mapped)


class _Own(threading.local):
    """A thread's own parameters."""

    def __init__(self) -> None:
        self.parameters = Parameters(max(packer.size for packer in PACKERS.values()) // 8)


_own = _Own()


def launch(
    function: int,
    grid: tuple[int, int, int],
    threads: int,
    shared_bytes: int,
    stream: int,
    job: Any,
) -> None:
    """Start a kernel on a stream, with the fields of a job as its parameters."""
    parameters = _own.parameters
    pointers = parameters.address
    if type(job) is MappedJob:
        pointers = parameters.with_maps(map(_encoded, job[len(FIELDS) :]))
        job = Job(*job[: len(FIELDS)])
    parameters.pack(job)
    _start(function, *grid, threads, 1, 1, shared_bytes, stream, pointers, None)


def _start(*arguments: Any) -> None:
    status = _library().cuLaunchKernel(*arguments)
    if status:
        raise DriverError(_message("cuLaunchKernel", status))


Shape = tuple[int, tuple[int, int, int], int, int]  # function, grid, threads, shared_bytes


class Launches:
    """Kernels whose jobs are packed: what changes from call to call is a few addresses."""

    def __init__(self, kernels: Iterable[tuple[Any, Shape]]):
        """kernels: (job, shape) of each. Their jobs may differ in integers."""
        jobs, shapes = zip(*kernels, strict=True)
        self._parameters, self._lock = Parameters(len(jobs[0])), threading.Lock()
        self._parameters.pack(jobs[0])
        fields = enumerate(zip(*jobs, strict=True))
        different = [place for place, values in fields if len(set(values)) > 1]
        self._kernels = [
            ([(place, job[place]) for place in different], (f, *grid, threads, 1, 1, nbytes))
            for job, (f, grid, threads, nbytes) in zip(jobs, shapes, strict=True)
        ]

    def start(self, stream: int, addresses: Iterable[tuple[int, int]]) -> None:
        """Start the kernels. addresses: (place of a field in the job, number)."""
        parameters = self._parameters
        numbers = parameters.numbers
        with self._lock:  # a call lets other threads go on
            for place, number in addresses:
                numbers[place] = number
            for own, shape in self._kernels:
                for place, number in own:
                    numbers[place] = number
                _start(*shape, stream, parameters.address, None)


@functools.lru_cache(maxsize=1024)
def _encoded(tensor: TensorMap) -> bytes:
    """A map as copies read it, its boxes swizzled over 128 bytes."""
    room = ctypes.create_string_buffer(MAP_BYTES + 64)
    place = -ctypes.addressof(room) % 64  # it must be aligned so
    axes = len(tensor.sizes)
    numbers = (BFLOAT16 if tensor.storage == "bfloat16" else FLOAT16, axes)
    _call(
        "cuTensorMapEncodeTiled",
        byref(room, place),
        *map(c_int, numbers),
        c_uint64(tensor.address),
        (c_uint64 * axes)(*tensor.sizes),
        (c_uint64 * (axes - 1))(*tensor.strides),
        (c_uint * axes)(64, tensor.rows, 1, 1),
        (c_uint * axes)(1, 1, 1, 1),
        *map(c_int, (0, SWIZZLE_128, PROMOTE_256, 0)),
    )
    return room.raw[place : place + MAP_BYTES]


# --- memory ---------------------------------------------------------------------------------------


def allocate(nbytes: int, stream: int) -> int:
    """The address of memory of the current device, to be used and freed in the stream's order."""
    address = c_uint64()
    _call("cuMemAllocAsync", byref(address), c_size_t(max(nbytes, 1)), c_void_p(stream))
    return address.value


def free(address: int, stream: int) -> None:
    """Give memory back once the stream has come to this point."""
    _call("cuMemFreeAsync", c_uint64(address), c_void_p(stream))


def clear(address: int, nbytes: int, stream: int) -> None:
    """Fill memory with zeros."""
    _call("cuMemsetD8Async", c_uint64(address), c_ubyte(0), c_size_t(nbytes), c_void_p(stream))


def to_device(address: int, array: np.ndarray, stream: int) -> None:
    """Copy a C-contiguous array, which may change once this returns."""
    source = c_void_p(array.ctypes.data)
    size = c_size_t(array.nbytes)
    _call("cuMemcpyHtoDAsync_v2", c_uint64(address), source, size, c_void_p(stream))


def to_host(array: np.ndarray, address: int, stream: int) -> None:
    """Fill a C-contiguous array, and wait for it."""
    target, size = c_void_p(array.ctypes.data), c_size_t(array.nbytes)
    _call("cuMemcpyDtoHAsync_v2", target, c_uint64(address), size, c_void_p(stream))
    synchronize(stream)


def synchronize(stream: int) -> None:
    """Wait until all that was put into a stream is done."""
    _call("cuStreamSynchronize", c_void_p(stream))


def follow(stream: int, other: int) -> None:
    """What is put into `stream` from now on waits, on the device, for what is now in `other`."""
    event = c_void_p()
    _call("cuEventCreate", byref(event), c_uint(2))  # without a time
    _call("cuEventRecord", event, c_void_p(other))
    _call("cuStreamWaitEvent", c_void_p(stream), event, c_uint(0))
    _call("cuEventDestroy_v2", event)
