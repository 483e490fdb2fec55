"""The affine map of every projection, and the rules that its callers share."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

FLOATS = (np.dtype(np.float32), np.dtype(np.float64))


def check_float_array(name: str, array: np.ndarray) -> None:
    """Raise TypeError unless array is a NumPy array of float32 or float64."""
    if not isinstance(array, np.ndarray):
        raise TypeError(f"{name} must be a NumPy array, got {type(array).__name__}")
    if array.dtype not in FLOATS:
        raise TypeError(f"{name} must be float32 or float64, got {array.dtype}")


def check_vector(
    name: str, vector: np.ndarray, size: int, dtype: np.dtype, to: str = "weight"
) -> None:
    """Raise unless vector is (size,) of the given dtype, those of the argument `to`."""
    check_float_array(name, vector)
    if vector.shape != (size,):
        raise ValueError(f"{name} must have shape {(size,)} to fit {to}, got {vector.shape}")
    if vector.dtype != dtype:
        raise TypeError(f"{name} must have the dtype of {to}, {dtype}, got {vector.dtype}")


def check_like(name: str, array: np.ndarray, to: str, model: np.ndarray) -> None:
    """Raise unless array has the shape and dtype of model, the argument `to`."""
    if not isinstance(array, np.ndarray):
        raise TypeError(f"{name} must be a NumPy array, got {type(array).__name__}")
    if array.shape != model.shape:
        raise ValueError(f"{name} must have the shape of {to}, {model.shape}, got {array.shape}")
    if array.dtype != model.dtype:
        raise TypeError(f"{name} must have the dtype of {to}, {model.dtype}, got {array.dtype}")


def check_tokens(x: np.ndarray, weight: np.ndarray, name: str = "x") -> None:
    """Raise unless x, called `name`, has the dtype and last dimension of weight (..., features)."""
    check_float_array(name, x)
    if x.dtype != weight.dtype:
        raise TypeError(f"{name} must have the dtype of the weights, {weight.dtype}, got {x.dtype}")
    if x.ndim == 0 or x.shape[-1] != weight.shape[-1]:
        raise ValueError(
            f"{name} must have shape (..., {weight.shape[-1]}) to fit weights of shape "
            f"{weight.shape}, got {x.shape}"
        )


class Record:
    """A dataclass whose repr has shapes in place of arrays, and nothing that is as by default."""

    __slots__ = ()

    def __repr__(self) -> str:
        pairs = ((f, getattr(self, f.name)) for f in fields(self) if f.init)  # type: ignore[arg-type]
        given = (f"{f.name}={_shown(value)}" for f, value in pairs if value is not f.default)
        return f"{type(self).__name__}({', '.join(given)})"


def _shown(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return f"{value.dtype} {value.shape}"
    if isinstance(value, tuple):
        return f"({', '.join(map(_shown, value))})"
    return repr(value)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class LinearWeights(Record):
    """Parameters of linear(): weight (out_features, in_features), bias (out_features,) or None."""

    weight: np.ndarray
    bias: np.ndarray | None = None

    def __post_init__(self) -> None:
        check_float_array("weight", self.weight)
        if self.weight.ndim != 2:
            raise ValueError(
                f"weight must have shape (out_features, in_features), got {self.weight.shape}"
            )
        if self.bias is not None:
            check_vector("bias", self.bias, self.weight.shape[0], self.weight.dtype)


def linear(x: np.ndarray, weights: LinearWeights) -> np.ndarray:
    """Return x @ weight.T + bias.

    Parameters
    ----------
    x : (..., in_features), dtype of the weights
    weights : LinearWeights

    Returns
    -------
    (..., out_features), a new array

    Raises
    ------
    ValueError  x does not fit the weights
    TypeError   dtypes that differ
    """
    check_tokens(x, weights.weight)
    out_features, in_features = weights.weight.shape
    # One matrix product over all tokens: matmul would call BLAS once per leading index.
    y = x.reshape(math.prod(x.shape[:-1]), in_features) @ weights.weight.T
    if weights.bias is not None:
        y += weights.bias
    return y.reshape(*x.shape[:-1], out_features)


def stack_linear(*parts: LinearWeights) -> LinearWeights:
    """Return one map whose features are those of all parts, one after another: one product.

    Parameters
    ----------
    parts : LinearWeights of the same in_features; those without a bias get one of zeros if others
        have one. Copied.

    Raises
    ------
    ValueError  other in_features
    TypeError   dtypes that differ
    """
    first = parts[0].weight
    for n, part in enumerate(parts):
        if part.weight.shape[1] != first.shape[1]:
            raise ValueError(
                f"parts[{n}] must have {first.shape[1]} in_features, as parts[0], "
                f"got shape {part.weight.shape}"
            )
        if part.weight.dtype != first.dtype:
            raise TypeError(
                f"parts[{n}] must have the dtype of parts[0], {first.dtype}, "
                f"got {part.weight.dtype}"
            )
    bias = None
    if any(part.bias is not None for part in parts):
        zeros = (np.zeros(len(part.weight), first.dtype) for part in parts)
        pairs = zip(parts, zeros, strict=True)
        bias = np.concatenate([zero if part.bias is None else part.bias for part, zero in pairs])
    return LinearWeights(np.concatenate([part.weight for part in parts]), bias)
