"""What XLA calls: views of its memory in, attention() and attention_backward() on them."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..api import attention
from ..backward import attention_backward
from .frame import register
from .options import Options, band_of, options_of
from .rows import LARGE_NEGATIVE, are_possible, empty_rows

FORWARD, BACKWARD = "fastattn_forward", "fastattn_backward"
# Up to this size a new array is made and copied: calls without `out` are repeated without checks,
# which saves 50 µs (1 x 128 x 4 x 64: 113 against 160), as long as copying 512 KiB takes.
COPIED_BYTES = 2**18


def forward(attribute: bytes, arrays: list[np.ndarray], results: list[np.ndarray]) -> None:
    """Write out and, where asked, lse.

    arrays : as the options name them; axes before JAX's four are those of vmap, 1 or its size
    results : out (..., batch, seqlen_q, heads_q, head_dim), lse (..., batch, heads_q, seqlen_q)
        lse of a row with masked keys alone is LARGE_NEGATIVE, as JAX has it.
    """
    options = options_of(attribute)
    operands = dict(zip(options.names, arrays, strict=True))
    out = results[0].swapaxes(-3, -2)
    q, k, v, arguments = _arguments(options, operands, out.shape[:-3])
    may_be_empty = are_possible(options, q.shape[-2], k.shape[-2])
    if not may_be_empty and len(results) == 1:
        if out.nbytes <= COPIED_BYTES:
            out[...] = attention(q, k, v, **arguments)
        else:
            attention(q, k, v, **arguments, out=out)
        return
    _, lse = attention(q, k, v, **arguments, out=out, return_lse=True)
    if may_be_empty:
        _give_means(options, operands, out, lse)
    if len(results) > 1:
        results[1][...] = lse
        if "query_seq_lengths" in operands and k.shape[-2]:
            lengths = operands["query_seq_lengths"][..., None, None]
            is_padding = np.arange(lse.shape[-1]) >= lengths
            np.copyto(results[1], LARGE_NEGATIVE, where=is_padding)


def backward(attribute: bytes, arrays: list[np.ndarray], results: list[np.ndarray]) -> None:
    """Write dq, dk, dv and, where asked, dbias.

    arrays : dout, out, lse of forward(), then its own
    results : of the shapes of theirs, with the axes of vmap in full: no sums over those
    """
    options = options_of(attribute)
    dout, out, lse, *others = arrays
    operands = dict(zip(options.names, others, strict=True))
    lead = results[0].shape[:-3]
    for name, result in zip(("query", "key", "value"), results, strict=False):
        operands[name] = np.broadcast_to(operands[name], result.shape)
    if len(results) > 3:
        operands["bias"] = np.broadcast_to(operands["bias"], results[3].shape)
    q, k, v, arguments = _arguments(options, operands, lead)
    dout, out = (np.broadcast_to(a, (*lead, *a.shape[-3:])).swapaxes(-3, -2) for a in (dout, out))
    lse = np.broadcast_to(np.where(lse == LARGE_NEGATIVE, -np.inf, lse), out.shape[:-1])
    found = attention_backward(dout, q, k, v, out, lse, **arguments, return_dbias=len(results) > 3)
    for result, gradient in zip(results[:3], found, strict=False):
        result[...] = gradient.swapaxes(-3, -2)
    for result, gradient in zip(results[3:], found[3:], strict=True):
        result[...] = gradient
    _add_gradient_of_means(options, operands, dout, lse, results[2].swapaxes(-3, -2))


def _arguments(
    options: Options, operands: dict[str, np.ndarray], lead: tuple[int, ...]
) -> tuple[np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
    """Return q, k and v, heads first, and the keywords of attention()."""
    q, k, v = (operands[name].swapaxes(-3, -2) for name in ("query", "key", "value"))
    q = np.broadcast_to(q, (*lead, *q.shape[-3:]))  # vmap may have mapped another operand alone
    arguments: dict[str, Any] = {"scale": options.scale}
    for name in ("bias", "mask"):
        if name in operands:
            arguments[name] = operands[name]
    # JAX compares positions with lengths, which may be any numbers.
    if "query_seq_lengths" in operands:
        arguments["q_len"] = np.clip(operands["query_seq_lengths"], 0, q.shape[-2])
    if "key_value_seq_lengths" in operands:
        arguments["kv_len"] = np.clip(operands["key_value_seq_lengths"], 0, k.shape[-2])
    return q, k, v, arguments | band_of(options)


def _give_means(
    options: Options, operands: dict[str, np.ndarray], out: np.ndarray, lse: np.ndarray
) -> None:
    """Write what JAX gives for rows that see no key."""
    v = operands["value"].swapaxes(-3, -2)
    v = np.broadcast_to(v, (*out.shape[:-3], *v.shape[-3:]))
    for (*batch, head), rows, weights in empty_rows(options, operands, lse):
        head_kv = head * v.shape[-3] // out.shape[-3]
        out[(*batch, head, rows)] = weights @ v[(*batch, head_kv)].astype(lse.dtype)
        is_mean = ~np.isnan(weights[:, 0])
        lse[(*batch, head, rows[is_mean])] = LARGE_NEGATIVE


def _add_gradient_of_means(
    options: Options,
    operands: dict[str, np.ndarray],
    dout: np.ndarray,
    lse: np.ndarray,
    dv: np.ndarray,
) -> None:
    """Add what the rows of _give_means() contribute to the gradient of the values, heads first."""
    if not are_possible(options, lse.shape[-1], dv.shape[-2]):
        return
    for (*batch, head), rows, weights in empty_rows(options, operands, lse):
        of_head = dv[(*batch, head * dv.shape[-3] // lse.shape[-2])]
        of_head[...] = of_head + weights.T @ dout[(*batch, head, rows)].astype(lse.dtype)


register(FORWARD, forward)
register(BACKWARD, backward)
