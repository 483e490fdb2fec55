"""Gradients of attention(): check the arguments, plan, run the plan, as there."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from . import guards
from .api import attention, attention_varlen
from .arguments import flag
from .check import check_backend
from .check_backward import (
    bias_gradient,
    check_backward,
    check_packed_backward,
    sum_to,
)
from .kinds import array_view, is_device_view, like
from .large_rows import is_ordinary, weights_of_sinks
from .launch import placement_of
from .plan import plan_backward
from .problem import Gradients, Operands, Plan, Problem
from .signatures import passing_keywords_to

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

# Keywords of attention() that make no sense here.
FOREIGN = ("block_table", "return_lse", "out", "backend")


@passing_keywords_to(attention, *FOREIGN)
def attention_backward(
    dout: ArrayLike,
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    out: ArrayLike,
    lse: ArrayLike,
    *,
    dlse: ArrayLike | None = None,
    score_mod_grad: Callable[..., Any] | None = None,
    return_dbias: bool = False,
    return_dsinks: bool = False,
    return_dalibi: bool = False,
    backend: str = "auto",
    **arguments: Any,
) -> tuple[Any, ...]:
    """Return the gradients of a loss by q, k and v, from that by the result of attention().

    Parameters
    ----------
    dout : shape and dtype of out
        The gradient of the loss by out.
    q, k, v : as in attention()
    out, lse : what attention(..., return_lse=True) returned for these arguments
    dlse : shape and dtype of lse
        The gradient by lse, for a loss that depends on it, as after merge(). None for 0.
    score_mod_grad : function (score, b, h, i, j, aux) -> derivative of score_mod by the score
        Default: found from what score_mod does. A kink's slope is one of its two sides', or 0.
    return_dbias, return_dsinks, return_dalibi : bool
        Also return the gradient by bias, sinks or alibi, each in the caller's shape and dtype.
    arguments : scale, causal, align, window, chunk, softcap, bias, mask, alibi, sinks, q_len,
        kv_len, kv_start, score_mod, mask_mod, aux, block_mask, dropout_p and dropout_seed, as in
        the call of attention() that gave out and lse. precision changes nothing: gradients are
        products in the dtype of the arrays.
    backend : "auto", "numpy", "cpu" or "cuda", as in attention()

    Returns
    -------
    dq, dk, dv : shapes and dtype of q, k and v; summed over axes along which one was broadcast
        As all results, of the library of q.
        A pair of a row and a key that it does not see adds nothing, whatever they hold: the
        gradient is 0 for rows that see no key and for keys that no row sees. If a row of q or dout
        holds NaN or infinity, so that there is no gradient, it is NaN for all that this row sees.
    dbias, dsinks, dalibi : in this order, those that were asked for

    Raises
    ------
    As attention(); ValueError if dropout_seed is not given with dropout_p.

    Notes
    -----
    Probabilities are recomputed from lse, sums are in its dtype. Where lse exceeds 1024 either way,
    its rounding has lost digits of the sum: scores are then computed once more to find it. Beyond
    the gradients, memory is O(block_m * block_n) per thread; gradients of half types and of
    broadcast arrays are summed in full arrays first. Two calls give the same bits, whatever the
    number of threads; and so does any place in the batch, but for the sums over a batch.

    References
    ----------
    Dao 2023, FlashAttention-2, arXiv:2307.08691, algorithm 2.
    """
    check_backend(backend)
    wanted = wanted_of(return_dbias, return_dsinks, return_dalibi)
    problem, operands, gradients = check_backward(
        dout,
        q,
        k,
        v,
        out,
        lse,
        dlse=dlse,
        score_mod_grad=score_mod_grad,
        wanted=wanted,
        **arguments,
    )
    run(problem, operands, gradients, backend)
    return tuple(like(q, a) for a in finished(gradients, operands, (q, k, v), wanted, arguments))


@passing_keywords_to(attention_varlen, *FOREIGN)
def attention_varlen_backward(
    dout: ArrayLike,
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    out: ArrayLike,
    lse: ArrayLike,
    cu_seqlens_q: ArrayLike,
    cu_seqlens_k: ArrayLike,
    *,
    dlse: ArrayLike | None = None,
    score_mod_grad: Callable[..., Any] | None = None,
    return_dsinks: bool = False,
    return_dalibi: bool = False,
    backend: str = "auto",
    **arguments: Any,
) -> tuple[Any, ...]:
    """Return the gradients of a loss by q, k and v, from that by attention_varlen()'s result.

    Parameters
    ----------
    dout, out : (tokens_q, heads_q, head_dim_v), dtype of q
    lse, dlse : (heads_q, tokens_q), as attention_varlen() returns lse
    q, k, v, cu_seqlens_q, cu_seqlens_k : as in attention_varlen()
    others : as in attention_backward(), without bias and mask

    Returns
    -------
    dq, dk, dv : shapes and dtype of q, k and v
    dsinks, dalibi : in this order, those that were asked for

    Raises
    ------
    As attention_backward().
    """
    check_backend(backend)
    wanted = wanted_of(False, return_dsinks, return_dalibi)
    problem, operands, gradients = check_packed_backward(
        dout,
        q,
        k,
        v,
        out,
        lse,
        cu_seqlens_q,
        cu_seqlens_k,
        dlse=dlse,
        score_mod_grad=score_mod_grad,
        wanted=wanted,
        **arguments,
    )
    run(problem, operands, gradients, backend)
    views = (a[0].swapaxes(0, 1) for a in (gradients.dq, gradients.dk, gradients.dv))
    main = (np.ascontiguousarray(a, operands.q.dtype) for a in views)
    return tuple(like(q, a) for a in (*main, *_others(gradients, operands, wanted, arguments)))


def run(problem: Problem, operands: Operands, gradients: Gradients, backend: str) -> None:
    """Plan and run. Where there are no scores, the zeros stay."""
    placement = placement_of(operands, backend)
    if placement is not None:  # its rows are those of dout, too
        placement = placement_of(operands._replace(out=gradients.dout), backend)
    chosen = plan_backward(problem, backend, placement)
    if placement is not None:
        _launcher("cuda")(chosen, problem, operands, gradients)
        return
    if gradients.dsinks is not None and not is_ordinary(operands.lse):  # type: ignore[arg-type]
        with np.errstate(all="ignore"):
            weights = weights_of_sinks(operands.sinks, operands.lse)  # type: ignore[arg-type]
        gradients = gradients._replace(sink_weights=weights)
    if problem.batch * problem.heads_q * problem.seqlen_q * problem.seqlen_k:
        launch = _launcher(chosen.backend)
        if guards.ON:
            read, written = ("dout", "dlse"), Gradients._fields[2:]
            with (
                guards.watched(operands, (*guards.INPUTS, "out", "lse"), ()) as twins,
                guards.watched(gradients, read, written, begun=True) as others,
            ):
                launch(chosen, problem, twins, others)
        else:
            launch(chosen, problem, operands, gradients)
    if gradients.dsinks is not None:
        from .gradients import add_sinks

        add_sinks(operands, gradients)


@cache
def _launcher(backend: str) -> Callable[[Plan, Problem, Operands, Gradients], None]:
    """Import and return one backend's run()."""
    if backend == "cpu":
        from .cpu.run_backward import run
    elif backend == "cuda":
        from .cuda.run_backward import run
    else:
        from .gradients import run
    return run


def wanted_of(dbias: bool, dsinks: bool, dalibi: bool) -> tuple[str, ...]:
    """Return which gradients are asked for beside those by q, k and v."""
    pairs = ("dbias", dbias), ("dsinks", dsinks), ("dalibi", dalibi)
    return tuple(name for name, asked in pairs if flag(f"return_{name}", asked))


def finished(
    gradients: Gradients,
    operands: Operands,
    arrays: tuple[Any, ...],
    wanted: tuple[str, ...],
    arguments: dict[str, Any],
) -> tuple[np.ndarray, ...]:
    """Return what attention_backward() does for q, k and v in `arrays`."""
    found = gradients.dq, gradients.dk, gradients.dv
    main = (
        sum_to(a, _shape_of(name, of)).astype(operands.q.dtype, copy=False)
        for a, name, of in zip(found, "qkv", arrays, strict=True)
    )
    return *main, *_others(gradients, operands, wanted, arguments)


def _shape_of(name: str, of: Any) -> tuple[int, ...]:
    """The shape of an array-like, without a view where it can be asked."""
    return of.shape if hasattr(of, "shape") else array_view(name, of).shape


def _others(
    gradients: Gradients, operands: Operands, wanted: tuple[str, ...], arguments: dict[str, Any]
) -> list[np.ndarray]:
    """Return the gradients on demand in the shapes and dtypes of the caller's arrays."""
    found = []
    for name in wanted:
        given = array_view(name[1:], arguments[name[1:]])
        a = getattr(gradients, name)
        if is_device_view(a):
            found.append(a)
            continue
        if name == "dbias":
            a = bias_gradient(a, given.shape)
        elif name == "dalibi":
            lead = operands.alibi.shape[:-1]  # type: ignore[union-attr]
            a = sum_to(a.reshape(*lead, -1), given.shape)
        found.append(a.astype(given.dtype, copy=False))
    return found
