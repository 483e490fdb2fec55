"""The rules of attention_backward()'s own arguments, and the arrays that take the gradients."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided

from .arrays import NAMES, canonical, check_places, float_name
from .check import check, check_packed
from .kinds import array_view, is_device_view, new_array
from .problem import Gradients, Operands, Problem

RETURNS = ("dbias", "dsinks", "dalibi")  # on demand, in this order


def check_backward(
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    *,
    dlse: Any = None,
    score_mod_grad: Any = None,
    wanted: tuple[str, ...] = (),
    **arguments: Any,
) -> tuple[Problem, Operands, Gradients]:
    """Return what check() does, with the caller's out and lse, and zeros that take the gradients.

    `wanted` are those of RETURNS. Raises as check() does.
    """
    problem, operands, dout, dlse = check_operands(
        dout, q, k, v, out, lse, dlse, score_mod_grad, wanted, arguments
    )
    return problem, operands, _gradients(problem, operands, dout, dlse, wanted, arguments)


def check_operands(
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    dlse: Any,
    score_mod_grad: Any,
    wanted: tuple[str, ...],
    arguments: dict[str, Any],
) -> tuple[Problem, Operands, np.ndarray, np.ndarray | None]:
    """Return (problem, operands, dout, dlse) of check_backward(), and allocate nothing."""
    _check_wanted(wanted, arguments)
    # Lengths are never folded into views: then all arrays that take gradients have the sizes of k.
    q, k, v = map(array_view, NAMES, (q, k, v))
    problem, operands = check(q, k, v, **arguments, fold=False, results=False)
    rank_2 = operands.q.ndim == 3 and np.ndim(q) == np.ndim(k) == np.ndim(v) == 2
    given = operands.out.shape[1:] if rank_2 else operands.out.shape
    results = dout, out, lse, dlse
    dout, out, lse, dlse = _results(operands.q, results, given, given[:-1], problem)
    if rank_2:
        dout, out, lse = dout[None], out[None], lse[None]
        dlse = None if dlse is None else dlse[None]
    operands = operands._replace(out=out, lse=lse)
    return _with_slopes(problem, operands, score_mod_grad), operands, dout, dlse


def check_packed_backward(
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    *,
    dlse: Any = None,
    score_mod_grad: Any = None,
    wanted: tuple[str, ...] = (),
    **arguments: Any,
) -> tuple[Problem, Operands, Gradients]:
    """Return what check_packed() does, likewise, for attention_varlen_backward()."""
    _check_wanted(wanted, arguments)
    q, k, v = map(array_view, NAMES, (q, k, v))
    problem, operands = check_packed(q, k, v, cu_seqlens_q, cu_seqlens_k, **arguments)
    _, heads_q, tokens, head_dim_v = operands.out.shape
    shapes = (tokens, heads_q, head_dim_v), (heads_q, tokens)
    dout, out, lse, dlse = _results(operands.q, (dout, out, lse, dlse), *shapes, problem)
    dout, out = (a.swapaxes(0, 1)[None] for a in (dout, out))
    lse, dlse = lse[None], None if dlse is None else dlse[None]
    operands = operands._replace(out=out, lse=lse)
    problem = _with_slopes(problem, operands, score_mod_grad)
    return problem, operands, _gradients(problem, operands, dout, dlse, wanted, arguments)


def _check_wanted(wanted: tuple[str, ...], arguments: dict[str, Any]) -> None:
    for name in wanted:
        if arguments.get(name[1:]) is None:
            raise ValueError(f"{name[1:]} must be given with return_{name}=True, got None")
    if arguments.get("dropout_p") and arguments.get("dropout_seed") is None:
        raise ValueError("dropout_seed must be the forward pass's with dropout_p > 0, got None")


def _results(
    q: np.ndarray,
    arrays: tuple[Any, ...],
    shape: tuple[int, ...],
    rows: tuple[int, ...],
    problem: Problem,
) -> list[Any]:
    """Return dout, out, lse and dlse as canonical arrays in the memory of q; the last may be
    None.
    """
    storage, dtype = problem.variant.storage, problem.variant.dtype
    whole, per_row = (shape, storage), (rows, dtype)
    rules = ("dout", *whole), ("out", *whole), ("lse", *per_row), ("dlse", *per_row)
    found: list[Any] = []
    for value, (name, wanted, kind) in zip(arrays, rules, strict=True):
        if value is None and name == "dlse":
            found.append(None)
            continue
        a = array_view(name, value)
        if float_name(a.dtype) != kind:
            raise TypeError(f"{name} must be {kind}, got {a.dtype}")
        if a.shape != wanted:
            raise ValueError(f"{name} must have shape {wanted}, got {a.shape}")
        found.append(canonical(a))
    check_places(NAMES, q, zip(("dout", "out", "lse", "dlse"), found, strict=True))
    return found


def _with_slopes(problem: Problem, operands: Operands, score_mod_grad: Any) -> Problem:
    """Return the problem with the derivative of its score_mod, if that is not 1 everywhere."""
    variant = problem.variant
    if variant.score_mod is None:
        if score_mod_grad is not None:
            raise ValueError("score_mod must be given with score_mod_grad, got None")
        return problem
    # Here, and not at the top: only calls with modifiers should wait for tracing.
    from .derivative import derivative, is_one
    from .modifier import aux_types
    from .trace import traced

    if score_mod_grad is None:
        slopes = derivative(variant.score_mod)
    else:
        slopes = traced(score_mod_grad, "score_mod_grad", aux_types(operands.score_aux))
    if is_one(slopes):
        return problem
    return replace(problem, variant=replace(variant, score_mod_grad=slopes))


def _gradients(
    problem: Problem,
    operands: Operands,
    dout: np.ndarray,
    dlse: np.ndarray | None,
    wanted: tuple[str, ...],
    arguments: dict[str, Any],
) -> Gradients:
    """Return zeros for what is wanted, in the dtype that is computed in; on a GPU, memory without
    contents in the dtype of the results.
    """
    dtype = problem.variant.dtype
    if is_device_view(operands.q):
        return _device_gradients(operands, dout, dlse, wanted, arguments)
    dq, dk, dv = (_zeros_in_order_of(a, dtype) for a in operands[:3])
    dbias = dalibi = dsinks = None
    if "dbias" in wanted and operands.bias is not None:
        own = np.zeros(np.shape(arguments["bias"]), dtype)
        dbias = _in_steps_of(own, operands.bias)
    if "dalibi" in wanted:
        dalibi = np.zeros((problem.batch, problem.heads_q), dtype)
    if "dsinks" in wanted:
        dsinks = np.zeros(problem.heads_q, dtype)
    return Gradients(dout, dlse, dq, dk, dv, dbias, dalibi, dsinks)


def _zeros_in_order_of(a: np.ndarray, dtype: str) -> np.ndarray:
    """Return zeros of the shape of `a`, whose axes lie as its own if its rows are dense: where it
    is a transposed view, as of tokens before heads, its gradient is transposed back without a copy.
    """
    in_order = gives_its_order(a.shape, a.strides, a.itemsize)
    return np.zeros_like(a, dtype, order="K" if in_order else "C")


def gives_its_order(shape: Any, strides: Any, step: int) -> bool:
    """Whether the axes of the gradient by an array lie as its own: if the elements of its rows are
    one `step` apart, and no axis is broadcast.
    """
    pairs = zip(strides, shape, strict=True)
    return strides[-1] == step and all(stride != 0 or size < 2 for stride, size in pairs)


def _device_gradients(
    operands: Operands,
    dout: np.ndarray,
    dlse: np.ndarray | None,
    wanted: tuple[str, ...],
    arguments: dict[str, Any],
) -> Gradients:
    q, packed = operands.q, operands.starts is not None
    found: dict[str, Any] = dict.fromkeys(RETURNS)
    for name, a in zip(NAMES, operands[:3], strict=False):
        if any(stride == 0 and size > 1 for stride, size in zip(a.strides, a.shape, strict=True)):
            rule = f"{name} of a GPU must not be broadcast for gradients"
            raise ValueError(f"{rule}, got strides {a.strides}. Copy it, and sum its gradient.")
        *lead, heads, rows, width = a.shape
        if packed:  # as the caller has them: tokens first
            own = new_array(q, (*lead, rows, heads, width), a.dtype).swapaxes(-3, -2)
        else:
            own = new_array(q, a.shape, a.dtype)
        found["d" + name] = own
    for name in wanted:  # as the caller has them: what is shared is summed by the kernels
        given = array_view(name[1:], arguments[name[1:]])
        found[name] = new_array(q, given.shape, given.dtype)
    return Gradients(dout, dlse, **found)


def _in_steps_of(own: np.ndarray, scores: np.ndarray) -> np.ndarray:
    """Return a view of `own` in the shape of `scores`, which broadcasts an array of its shape."""
    pairs = zip(own.strides, own.shape, strict=True)
    strides = [0] * (scores.ndim - own.ndim) + [stride if size > 1 else 0 for stride, size in pairs]
    return as_strided(own, scores.shape, strides)


def sum_to(a: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Return `a` summed over the axes along which an array of `shape` was broadcast to it."""
    extra = a.ndim - len(shape)
    axes = tuple(range(extra))
    axes += tuple(extra + n for n, size in enumerate(shape) if size == 1 and a.shape[extra + n] > 1)
    return (a.sum(axis=axes, keepdims=True) if axes else a).reshape(shape)


def bias_gradient(dbias: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Return the array of `shape` behind Gradients.dbias."""
    pairs = zip(dbias.strides, dbias.shape, strict=True)
    return dbias[tuple(slice(1 if stride == 0 else size) for stride, size in pairs)].reshape(shape)
