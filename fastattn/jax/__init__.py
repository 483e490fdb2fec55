"""JAX's attention, computed by fastattn: `from fastattn.jax import dot_product_attention`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..optional import missing

try:
    import jax
except ModuleNotFoundError as error:
    raise missing("fastattn.jax", "jax", "'fastattn[jax]'") from error
if jax.__version_info__ < (0, 8, 3):  # jax.nn then means something else by windows and lengths
    raise ImportError(
        f"fastattn.jax needs jax 0.8.3 or newer, got {jax.__version__}: "
        "pip install --upgrade jax, on Python 3.11 or newer"
    )

from ..arguments import flag
from .arguments import (
    bias_of,
    lengths_of,
    mask_of,
    operands_of,
    options_with,
    scaled,
)
from .call import attend
from .options import text_of

if TYPE_CHECKING:
    from jax.typing import ArrayLike

__all__ = ["dot_product_attention"]


def dot_product_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    *,
    scale: Any = None,
    is_causal: bool = False,
    query_seq_lengths: ArrayLike | None = None,
    key_value_seq_lengths: ArrayLike | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    implementation: None = None,
    return_residual: bool = False,
) -> Any:
    """Return what jax.nn.dot_product_attention returns, for arrays on the CPU.

    Works under jit, vmap (one call for the whole batch), grad, checkpoint and scan.

    Parameters
    ----------
    query : (batch, seqlen_q, heads_q, head_dim) float16, bfloat16, float32 or float64
        The batch axis may be missing, here and below.
    key, value : (batch, seqlen_k, heads_kv, head_dim), dtype of query; heads_kv divides heads_q.
    bias : numbers, broadcastable to (batch, heads_q, seqlen_q, seqlen_k), added to the scores
    mask : bool, broadcastable likewise. True = may attend.
    scale : finite number, or an array without axes inside jit. Default head_dim ** -0.5.
    is_causal : bool
        Row i sees keys j <= i: **top-left** alignment.
    query_seq_lengths, key_value_seq_lengths : (batch,) int32
        Rows from the first on are 0; keys from the second on are masked.
    local_window_size : (left, right), or an int for both
        Row i sees keys i - left <= j <= i + right; negative numbers shift the window.
    implementation : None. JAX's own, "xla" and "cudnn", are in JAX.
    return_residual : bool

    Returns
    -------
    out : shape and dtype of query
        A row whose keys are all masked is the mean of the values of all, as in JAX.
    residual : (batch, seqlen_q, heads_q), dtype of query. Only if return_residual.
        Natural log of the sum of exp(score); -0.7 * the largest float32 for such a row. It has no
        gradient.

    Raises
    ------
    ValueError   shapes, dtypes or values that do not fit together
    TypeError    dtypes that are not supported
    NotImplementedError   when a gradient is differentiated again

    Notes
    -----
    Unlike in JAX, float64 is computed in float64, and NaN and infinity in a key that a row may not
    see do not reach it.
    """
    if implementation is not None:
        rule = "implementation must be None (fastattn's own)"
        raise ValueError(f"{rule}, got {implementation!r}. JAX's are in jax.nn.")
    q, k, v = operands_of(query, key, value)
    q, scale = scaled(q, scale)
    batch, seqlen_q, heads_q, _ = q.shape
    seqlen_k = k.shape[1]
    scores = (batch, heads_q, seqlen_q, seqlen_k)
    operands: dict[str, jax.Array] = {"query": q, "key": k, "value": v}
    if bias is not None:
        operands["bias"] = bias_of(bias, scores)
    if mask is not None:
        operands["mask"] = mask_of(mask, scores)
    lengths = {
        "query_seq_lengths": query_seq_lengths,
        "key_value_seq_lengths": key_value_seq_lengths,
    }
    for name, given in lengths.items():
        if given is not None:
            operands[name] = lengths_of(name, given, batch)
    names = tuple(operands)
    options = options_with(names, scale, is_causal, local_window_size, seqlen_q, seqlen_k)
    has_residual = flag("return_residual", return_residual)
    found = attend(text_of(options), has_residual, tuple(operands.values()))
    out, lse = found if has_residual else (found, None)
    shape = jax.numpy.shape(query)
    out = out if out.shape == shape else out.reshape(shape)
    if lse is None:
        return out
    residual = lse.swapaxes(1, 2).astype(q.dtype).reshape(shape[:-1])
    return out, jax.lax.stop_gradient(residual)
