"""ONNX's Attention, opsets 23 to 25, as a function of NumPy arrays."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from .. import repeat
from ..arguments import ALIGN_LIMIT, integer, real
from ..arrays import Names, integers
from ..check import check, check_backend
from ..kinds import numpy_view
from ..launch import run
from ..probabilities import capped_products, final_scores, visit, weights
from .heads import PACKED, check_rank, count_of, float_array, packed, split

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

NAMES = Names("Q", "K", "V", "attn_mask", "attn_mask", "is_causal")
# Values of qk_matmul_output_mode.
MODES = RAW, CAPPED, BIASED, PROBABILITIES = (0, 1, 2, 3)
VALUES = {
    RAW: capped_products,
    CAPPED: capped_products,
    BIASED: final_scores,
    PROBABILITIES: weights,
}
# Values of softmax_precision: onnx.TensorProto's FLOAT, FLOAT16, DOUBLE and BFLOAT16.
PRECISIONS = (1, 10, 11, 16)
DOUBLE = 11


class AttentionOutputs(NamedTuple):
    """The outputs of attention(), under ONNX's names."""

    Y: np.ndarray
    present_key: np.ndarray
    present_value: np.ndarray
    qk_matmul_output: np.ndarray | None


def attention(
    Q: ArrayLike,
    K: ArrayLike,
    V: ArrayLike,
    attn_mask: ArrayLike | None = None,
    past_key: ArrayLike | None = None,
    past_value: ArrayLike | None = None,
    nonpad_kv_seqlen: ArrayLike | None = None,
    *,
    is_causal: int = 0,
    kv_num_heads: int | None = None,
    left_window_size: int = -1,
    q_num_heads: int | None = None,
    qk_matmul_output_mode: int | None = None,
    right_window_size: int = -1,
    scale: float | None = None,
    softcap: float = 0.0,
    softmax_precision: int | None = None,
    backend: str = "auto",
) -> AttentionOutputs:
    """Return the outputs of ONNX's operator Attention, opset 25.

    Parameters
    ----------
    Q : (batch, q_num_heads, q_len, head_size) float16, bfloat16, float32 or float64
        Or packed, as K and V then are: (batch, q_len, q_num_heads * head_size).
    K : (batch, kv_num_heads, kv_len, head_size), dtype of Q
    V : (batch, kv_num_heads, kv_len, v_head_size), of any of these dtypes
    attn_mask : broadcastable to (batch, q_num_heads, q_len, total_len), from the right
        bool, True = may attend, or numbers, which are added to the scores. total_len is past_len +
        kv_len; keys past the end of a shorter last axis, also one of 1, are hidden.
    past_key, past_value : (batch, kv_num_heads, past_len, head_size) and (..., v_head_size)
        Keys and values before K and V, of their dtypes. Both or none; Q stands after them.
    nonpad_kv_seqlen : (batch,) ints >= 0, not with past_key
        Keys that a batch entry has; the last of them belongs to the last row of Q.
    is_causal : 0 or 1
        Row i sees keys j <= i + offset: past_len, nonpad_kv_seqlen - q_len, or 0 without either.
    left_window_size, right_window_size : int >= 0, or -1 for no limit
        Row i sees keys i + offset - left <= j <= i + offset + right.
    q_num_heads, kv_num_heads : int, for packed arrays only
    qk_matmul_output_mode : 0, 1, 2 or 3
        Return the scores as well: as they come, after softcap, after attn_mask, or after softmax.
        Default None: no fourth output, and no memory for it.
    scale : finite float. Default head_size ** -0.5.
    softcap : float. Scores s become softcap * tanh(s / softcap); <= 0 is off.
    softmax_precision : 1, 10, 11 or 16, in onnx.TensorProto. 11 computes all in float64.
    backend : as in fastattn.attention. The scores are always computed by NumPy.

    Returns
    -------
    Y : (batch, q_num_heads, q_len, v_head_size), or packed like Q; dtype of Q
    present_key, present_value : K and V after the past: (batch, kv_num_heads, total_len, ...)
        Without a past, K and V themselves, or views of them.
    qk_matmul_output : (batch, q_num_heads, q_len, total_len), dtype of Q, or None

    Raises
    ------
    ValueError   shapes or values that do not fit together
    TypeError    dtypes that differ or are not supported

    Notes
    -----
    A row that sees no key is 0, and a hidden key contributes nothing, whatever it holds. Sums in
    float32, or float64 if one of Q and V is; Y is rounded once.
    """
    q, k, v = _four_axes(Q, K, V, q_num_heads, kv_num_heads)
    k, v, past_len = _with_past(k, v, past_key, past_value)
    present = k, v
    mode = _mode(qk_matmul_output_mode)
    dtype = q.dtype
    if v.dtype != dtype or softmax_precision is not None:
        q, k, v = _in_one_dtype(q, k, v, softmax_precision)
    options: dict[str, Any] = {
        "scale": None if scale is None else real("scale", scale),
        "softcap": real("softcap", softcap),
    }
    position: dict[str, Any] = {
        "causal": _is_causal(is_causal),
        "window": (
            _side("left_window_size", left_window_size),
            _side("right_window_size", right_window_size),
        ),
        "align": past_len,
    }
    if nonpad_kv_seqlen is not None:
        _no_past_with_lengths(past_key)
        position |= _lengths(nonpad_kv_seqlen, q, k.shape[2])
    if attn_mask is not None:
        position |= _mask_or_bias(attn_mask, k.shape[2], q.dtype)
    y = _attend((q, k, v), options | position, backend, np.ndim(Q) == PACKED)
    scores = None
    if mode is not None:
        scores = _scores(mode, q, k, options, position, dtype)
    if y.dtype != dtype:
        with np.errstate(over="ignore"):
            y = y.astype(dtype)
    if np.ndim(Q) == PACKED:
        y = packed(y)
    return AttentionOutputs(y, *present, scores)


# --- operands -----------------------------------------------------------------------------------


def _four_axes(
    Q: Any, K: Any, V: Any, q_num_heads: Any, kv_num_heads: Any
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return views (batch, heads, tokens, dim)."""
    q, k, v = float_array("Q", Q), float_array("K", K), float_array("V", V)
    check_rank("Q", q)
    if not q.ndim == k.ndim == v.ndim:
        shapes = f"{q.shape}, {k.shape} and {v.shape}"
        raise ValueError(f"Q, K and V must have the same rank, got {shapes}")
    if k.dtype != q.dtype:
        raise TypeError(f"K must have the dtype of Q, {q.dtype}, got {k.dtype}")
    if q.ndim != PACKED:
        for name, heads in (("q_num_heads", q_num_heads), ("kv_num_heads", kv_num_heads)):
            if heads is not None:
                raise ValueError(f"{name} must not be given where Q has rank 4, got {heads}")
        return q, k, v
    heads_q = count_of("q_num_heads", q_num_heads, "Q")
    heads_kv = count_of("kv_num_heads", kv_num_heads, "Q")
    return (
        split("Q", q, "q_num_heads", heads_q),
        split("K", k, "kv_num_heads", heads_kv),
        split("V", v, "kv_num_heads", heads_kv),
    )


def _with_past(
    k: np.ndarray, v: np.ndarray, past_key: Any, past_value: Any
) -> tuple[np.ndarray, np.ndarray, int]:
    """Return all keys and values, and how many of them are the past."""
    if past_key is None and past_value is None:
        return k, v, 0
    if past_key is None or past_value is None:
        given, absent = ("past_key", "past_value")[:: 1 if past_value is None else -1]
        raise ValueError(f"{given} must be given together with {absent}, got None for {absent}")
    past_k = _past("past_key", past_key, "K", k)
    past_v = _past("past_value", past_value, "V", v)
    past_len = past_k.shape[2]
    if past_v.shape[2] != past_len:
        shapes = f"{past_k.shape} and {past_v.shape}"
        raise ValueError(f"past_key and past_value must have the same length, got {shapes}")
    return np.concatenate((past_k, k), axis=2), np.concatenate((past_v, v), axis=2), past_len


def _past(name: str, past: Any, owner: str, new: np.ndarray) -> np.ndarray:
    past = float_array(name, past)
    if past.dtype != new.dtype:
        raise TypeError(f"{name} must have the dtype of {owner}, {new.dtype}, got {past.dtype}")
    batch, heads, _, dim = new.shape
    if past.ndim != 4 or (*past.shape[:2], past.shape[3]) != (batch, heads, dim):
        rule = f"{name} must have shape ({batch}, {heads}, past_len, {dim}) to fit {owner}"
        raise ValueError(f"{rule}, got {past.shape}")
    return past


def _in_one_dtype(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, precision: Any
) -> tuple[np.ndarray, ...]:
    """Return arrays of one dtype: that of both, or float32, or float64 where one is or it is asked
    for.
    """
    if precision is not None and precision not in PRECISIONS:
        raise ValueError(f"softmax_precision must be one of {PRECISIONS}, got {precision!r}")
    dtype: np.dtype = q.dtype
    if precision == DOUBLE or np.float64 in (q.dtype, v.dtype):
        dtype = np.dtype(np.float64)
    elif q.dtype != v.dtype:
        dtype = np.dtype(np.float32)
    return tuple(a.astype(dtype, copy=False) for a in (q, k, v))


# --- which keys a row sees ----------------------------------------------------------------------


def _is_causal(value: Any) -> bool:
    if value not in (0, 1):
        raise ValueError(f"is_causal must be 0 or 1, got {value!r}")
    return bool(value)


def _side(name: str, size: Any) -> int | None:
    if size == -1:
        return None
    rule = f"{name} must be an int >= 0, or -1 for no limit"
    radius = integer(rule, size)
    if radius < 0:
        raise ValueError(f"{rule}, got {radius}")
    return radius


def _no_past_with_lengths(past_key: Any) -> None:
    if past_key is not None:
        raise ValueError("nonpad_kv_seqlen must be None if past_key is given, got both")


def _lengths(nonpad_kv_seqlen: Any, q: np.ndarray, seqlen_k: int) -> dict[str, Any]:
    """Return keywords for the keys that each batch entry has."""
    name, rule = "nonpad_kv_seqlen", "ints >= 0 of shape (batch,)"
    lengths = integers(name, rule, nonpad_kv_seqlen)
    if lengths.shape != q.shape[:1]:
        raise ValueError(f"{name} must have shape {q.shape[:1]}, got {lengths.shape}")
    if (lengths < 0).any():
        raise ValueError(f"{name} must be {rule}, got {lengths.min()}")
    # More keys than there are mean a position past all of them, however far.
    lengths = np.minimum(lengths, ALIGN_LIMIT).astype(np.int64)
    return {"kv_len": np.minimum(lengths, seqlen_k), "align": lengths - q.shape[2]}


def _mask_or_bias(attn_mask: Any, seqlen_k: int, dtype: np.dtype) -> dict[str, Any]:
    """Return attn_mask as a keyword, its last axis padded with what hides a key."""
    mask = numpy_view("attn_mask", attn_mask)
    if not mask.ndim:
        raise ValueError("attn_mask must have rank 1 or more, got shape ()")
    is_bool = mask.dtype == bool
    if mask.dtype.kind in "iu":
        mask = mask.astype(np.result_type(dtype, np.float32))
    short = mask.shape[-1]
    if short < seqlen_k:
        padded = np.full((*mask.shape[:-1], seqlen_k), False if is_bool else -np.inf, mask.dtype)
        padded[..., :short] = mask
        mask = padded
    return {"mask" if is_bool else "bias": mask}


# --- the two ways through the core --------------------------------------------------------------


def _attend(
    operands_given: tuple[np.ndarray, ...], options: dict[str, Any], backend: str, is_packed: bool
) -> np.ndarray:
    """Return the result, its axes in the order of those of Q where that was packed."""
    arrays = *operands_given, options.get("mask"), options.get("bias")
    key = None
    if "kv_len" not in options:
        numbers = (options[name] for name in ("scale", "softcap", "causal", "align"))
        key = repeat.key_of(arrays, ("onnx", *numbers, backend, is_packed), options["window"])
        found = repeat.answer(key, arrays)
        if found is not None:
            return found[0]
    check_backend(backend)
    named = {**options, "names": NAMES, "in_order_of_q": is_packed}
    problem, operands = check(*operands_given, **named)
    repeat.keep(key, arrays, run(problem, operands, backend), operands, operands.out.shape)
    return operands.out


def _mode(value: Any) -> int | None:
    if value is not None and value not in MODES:
        raise ValueError(f"qk_matmul_output_mode must be one of {MODES}, got {value!r}")
    return value


def _scores(
    mode: int,
    q: np.ndarray,
    k: np.ndarray,
    options: dict[str, Any],
    position: dict[str, Any],
    dtype: np.dtype,
) -> np.ndarray:
    """Return what mode says, (batch, heads_q, seqlen_q, seqlen_k)."""
    if mode == RAW:
        options = options | {"softcap": None}
    if mode in (BIASED, PROBABILITIES):
        options = options | position
    problem, operands = check(q, k, k[..., :0], **options, names=NAMES, fold=False)
    # Keys that a batch entry does not have are not visited.
    hidden = -np.inf if mode == BIASED else 0
    scores = np.full((*operands.q.shape[:-1], k.shape[-2]), hidden, dtype)

    def write(target: np.ndarray, inside: np.ndarray, values: np.ndarray) -> None:
        target[..., inside, :] = values

    visit(problem, operands, np.arange(problem.seqlen_q), scores, write, VALUES[mode])
    return scores
