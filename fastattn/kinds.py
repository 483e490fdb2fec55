"""Arrays of other libraries: seen as NumPy arrays, and results given back as the caller's kind.

No library is imported for this: whoever passes an array of it has done so.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from .optional import bfloat16
from .results import empty

CUDA_DEVICES = (2, 13)  # DLPack's kDLCUDA and kDLCUDAManaged


def numpy_view(name: str, x: Any) -> np.ndarray:
    """Return any array-like in the memory of the CPU as a plain array.

    Without a copy for whatever has one of NumPy's protocols (__array__ and its kin, the buffer
    protocol, DLPack) and for torch's CPU tensors, bfloat16 included. Raises TypeError for arrays
    that cannot be seen like this, with `name` in the message.
    """
    if type(x) is np.ndarray:
        return x
    if is_tensor(x):
        return view_of_tensor(name, x)
    if isinstance(x, np.ma.MaskedArray):  # whose mask would be lost
        raise TypeError(
            f"{name} must be a plain array, got a masked array. Pass its .data, and mask=~its mask "
            "broadcast to the scores (mask is True where a query may attend)."
        )
    try:
        if is_on_device(x):
            raise TypeError("it lies in the memory of a CUDA device. Copy it to the CPU's first")
        if hasattr(x, "__dlpack__") and not hasattr(x, "__array__"):
            return np.from_dlpack(x)
        return np.asarray(x)
    except ValueError as error:  # lists of unequal length
        raise ValueError(f"{name} must be an array, got {type(x).__name__}: {error}") from None
    except (TypeError, BufferError, OverflowError, RuntimeError) as error:
        reason = str(error).strip().partition("\n")[0]  # a tracer of JAX explains itself at length
        rule = f"{name} must be an array in the memory of the CPU"
        raise TypeError(f"{rule}, got {type(x).__name__}: {reason}") from None


def array_view(name: str, x: Any) -> np.ndarray:
    """Return numpy_view(), or for an array of a GPU a view of its memory that nothing may read."""
    if type(x) is np.ndarray or not is_on_device(x):
        return numpy_view(name, x)
    from .cuda.memory import device_view

    return device_view(name, x)


def new_array(beside: np.ndarray, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Return an array without contents, in C order, in the memory where `beside` is."""
    if not is_device_view(beside):
        return empty(shape, dtype)
    from .cuda.memory import empty_beside

    return empty_beside(beside, shape, np.dtype(dtype))


def like(x: Any, array: Any) -> Any:
    """Return `array`, a new one of ours, as an array of the library that `x` belongs to.

    torch and the libraries of GPUs share its memory; others take it by their `asarray`, which may
    copy. Where `x` is no array (a list, say), and for None, `array` itself.
    """
    if array is None or isinstance(x, np.ndarray):
        return array
    if is_device_view(array):
        from .cuda.memory import exported

        return exported(array)
    if is_tensor(x):
        return as_tensor(array)
    namespace = getattr(x, "__array_namespace__", None)
    return array if namespace is None else namespace().asarray(array)


def is_tensor(x: Any) -> bool:
    """Whether `x` is a tensor of torch."""
    torch = sys.modules.get("torch")
    # Another thread may be importing it just now.
    return torch is not None and isinstance(x, getattr(torch, "Tensor", ()))


def view_of_tensor(name: str, x: Any) -> np.ndarray:
    """Return numpy_view() of a tensor of torch."""
    torch = sys.modules["torch"]
    if x.requires_grad:
        if torch.is_grad_enabled():
            raise TypeError(
                f"{name} must not require a gradient, which would not be recorded. Pass "
                f"{name}.detach(), or call the functions of fastattn.torch."
            )
        x = x.detach()
    try:
        if x.dtype is torch.bfloat16:
            return x.view(torch.int16).numpy().view(bfloat16())
        return x.numpy()
    # On a device, sparse, quantized, nested, without data, within vmap, lazily negative, ...
    except (TypeError, RuntimeError) as error:
        rule = f"{name} must be a dense tensor in the memory of the CPU"
        raise TypeError(f"{rule}, got {x.dtype} of another kind: {error}") from None


def as_tensor(array: Any) -> Any:
    """Return a writeable array as a tensor that shares its memory."""
    torch = sys.modules["torch"]
    array = np.asarray(array)  # NumPy's functions make numbers of arrays without axes
    if array.dtype.kind == "V":  # bfloat16 of ml_dtypes
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def is_on_device(x: Any) -> bool:
    """Whether `x` is an array in the memory of a CUDA device: of torch, CuPy, Numba, JAX, ..."""
    if type(x) is np.ndarray:
        return False
    if is_tensor(x):
        return x.is_cuda
    if hasattr(x, "__cuda_array_interface__"):
        return True
    device = getattr(x, "__dlpack_device__", None)
    return device is not None and device()[0] in CUDA_DEVICES


def is_device_view(array: np.ndarray) -> bool:
    """Whether an array is a view of the memory of a GPU, as array_view() makes them."""
    return device_of(array) is not None


def device_of(array: np.ndarray) -> int | None:
    """The number of the GPU whose memory an array is a view of; None for the CPU's."""
    base = array.base
    while type(base) is np.ndarray:
        base = base.base
    return None if base is None else getattr(base, "gpu_ordinal", None)
