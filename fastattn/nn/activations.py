"""Activations of the per-token network: elementwise, any shape and strides, in place if asked."""

from __future__ import annotations

import math
from functools import cache

import numpy as np
from numpy.polynomial import Chebyshev, Polynomial

from .linear import check_float_array

BLOCK = 16384  # elements per step: five float32 rows stay in L2, and calls cost little beside them
POLE = (
    2.5  # t = z / (z + POLE) takes [0, inf) to [0, 1); 2.5 needs the fewest terms for both dtypes
)
DEGREE = {np.dtype(np.float32): 9, np.dtype(np.float64): 20}  # more terms gain no more digits
UNDERFLOW = {np.dtype(np.float32): 10.3, np.dtype(np.float64): 27.3}  # exp(-z * z) is 0 from here
FIT_END = 26.0  # math.erfc is subnormal from 26.5, math.exp(z * z) infinite from 26.7


def relu(x: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
    """Return max(x, 0), NaN where x is NaN. out may be x itself."""
    return np.maximum(x, 0, out=out)


def gelu(x: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
    """Return x * Phi(x), Phi the distribution function of the standard normal: the erf form.

    Parameters
    ----------
    x : float32 or float64, any shape
    out : array like x, written in place; may be x itself.

    Returns
    -------
    array like x

    Raises
    ------
    ValueError  out has another shape
    TypeError   x or out has another dtype

    Notes
    -----
    gelu(x) = max(x, 0) - |x| erfc(z) / 2 at z = |x| / sqrt(2), and
    erfc(z) = exp(-z²) h / (z + POLE) with a polynomial for the smooth factor h. So nothing cancels
    in the negative tail, where x * (1 + erf(x / sqrt(2))) / 2 loses all its digits. Relative error
    for x > -1: below 2 float32 eps (24 float64 eps); further down x² eps more, from exp.

    References
    ----------
    Hendrycks and Gimpel 2016, Gaussian Error Linear Units, arXiv:1606.08415.
    """
    check_float_array("x", x)
    out = np.empty_like(x) if out is None else out
    if out.shape != x.shape:
        raise ValueError(f"out must have the shape of x, {x.shape}, got {out.shape}")
    if out.dtype != x.dtype:
        raise TypeError(f"out must have the dtype of x, {x.dtype}, got {out.dtype}")
    scratch = np.empty((3, BLOCK), x.dtype)
    blocks = np.nditer(
        [x, out],
        flags=["external_loop", "buffered", "zerosize_ok"],
        op_flags=[["readonly"], ["writeonly"]],
        buffersize=BLOCK,
    )
    with blocks, np.errstate(under="ignore"):
        for x_block, out_block in blocks:
            _gelu_block(x_block, out_block, scratch[:, : x_block.size])
    return out


def _gelu_block(x: np.ndarray, out: np.ndarray, scratch: np.ndarray) -> None:
    """gelu of one block (n,). scratch (3, n) is overwritten; out may be x."""
    z, t, tail = scratch
    coefficients = _tail_polynomial(x.dtype)
    np.abs(x, out=z)
    z *= math.sqrt(0.5)
    np.minimum(z, UNDERFLOW[x.dtype], out=z)  # also keeps inf / inf out; NaN passes
    np.add(z, POLE, out=t)
    np.divide(z, t, out=t)
    np.multiply(t, coefficients[-1], out=tail)
    for coefficient in coefficients[-2:0:-1]:
        tail += coefficient
        tail *= t
    tail += coefficients[0]
    tail *= t  # |x| erfc(z) / 2 but for the exponential
    np.multiply(z, z, out=z)
    np.negative(z, out=z)
    tail *= np.exp(z, out=z)
    np.maximum(x, 0, out=out)
    out -= tail


@cache
def _tail_polynomial(dtype: np.dtype) -> np.ndarray:
    """Coefficients (terms, 1) in t, constant term first, of sqrt(1/2) exp(z²) erfc(z) (z + POLE).

    From Chebyshev interpolation over the z that the dtype needs; none is larger than 5. A column,
    because NumPy takes an array of one element 0.5 µs faster than a Python float.
    """

    def smooth_factor(t: np.ndarray) -> np.ndarray:
        z = POLE * t / (1 - t)
        return np.array([math.sqrt(0.5) * _scaled_erfc(zi) * (zi + POLE) for zi in z])

    end = min(UNDERFLOW[dtype], FIT_END)
    fit = Chebyshev.interpolate(smooth_factor, DEGREE[dtype], domain=[0, end / (end + POLE)])
    return fit.convert(kind=Polynomial).coef.astype(dtype)[:, None]


def _scaled_erfc(z: float) -> float:
    """exp(z²) * erfc(z), with z² split so that the exponential does not blow up its rounding."""
    head = float(np.float32(z))  # its square is exact
    return math.exp(head * head) * math.exp((z - head) * (z + head)) * math.erfc(z)
