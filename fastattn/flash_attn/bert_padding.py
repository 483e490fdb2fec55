"""flash_attn.bert_padding: from padded batches to packed tokens and back.

Arrays of NumPy and tensors of torch alike; gradients go through, as only indexing is done.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..arrays import integers
from ..errors import raising_argument_errors
from ..kinds import is_tensor, like, numpy_view


@raising_argument_errors()
def index_first_axis(x: Any, indices: Any) -> Any:
    """Return x[indices] of x (rows, ...), for indices (count,) from 0 to rows - 1."""
    x = _array("x", x, 1)
    return x[_index(x, indices, x.shape[0])]


@raising_argument_errors()
def index_put_first_axis(values: Any, indices: Any, first_axis_dim: int) -> Any:
    """Return (first_axis_dim, ...), values (count, ...) at these indices and 0 elsewhere."""
    values = _array("values", values, 1)
    at = _index(values, indices, first_axis_dim)
    if len(at) != values.shape[0]:
        rule = "indices must have one for each row of values"
        raise ValueError(f"{rule}, got {len(at)} and {values.shape[0]}")
    shape = (first_axis_dim, *values.shape[1:])
    found = values.new_zeros(shape) if is_tensor(values) else np.zeros(shape, values.dtype)
    found[at] = values
    return found


@raising_argument_errors()
def unpad_input(
    hidden_states: Any, attention_mask: Any, unused_mask: Any = None
) -> tuple[Any, Any, Any, int, Any]:
    """Return the tokens of a padded batch one after another, and where they were.

    Parameters
    ----------
    hidden_states : (batch, seqlen, ...)
    attention_mask : (batch, seqlen) bool or ints, 0 where there is no token
    unused_mask : (batch, seqlen) likewise: places that are kept though they hold no token

    Returns
    -------
    hidden_states : (tokens, ...), those of either mask
    indices : (tokens,) int64, their places in a batch of (batch * seqlen,)
    cu_seqlens : (batch + 1,) int32
    max_seqlen_in_batch : int
    seqused : (batch,) int32: tokens of attention_mask
    """
    x = _array("hidden_states", hidden_states, 2)
    used = _mask("attention_mask", attention_mask, x.shape[:2])
    kept = used if unused_mask is None else used | _mask("unused_mask", unused_mask, x.shape[:2])
    lengths, indices = kept.sum(axis=1), np.flatnonzero(kept)
    edges = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    rows = x.reshape(-1, *x.shape[2:])
    at = like(x, indices)
    numbers = (like(x, a) for a in (edges, used.sum(axis=1).astype(np.int32)))
    cu_seqlens, seqused = numbers
    return rows[at], at, cu_seqlens, int(lengths.max(initial=0)), seqused


@raising_argument_errors()
def pad_input(hidden_states: Any, indices: Any, batch: int, seqlen: int) -> Any:
    """Return (batch, seqlen, ...), 0 where there is no token: what unpad_input() took apart."""
    found = index_put_first_axis(hidden_states, indices, batch * seqlen)
    return found.reshape(batch, seqlen, *found.shape[1:])


def _array(name: str, x: Any, rank: int) -> Any:
    """Return a tensor as it is, anything else as an array of NumPy."""
    x = x if is_tensor(x) else numpy_view(name, x)
    if x.ndim < rank:
        raise ValueError(f"{name} must have rank {rank} or more, got shape {tuple(x.shape)}")
    return x


def _index(x: Any, indices: Any, rows: int) -> Any:
    at = integers("indices", "ints with one axis", indices)
    if at.ndim != 1:
        raise ValueError(f"indices must be ints with one axis, got shape {at.shape}")
    if at.size and not 0 <= at.min() <= at.max() < rows:
        rule = f"indices must lie between 0 and {rows - 1}"
        raise ValueError(f"{rule}, got {at.min()} to {at.max()}")
    return like(x, at.astype(np.int64)) if is_tensor(x) else at


def _mask(name: str, mask: Any, shape: tuple[int, ...]) -> np.ndarray:
    mask = numpy_view(name, mask)
    if mask.dtype.kind not in "biu":
        raise TypeError(f"{name} must be bool or ints, got {mask.dtype}")
    if mask.shape != tuple(shape):
        raise ValueError(f"{name} must have shape {tuple(shape)}, got {mask.shape}")
    return mask != 0
