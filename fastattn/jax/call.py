"""The call as JAX sees it: compiled, mapped over batches, differentiated once."""

from __future__ import annotations

from functools import partial
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from .handlers import BACKWARD, FORWARD
from .options import options_of

SECOND = (
    "fastattn.jax.dot_product_attention has no second derivative. jax.nn.dot_product_attention has."
)


@partial(jax.jit, static_argnums=(0, 1))
def attend(options: str, return_lse: bool, operands: tuple[jax.Array, ...]) -> Any:
    """Return out, or (out, lse), for the operands that the options name.

    out : (batch, seqlen_q, heads_q, head_dim), dtype of query
    lse : (batch, heads_q, seqlen_q), as forward() writes it
    """
    return _attend(options, return_lse, operands)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attend(options: str, return_lse: bool, operands: tuple[jax.Array, ...]) -> Any:
    results = _forward(options, return_lse, operands)
    return results if return_lse else results[0]


def _forward(options: str, return_lse: bool, operands: tuple[jax.Array, ...]) -> Any:
    query = operands[0]
    batch, seqlen_q, heads_q, _ = query.shape
    out = jax.ShapeDtypeStruct(query.shape, query.dtype)
    dtype = jnp.promote_types(query.dtype, jnp.float32)
    lse = jax.ShapeDtypeStruct((batch, heads_q, seqlen_q), dtype)
    return _call(FORWARD, (out, lse) if return_lse else (out,), options, operands)


def _backward(options: str, with_bias: bool, operands: tuple[jax.Array, ...]) -> Any:
    like = dict(zip(options_of(options).names, operands[3:], strict=True))
    wanted = ("query", "key", "value", "bias")[: 3 + with_bias]
    results = tuple(jax.ShapeDtypeStruct(like[n].shape, like[n].dtype) for n in wanted)
    return _call(BACKWARD, results, options, operands)


@partial(jax.custom_jvp, nondiff_argnums=(0, 1, 2))
def _call(
    target: str,
    results: tuple[jax.ShapeDtypeStruct, ...],
    options: str,
    operands: tuple[jax.Array, ...],
) -> Any:
    call = jax.ffi.ffi_call(target, results, vmap_method="expand_dims")
    return call(*operands, options=options)


@_call.defjvp
def _second(*arguments: Any) -> NoReturn:
    raise NotImplementedError(SECOND)


def _attend_forward(options: str, return_lse: bool, operands: tuple[Any, ...]) -> Any:
    """Each operand comes with .value and .perturbed: whether its gradient will be used."""
    names = options_of(options).names
    values = tuple(operand.value for operand in operands)
    perturbed = {name for name, o in zip(names, operands, strict=True) if o.perturbed}
    out, lse = _forward(options, True, values)
    # What is saved must be arrays, or structure: an empty tuple stands for True.
    wants_dbias = () if "bias" in perturbed else None
    return (out, lse) if return_lse else out, (values, out, lse, wants_dbias)


def _attend_backward(options: str, return_lse: bool, saved: Any, cotangent: Any) -> tuple[Any]:
    operands, out, lse, wants_dbias = saved
    names = options_of(options).names
    dout = cotangent[0] if return_lse else cotangent
    if isinstance(dout, SymbolicZero):
        return ((None,) * len(names),)
    gradients = dict(
        zip(
            ("query", "key", "value", "bias"),
            _backward(options, wants_dbias is not None, (dout, out, lse, *operands)),
            strict=False,
        )
    )
    return (tuple(gradients.get(name) for name in names),)


_attend.defvjp(_attend_forward, _attend_backward, symbolic_zeros=True)
