"""flash_attn.layers.rotary: the function that turns queries and keys."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...arguments import cumulative_of, flag, per_batch
from ...arrays import canonical
from ...errors import raising_argument_errors
from ...kinds import is_tensor, like, numpy_view
from ..rotation import angles_at, check_tables, turned

ANY = 2**40  # offsets are only bounded by the tables


@raising_argument_errors()
def apply_rotary_emb(
    x: Any,
    cos: Any,
    sin: Any,
    interleaved: bool = False,
    inplace: bool = False,
    seqlen_offsets: Any = 0,
    cu_seqlens: Any = None,
    max_seqlen: int | None = None,
) -> Any:
    """Return x with its first features turned, as flash_attn's apply_rotary_emb does.

    Parameters
    ----------
    x : (batch, seqlen, heads, head_dim), or with cu_seqlens (tokens, heads, head_dim)
        NumPy array or tensor of torch in the memory of the CPU, and so are all others.
    cos, sin : (positions, rotary_dim / 2), dtype of x; rotary_dim <= head_dim
    interleaved : bool. Pairs are features (2t, 2t + 1), not (t, t + rotary_dim / 2).
    inplace : bool. Write to x, and return it.
    seqlen_offsets : int, or (batch,) ints: the position of each first token
    cu_seqlens : (batch + 1,) ints: where members begin, from 0 to the number of tokens
    max_seqlen : ignored: cu_seqlens say it.

    Returns
    -------
    array like x, C-contiguous; x itself if inplace

    Raises
    ------
    ArgumentError, ArgumentTypeError   as flash_attn_func()

    Notes
    -----
    Computed in float32, or float64 for float64, and rounded once. A gradient is not recorded: a
    tensor that needs one is refused.
    """
    array = numpy_view("x", x)
    axes = "(batch, seqlen, heads, head_dim)" if cu_seqlens is None else "(tokens, heads, head_dim)"
    if array.ndim != (4 if cu_seqlens is None else 3):
        raise ValueError(f"x must have shape {axes}, got {array.shape}")
    if flag("inplace", inplace):
        _check_writeable(x, array)
    positions = _positions(array, seqlen_offsets, cu_seqlens)
    tables = numpy_view("cos", cos), numpy_view("sin", sin)
    check_tables(array, *tables)
    angles = angles_at(*tables, positions)
    found = turned(array, angles, flag("interleaved", interleaved))
    if not inplace:
        return like(x, found)
    array[...] = found
    return x


def _positions(x: np.ndarray, seqlen_offsets: Any, cu_seqlens: Any) -> np.ndarray:
    """Return the position of each token, of the shape of x before the heads."""
    if cu_seqlens is None:
        batch, seqlen = x.shape[:2]
        offsets = per_batch("seqlen_offsets", seqlen_offsets, (batch,), 0, ANY)
        return np.broadcast_to(offsets, (batch,))[:, None] + np.arange(seqlen)
    edges = cumulative_of("cu_seqlens", cu_seqlens, len(x))
    batch = len(edges) - 1
    offsets = np.broadcast_to(
        per_batch("seqlen_offsets", seqlen_offsets, (batch,), 0, ANY), (batch,)
    )
    return np.arange(len(x)) + np.repeat(offsets - edges[:-1], np.diff(edges))


def _check_writeable(x: Any, array: np.ndarray) -> None:
    if not isinstance(x, np.ndarray) and not is_tensor(x):
        rule = "x must be an array of NumPy or a tensor, to be written"
        raise TypeError(f"{rule}, got {type(x).__name__}")
    if not array.flags.writeable or canonical(array) is not array:
        rule = "x must be writeable, native and aligned"
        raise ValueError(f"{rule}, got {array.dtype} with strides {array.strides}")


apply_rotary_emb_func = apply_rotary_emb  # flash_attn's older name
