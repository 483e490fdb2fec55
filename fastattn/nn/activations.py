"""Activations of the per-token network: elementwise, any shape and strides, in place if asked."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from ..normal import NORMAL_TAIL
from .compiled import compiled
from .linear import check_float_array, check_like, check_vector

BLOCK = 16384  # elements per step in NumPy: some float32 rows stay in L2, and calls cost little
# np.maximum is one instruction an element, as a kernel of ours: which pays on several threads only.
RELU_ALONE = 262144


def activate(
    name: str,
    x: np.ndarray,
    *,
    bias: np.ndarray | None = None,
    up: np.ndarray | None = None,
    out: np.ndarray | None = None,
    backend: str = "auto",
) -> np.ndarray:
    """Return f(x + bias) * up in one pass, f being the activation of this name.

    Parameters
    ----------
    name : "relu", "gelu" (the erf form), "gelu_tanh" or "silu"
    x : (..., features) float32 or float64, any strides
    bias : (features,), dtype of x. Default 0.
    up : array like x. Default 1. With it, these are the gated forms: SwiGLU for silu.
    out : array like x, written in place; may be x or up.
    backend : "auto", "numpy" or "cpu", as in fastattn.attention

    Returns
    -------
    array like x

    Raises
    ------
    ValueError   an unknown name; shapes that do not fit together
    TypeError    dtypes that differ or are not supported
    ImportError  backend="cpu" and no compiler is installed

    Notes
    -----
    Relative error of f: at most 4 eps of the dtype, also far out where it is almost 0, as long as
    the exact value is a normal number. x**2 eps more for gelu_tanh, from the rounding of its cubic,
    and in NumPy for gelu.

    References
    ----------
    Hendrycks and Gimpel 2016, Gaussian Error Linear Units, arXiv:1606.08415: gelu, gelu_tanh, silu.
    Shazeer 2020, GLU Variants Improve Transformer, arXiv:2002.05202.
    """
    check_activation("name", name)
    check_float_array("x", x)
    if bias is not None:
        check_vector("bias", bias, x.shape[-1] if x.ndim else 1, x.dtype, "x")
    if up is not None:
        check_like("up", up, "x", x)
    fresh = out is None
    if out is None:
        out = np.empty_like(x)
    else:
        check_like("out", out, "x", x)
    small = x.size < RELU_ALONE
    alone = name == "relu" and bias is up is None
    # Without a look for a kernel, which would import Numba where it is not in the cache.
    run = None if alone and small and backend == "auto" else compiled(name, x.dtype, backend)
    if alone and (run is None or small):
        np.maximum(x, 0, out=out)
    elif run is None:
        _activate_in_numpy(name, x, bias, up, out)
    elif x.ndim:
        run(name, out, x, bias, up, fresh=fresh)
    else:
        run(name, *(_with_axis(a) for a in (out, x, bias, up)), fresh=fresh)
    return out


def relu(x: np.ndarray, *, out: np.ndarray | None = None, backend: str = "auto") -> np.ndarray:
    """Return max(x, 0), NaN where x is NaN. Arguments and errors as in activate()."""
    return activate("relu", x, out=out, backend=backend)


def gelu(x: np.ndarray, *, out: np.ndarray | None = None, backend: str = "auto") -> np.ndarray:
    """Return x Phi(x), Phi the distribution function of the standard normal: the erf form.

    Arguments and errors as in activate(). It is max(x, 0) - |x| Phi(-|x|), so that nothing cancels
    in the negative tail, where x * (1 + erf(x / sqrt(2))) / 2 loses all its digits.
    """
    return activate("gelu", x, out=out, backend=backend)


def gelu_tanh(x: np.ndarray, *, out: np.ndarray | None = None, backend: str = "auto") -> np.ndarray:
    """Return x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x**3))) / 2: GPT-2's form of gelu.

    Arguments and errors as in activate().
    """
    return activate("gelu_tanh", x, out=out, backend=backend)


def silu(x: np.ndarray, *, out: np.ndarray | None = None, backend: str = "auto") -> np.ndarray:
    """Return x / (1 + exp(-x)), also called swish. Arguments and errors as in activate()."""
    return activate("silu", x, out=out, backend=backend)


def check_activation(argument: str, name: str) -> None:
    """Raise ValueError unless `name` is one of ACTIVATIONS."""
    if name not in ACTIVATIONS:
        raise ValueError(f"{argument} must be one of {tuple(ACTIVATIONS)}, got {name!r}")


def _with_axis(array: np.ndarray | None) -> np.ndarray | None:
    return array if array is None or array.ndim else array.reshape(1)


def _activate_in_numpy(
    name: str, x: np.ndarray, bias: np.ndarray | None, up: np.ndarray | None, out: np.ndarray
) -> None:
    x = x if bias is None else x + bias
    inputs = [x] if up is None else [x, up]
    access: Any = [["writeonly"], *[["readonly"]] * len(inputs)]
    flags: Any = ["external_loop", "buffered", "zerosize_ok", "copy_if_overlap"]
    blocks = np.nditer([out, *inputs], flags=flags, op_flags=access, buffersize=BLOCK)
    # A value that leaves the range on its way to 0 is no event.
    with blocks, np.errstate(under="ignore", over="ignore"):
        for out_block, x_block, *up_block in blocks:
            value = ACTIVATIONS[name](x_block)
            for factor in up_block:
                value *= factor
            out_block[...] = value


def _relu(x: np.ndarray) -> np.ndarray:
    return np.maximum(x, 0)


def _silu(x: np.ndarray) -> np.ndarray:
    return _weighted(x, x)


def _gelu_tanh(x: np.ndarray) -> np.ndarray:
    # (1 + tanh(t / 2)) / 2 = 1 / (1 + exp(-t)), which keeps its digits where tanh is near -1
    return _weighted(x, math.sqrt(8 / math.pi) * (x + 0.044715 * x * x * x))


def _weighted(x: np.ndarray, t: np.ndarray) -> np.ndarray:
    """x / (1 + exp(-t)), t of the sign of x. By exp(-|t|), so that nothing overflows."""
    e = np.abs(t)
    np.exp(np.negative(e, out=e), out=e)
    x = np.maximum(x, np.finfo(x.dtype).min)  # else -inf * 0
    x *= np.where(x < 0, e, 1)
    e += 1
    return np.divide(x, e, out=e)


def _gelu(x: np.ndarray) -> np.ndarray:
    pole, end, coefficients = NORMAL_TAIL[x.dtype.name]
    a = np.abs(x)
    np.minimum(a, end, out=a)  # keeps NaN
    factor = 1 / (a + x.dtype.type(pole))
    u = a - x.dtype.type(pole)
    u *= factor
    tail = u * x.dtype.type(coefficients[-1])
    for coefficient in coefficients[-2:0:-1]:
        tail += x.dtype.type(coefficient)
        tail *= u
    tail += x.dtype.type(coefficients[0])
    tail *= factor
    tail *= a
    a *= a
    a *= -0.5
    tail *= np.exp(a, out=a)
    return np.subtract(np.maximum(x, 0), tail, out=tail)


ACTIVATIONS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "relu": _relu,
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
    "silu": _silu,
}
