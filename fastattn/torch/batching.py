"""The operators under torch.vmap: the axis that it adds becomes the first of the batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .call import ON_DEMAND, TENSORS, Call

# Axes of a tensor beside the batch: of a rank of 4, so many less.
FEWER = {"q": 0, "k": 0, "v": 0, "bias": 0, "mask": 0, "alibi": 2}
FEWER |= dict.fromkeys(("q_len", "kv_len", "kv_start", "offset"), 3)


def batched_forward(info: Any, in_dims: Any, *arguments: Any) -> Any:
    """The rule of torch.ops.fastattn.attention: ((out, lse), their axes)."""
    call, rank = _at_front(arguments, in_dims, info.batch_size)
    found = torch.ops.fastattn.attention(*call)
    return tuple(t[:, 0] if rank == 2 else t for t in found), (0, 0)


def batched_backward(
    info: Any,
    in_dims: Any,
    dout: Any,
    dlse: Any,
    out: Any,
    lse: Any,
    *others: Any,
) -> Any:
    """The rule of torch.ops.fastattn.attention_backward: (gradients, their axes)."""
    size = info.batch_size
    *arguments, wanted = others
    call, rank = _at_front(arguments, in_dims[4:-1], size)
    if wanted[ON_DEMAND.index("sinks")]:
        raise NotImplementedError("the gradient of sinks cannot be taken under vmap")
    rows = max(rank, 3)
    results = zip((dout, dlse, out, lse), in_dims, (rows, rows - 1) * 2, strict=False)
    front = [_front(t, axis, size, ndim) for t, axis, ndim in results]
    found = torch.ops.fastattn.attention_backward(*front, *call, wanted)
    names = ["q", "k", "v", *(n for n, want in zip(ON_DEMAND, wanted, strict=True) if want)]
    shapes = {name: _logical_shape(t, axis) for name, t, axis in _named(arguments, in_dims[4:-1])}
    gradients = [g.reshape(size, *shapes[n]) for n, g in zip(names, found, strict=True)]
    return gradients, [0] * len(gradients)


def _at_front(arguments: Sequence[Any], in_dims: Any, size: int) -> tuple[Call, int]:
    """Return the call with an axis of `size` in front of every tensor, and the rank that q, k and v
    had without it.
    """
    call = Call(*arguments)
    named = list(_named(arguments, in_dims))
    rank = max(len(_logical_shape(t, axis)) for name, t, axis in named if name in ("q", "k", "v"))
    front: dict[str, Any] = {
        name: _front(t, axis, size, max(rank, 3) - FEWER[name])
        for name, t, axis in named
        if name in FEWER
    }
    axes = {name: axis for name, _, axis in named}
    if axes.get("sinks") is not None:
        raise NotImplementedError("sinks must be the same for all members of a vmap")
    if call.dropout_seed is not None:
        if axes["dropout_seed"] is None:
            raise NotImplementedError("dropout under vmap needs randomness='different'")
        # One seed does: what it drops depends on the place in the batch.
        front["dropout_seed"] = call.dropout_seed.movedim(axes["dropout_seed"], 0)[0]
    return call._replace(**front), rank


def _named(arguments: Sequence[Any], in_dims: Any) -> Any:
    """(name, tensor, vmap's axis of it or None) of the tensors that are given."""
    given = zip(Call._fields[:TENSORS], arguments, in_dims, strict=False)
    return (entry for entry in given if entry[1] is not None)


def _logical_shape(t: Tensor, axis: int | None) -> tuple[int, ...]:
    """The shape that the function under vmap sees."""
    return tuple(size for n, size in enumerate(t.shape) if n != axis)


def _front(t: Tensor | None, axis: int | None, size: int, ndim: int) -> Tensor | None:
    """Return `t` of `ndim` axes, as vmap's function sees it, behind one of `size`."""
    if t is None:
        return None
    t = t.expand(size, *t.shape) if axis is None else t.movedim(axis, 0)
    return t[(slice(None), *[None] * (ndim + 1 - t.ndim))]
