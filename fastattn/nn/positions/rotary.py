"""Rotation of pairs of features by angles that grow with the position."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..compiled import compiled
from ..linear import Record, check_float_array


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Rotation(Record):
    """The angles of some tokens: what Rope.rotation() returns and apply_rotary() takes.

    cos, sin : (tokens, rotary_dim / 2), the attention factor multiplied in; leading axes broadcast
    interleaved : pairs are features (2t, 2t + 1), not (t, t + rotary_dim / 2)
    """

    cos: np.ndarray
    sin: np.ndarray
    interleaved: bool = False

    def apply(
        self, x: np.ndarray, *, out: np.ndarray | None = None, backend: str = "auto"
    ) -> np.ndarray:
        """Return apply_rotary() of x (..., tokens, head_dim); out may be x itself."""
        return apply_rotary(
            x, self.cos, self.sin, interleaved=self.interleaved, out=out, backend=backend
        )


def apply_rotary(
    x: np.ndarray,
    cos: np.ndarray,
    sin: np.ndarray,
    *,
    interleaved: bool = False,
    out: np.ndarray | None = None,
    backend: str = "auto",
) -> np.ndarray:
    """Return x with each pair (x1, x2) turned: (x1 cos - x2 sin, x2 cos + x1 sin).

    Parameters
    ----------
    x : (..., tokens, head_dim) float32 or float64
        Queries or keys, with the heads before the tokens.
    cos, sin : (tokens, rotary_dim / 2), dtype of x
        Of each token's angles. Leading axes broadcast to those of x. Only the first rotary_dim
        features of a head are turned.
    interleaved : bool
        Pairs are features (2t, 2t + 1), as in GPT-J and in GGUF files of Llama models; else they
        are (t, t + rotary_dim / 2), as in GPT-NeoX and in Hugging Face's Llama.
    out : array like x, written in place; may be x itself, else must not overlap it.
    backend : "auto", "numpy" or "cpu", as in fastattn.attention. Both give the same bits.

    Returns
    -------
    array like x. An element does not depend, bit for bit, on what else is in x.

    Raises
    ------
    ValueError   shapes that do not fit together
    TypeError    dtypes that differ
    ImportError  backend="cpu" and no compiler is installed

    References
    ----------
    Su et al. 2021, RoFormer, arXiv:2104.09864, equation 34.
    """
    rotary_dim = _check_rotary(x, cos, sin)
    fresh = out is None
    if out is None:
        out = np.empty(x.shape, x.dtype)
    else:
        _check_out(x, out)
    function = "rotary_interleaved" if interleaved else "rotary_halves"
    run = compiled(function, x.dtype, backend)
    if run is not None:
        run(function, out, x, cos, sin, pairs=rotary_dim // 2, fresh=fresh)
        return out
    x1, x2 = _pairs(x, rotary_dim, interleaved)
    out1, out2 = _pairs(out, rotary_dim, interleaved)
    with np.errstate(all="ignore"):  # infinities go where they go, as in the kernel
        turned1, turned2 = x1 * cos, x2 * cos
        turned1 -= x2 * sin
        turned2 += x1 * sin
    out[..., rotary_dim:] = x[..., rotary_dim:]
    out1[...], out2[...] = turned1, turned2
    return out


def turned(
    x: np.ndarray, cos: np.ndarray, sin: np.ndarray, *, interleaved: bool, backend: str = "auto"
) -> np.ndarray:
    """Return apply_rotary() of x of any dtype, computed in that of cos and rounded once."""
    x_wide = x.astype(cos.dtype, copy=False)
    y = apply_rotary(x_wide, cos, sin, interleaved=interleaved, backend=backend)
    with np.errstate(over="ignore"):
        return y.astype(x.dtype, copy=False)


def _pairs(x: np.ndarray, rotary_dim: int, interleaved: bool) -> tuple[np.ndarray, np.ndarray]:
    """Views (..., tokens, rotary_dim / 2) of the first and second features of the pairs."""
    if interleaved:
        return x[..., 0:rotary_dim:2], x[..., 1:rotary_dim:2]
    return x[..., : rotary_dim // 2], x[..., rotary_dim // 2 : rotary_dim]


def _check_rotary(x: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> int:
    """Return rotary_dim, or raise."""
    for name, array in (("x", x), ("cos", cos), ("sin", sin)):
        check_float_array(name, array)
        if array.dtype != x.dtype:
            raise TypeError(f"{name} must have the dtype of x, {x.dtype}, got {array.dtype}")
        if array.ndim < 2:
            raise ValueError(f"{name} must have shape (..., tokens, features), got {array.shape}")
    if cos.shape != sin.shape:
        raise ValueError(f"cos and sin must have the same shape, got {cos.shape} and {sin.shape}")
    wide = 2 * cos.shape[-1]
    if wide > x.shape[-1]:
        raise ValueError(
            f"cos must have at most half the width of x, {x.shape}, got shape {cos.shape}"
        )
    rows = x.shape[:-1]
    given = cos.shape[:-1]
    fits = len(given) <= len(rows) and all(
        size in (1, wanted) for size, wanted in zip(given[::-1], rows[::-1], strict=False)
    )
    if not fits:
        raise ValueError(f"cos must have a row for each token of x, {x.shape}, got {cos.shape}")
    return wide


def _check_out(x: np.ndarray, out: np.ndarray) -> None:
    check_float_array("out", out)
    if out.shape != x.shape:
        raise ValueError(f"out must have the shape of x, {x.shape}, got {out.shape}")
    if out.dtype != x.dtype:
        raise TypeError(f"out must have the dtype of x, {x.dtype}, got {out.dtype}")
    if not out.flags.writeable:
        raise ValueError("out must be writeable, got a read-only array")
    same = (
        out.strides == x.strides
        and out.__array_interface__["data"] == x.__array_interface__["data"]
    )
    if not same and np.may_share_memory(out, x) and np.shares_memory(out, x):
        raise ValueError("out must be x or not overlap it, got arrays that share memory")
