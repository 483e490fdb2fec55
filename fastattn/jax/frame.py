"""XLA's foreign function interface, as far as a call on the CPU needs it: NumPy in place of C.

XLA calls a C function with one pointer, to a call frame: addresses, shapes and types of operands
and results, and attributes. Here that function is a ctypes callback, which hands a Python function
NumPy views of XLA's own memory. jax.pure_callback does so too, but brings operands to a device
first: it adds 181 µs to a call, this 37 (bench/faces.py), and it can wait for ever for a thread
pool whose threads all wait in callbacks.

Source: xla/ffi/api/c_api.h, which jaxlib brings along (jax.ffi.include_dir()), version 0.3. The
structures only ever grow at their ends, so an older or newer XLA finds what it looks for.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import POINTER, Structure, c_char, c_char_p, c_int, c_int64, c_size_t, c_void_p
from typing import Any

import jax
import ml_dtypes
import numpy as np

DTYPES = {  # XLA_FFI_DataType
    1: np.dtype(np.bool_),
    4: np.dtype(np.int32),
    10: np.dtype(np.float16),
    11: np.dtype(np.float32),
    12: np.dtype(np.float64),
    16: np.dtype(ml_dtypes.bfloat16),
}
METADATA = 1  # XLA_FFI_Extension_Type
UNKNOWN = 2  # XLA_FFI_Error_Code
HEAD: list[Any] = [("struct_size", c_size_t), ("extension", c_void_p)]  # of most structures


class ApiVersion(Structure):
    _fields_ = [*HEAD, ("major", c_int), ("minor", c_int)]


class Extension(Structure):
    _fields_ = [("struct_size", c_size_t), ("type", c_int), ("next", c_void_p)]


class Metadata(Structure):
    _fields_ = [("struct_size", c_size_t), ("api_version", ApiVersion)]


class MetadataExtension(Structure):
    _fields_ = [("base", Extension), ("metadata", POINTER(Metadata))]


class Failure(Structure):
    """XLA_FFI_Error_Create_Args."""

    _fields_ = [*HEAD, ("message", c_char_p), ("code", c_int)]


class Api(Structure):
    _fields_ = [
        *HEAD,
        ("version", ApiVersion),
        ("internal", c_void_p),
        ("new_error", ctypes.CFUNCTYPE(c_void_p, POINTER(Failure))),
    ]


class Buffer(Structure):
    _fields_ = [
        *HEAD,
        ("dtype", c_int),
        ("data", c_void_p),
        ("rank", c_int64),
        ("shape", POINTER(c_int64)),
    ]


class Buffers(Structure):
    """XLA_FFI_Args, and XLA_FFI_Rets alike."""

    _fields_ = [
        *HEAD,
        ("size", c_int64),
        ("types", c_void_p),
        ("buffers", POINTER(POINTER(Buffer))),
    ]


class Text(Structure):
    """XLA_FFI_ByteSpan."""

    _fields_ = [("data", c_void_p), ("length", c_size_t)]


class Attributes(Structure):
    _fields_ = [
        *HEAD,
        ("size", c_int64),
        ("types", c_void_p),
        ("names", c_void_p),
        ("values", POINTER(POINTER(Text))),  # of attributes that are strings
    ]


class CallFrame(Structure):
    _fields_ = [
        *HEAD,
        ("api", POINTER(Api)),
        ("context", c_void_p),
        ("stage", c_int),
        ("operands", Buffers),
        ("results", Buffers),
        ("attributes", Attributes),
    ]


Entry = ctypes.CFUNCTYPE(c_void_p, POINTER(CallFrame))
_entries: list[Any] = []  # XLA has their addresses, so they must live on


def register(name: str, function: Callable[[bytes, list[Any], list[Any]], None]) -> None:
    """Let jax.ffi.ffi_call(name, ...) call function(attribute, operands, results) on the CPU.

    attribute is the call's only one, a string. operands and results are views of XLA's memory in
    C order: the first must not be written, the others must be, whole. What it raises becomes an
    error of JAX.
    """

    def entry(pointer: Any) -> int | None:
        frame = pointer.contents
        try:
            if frame.extension and _answer_metadata(frame):
                return None
            attribute = frame.attributes.values[0].contents
            text = ctypes.string_at(attribute.data, attribute.length)
            function(text, _views(frame.operands), _views(frame.results))
        except BaseException as error:  # nothing may pass through C
            return _error(frame.api.contents, f"{name}: {type(error).__name__}: {error}")
        return None

    _entries.append(Entry(entry))
    capsule = jax.ffi.pycapsule(ctypes.cast(_entries[-1], c_void_p).value)
    jax.ffi.register_ffi_target(name, capsule, platform="cpu")


def _answer_metadata(frame: Any) -> bool:
    """Say which version this is for, if asked: any that has the fields above."""
    extension = MetadataExtension.from_address(frame.extension)
    if extension.base.type != METADATA:
        return False
    theirs, ours = frame.api.contents.version, extension.metadata.contents.api_version
    ours.major, ours.minor = theirs.major, theirs.minor
    return True


def _views(buffers: Any) -> list[np.ndarray]:
    return [_view(buffers.buffers[n].contents) for n in range(buffers.size)]


def _view(buffer: Any) -> np.ndarray:
    shape, dtype = tuple(buffer.shape[: buffer.rank]), DTYPES[buffer.dtype]
    nbytes = dtype.itemsize
    for size in shape:
        nbytes *= size
    if not nbytes:
        return np.empty(shape, dtype)
    return np.ndarray(shape, dtype, (c_char * nbytes).from_address(buffer.data))


def _error(api: Any, message: str) -> int:
    failure = Failure(ctypes.sizeof(Failure), None, message.encode(), UNKNOWN)
    return api.new_error(failure)
