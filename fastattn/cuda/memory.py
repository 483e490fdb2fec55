"""Arrays in the memory of a GPU, seen as NumPy arrays that nothing may read.

check() needs shapes, strides and dtypes, and the rules of views: NumPy has all of it. A view here
has the address of the device's memory; its elements are never touched, by no function of this
package but the kernels (reading one from Python would end the process).
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from ..optional import bfloat16
from . import driver

TORCH_DTYPES = {
    "torch.float16": "float16",
    "torch.bfloat16": "bfloat16",
    "torch.float32": "float32",
    "torch.float64": "float64",
    "torch.bool": "bool",
    "torch.int32": "int32",
    "torch.int64": "int64",
}
NOWHERE = 64  # the address of an array without elements: NumPy wants one


class DeviceMemory:
    """What stands at the end of the `base` of every view: whose memory it is."""

    def __init__(self, owner: Any, ordinal: int, stream: int):
        self.owner = owner  # the caller's array, which keeps it alive
        self.ordinal = self.gpu_ordinal = ordinal  # the latter for kinds.py, below this module
        self.stream = stream  # the one that the caller works on, at the time of the call
        self.__array_interface__: dict[str, Any] = {}


def device_memory(array: Any) -> DeviceMemory | None:
    """Whose memory an array is a view of; None for one in the memory of the CPU."""
    while isinstance(array, np.ndarray):
        array = array.base
    return array if type(array) is DeviceMemory else None


def device_view(name: str, x: Any) -> np.ndarray:
    """Return an array of a GPU as one for check(), without copying or waiting.

    Raises TypeError for dtypes and kinds that kernels do not know, with `name` in the message.
    """
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(x, torch.Tensor):
        return _view_of_tensor(name, x)
    interface = getattr(x, "__cuda_array_interface__", None)
    if interface is None:
        rule = f"{name} must be of PyTorch, CuPy or Numba, or have __cuda_array_interface__"
        raise TypeError(
            f"{rule}, got {type(x).__name__}. torch.from_dlpack() makes a tensor of it."
        )
    if interface.get("mask") is not None:
        raise TypeError(f"{name} must be a plain array, got one with a mask")
    address, read_only = interface["data"]
    ordinal = driver.ordinal_of(address) if address else 0
    memory = DeviceMemory(x, ordinal, interface.get("stream") or 0)
    shape, dtype = tuple(interface["shape"]), np.dtype(interface["typestr"])
    return view_of(memory, address, shape, dtype, interface.get("strides"), read_only)


def _view_of_tensor(name: str, x: Any) -> np.ndarray:
    torch = sys.modules["torch"]
    if x.requires_grad and torch.is_grad_enabled():
        raise TypeError(
            f"{name} must not require a gradient, which would not be recorded. Pass "
            f"{name}.detach(), or call the functions of fastattn.torch."
        )
    known = TORCH_DTYPES.get(str(x.dtype))
    if known is None or x.layout is not torch.strided or x.is_conj() or x.is_neg():
        kinds = ", ".join(TORCH_DTYPES.values())
        raise TypeError(f"{name} must be a dense tensor of {kinds}, got {x.dtype} of {x.layout}")
    dtype = bfloat16() if known == "bfloat16" else np.dtype(known)
    stream = torch.cuda.current_stream(x.device).cuda_stream
    memory = DeviceMemory(x, x.device.index, stream)
    strides = tuple(step * dtype.itemsize for step in x.stride())
    return view_of(memory, x.data_ptr(), tuple(x.shape), dtype, strides)


def view_of(
    memory: DeviceMemory,
    address: int,
    shape: tuple[int, ...],
    dtype: np.dtype,
    strides: tuple[int, ...] | None = None,
    read_only: bool = False,
) -> np.ndarray:
    """Return a new view; `memory` is for this one alone. strides in bytes, default C order."""
    memory.__array_interface__ = {
        "shape": shape,
        "strides": strides,
        "typestr": dtype.str,
        "data": (address or NOWHERE, read_only),
        "version": 3,
    }
    array = np.asarray(memory)
    return array if array.dtype == dtype else array.view(dtype)


# --- new arrays, and the way back to the caller's library -----------------------------------------


def empty_beside(view: np.ndarray, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """A view of a new array, C-contiguous, of the library and on the device of another view.

    Raises
    ------
    TypeError  the library is none that fastattn knows how to ask for memory
    """
    memory: Any = device_memory(view)
    owner = memory.owner
    library = type(owner).__module__.partition(".")[0]
    if library == "torch":
        torch = sys.modules["torch"]
        kind = getattr(torch, dtype.name)
        return device_view("out", torch.empty(shape, dtype=kind, device=owner.device))
    if library == "cupy":
        cupy = sys.modules["cupy"]
        with cupy.cuda.Device(memory.ordinal):
            return device_view("out", cupy.empty(shape, dtype))
    if library in ("numba", "numba_cuda"):
        return device_view("out", sys.modules["numba.cuda"].device_array(shape, dtype))
    raise TypeError(
        f"out must be given where q is of {library}, which fastattn cannot ask for memory. It can "
        "ask PyTorch, CuPy and Numba."
    )


class _Exported:
    """A view, as the libraries take it."""

    def __init__(self, array: np.ndarray):
        self._keep = device_memory(array)
        interface = array.__array_interface__  # made anew each time that it is asked for
        self.__cuda_array_interface__ = {
            **{k: interface[k] for k in ("shape", "data", "version", "typestr")},
            "strides": array.strides,
            "stream": None,  # it is the caller's own: nothing to wait for
        }


def exported(array: np.ndarray) -> Any:
    """A view of a new array of empty(), as an array of its library, sharing its memory."""
    memory = device_memory(array)
    if memory is None:
        raise TypeError("array must be a view of the memory of a GPU, got one of the CPU's")
    owner = memory.owner
    library = type(owner).__module__.partition(".")[0]
    if library == "torch":
        first = (array.__array_interface__["data"][0] - owner.data_ptr()) // array.itemsize
        strides = [step // array.itemsize for step in array.strides]
        return owner.as_strided(array.shape, strides, owner.storage_offset() + first)
    if library == "cupy":
        return sys.modules["cupy"].asarray(_Exported(array))
    return sys.modules["numba.cuda"].as_cuda_array(_Exported(array), sync=False)
