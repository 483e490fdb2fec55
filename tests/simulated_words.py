"""fastattn.cuda.words in Python, on the memory of the CPU: for kernels in Numba's simulator."""

from __future__ import annotations

from ctypes import c_byte, c_double, c_float, c_int32, c_int64, c_uint8, c_uint16, c_uint64
from types import SimpleNamespace

import numpy as np

STORED = {
    "bool": c_byte,
    "uint8": c_uint8,
    "int32": c_int32,
    "int64": c_int64,
    "uint64": c_uint64,
    "float16": c_uint16,
    "bfloat16": c_uint16,
    "float32": c_float,
    "float64": c_double,
}
SEEN = {
    "bool": bool,
    "uint8": np.int64,
    "int32": np.int64,
    "int64": np.int64,
    "uint64": np.uint64,
    "float16": lambda bits: np.float32(np.uint16(bits).view(np.float16)),
    "bfloat16": lambda bits: np.uint32(bits << 16).view(np.float32),
    "float32": np.float32,
    "float64": np.float64,
}


def device(result):
    return lambda function: function


def functions(dtype):
    names = ("exp", "log", "tanh", "sqrt", "floor", "copysign")
    return SimpleNamespace(**{name: getattr(np, name) for name in names})


def lane_xor(dtype):
    """Of a row that has one thread there is no other."""
    return None


def load(name):
    stored, seen = STORED[name], SEEN[name]
    size = np.dtype(stored).itemsize

    def load_element(address, index):
        return seen(stored.from_address(int(address) + size * int(index)).value)

    return load_element


def store(name):
    stored = STORED[name]
    size = np.dtype(stored).itemsize

    def store_element(address, index, value):
        place = stored.from_address(int(address) + size * int(index))
        place.value = _bits(name, value)

    return store_element


def _bits(name, value):
    """What is stored: for halves the bits, rounded to nearest even."""
    if name == "float16":
        return int(np.float16(value).view(np.uint16))
    if name != "bfloat16":
        return int(value) if name.startswith(("int", "uint", "bool")) else float(value)
    bits = int(np.float32(value).view(np.uint32))
    if np.isnan(value):
        return bits >> 16 | 0x40
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
