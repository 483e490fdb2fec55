"""Relative encodings that add one number to each score, by head and distance: ALiBi and T5.

The kernel makes the number where the score is; no array of seqlen_q times seqlen_k is built.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ... import mods
from ...arguments import count
from ..linear import check_float_array

_T5_BIAS = mods.t5_bias()  # one function for all calls: it is traced once


def alibi_slopes(num_heads: int, dtype: Any = np.float32) -> np.ndarray:
    """Return ALiBi's slope of each head: `alibi` of fastattn.attention().

    For num_heads a power of two, 2 ** (-8 h / num_heads), h = 1 ... num_heads. Else those of the
    power of two below, then every second one of the power above, until there are enough.

    Returns
    -------
    (num_heads,)

    References
    ----------
    Press et al. 2022, Train Short, Test Long, arXiv:2108.12409, section 3, and its published code
    for numbers of heads that are not powers of two.
    """
    count("num_heads", num_heads, 1)
    below = 1 << (num_heads.bit_length() - 1)
    slopes = _slopes_of_power(below)
    more = _slopes_of_power(2 * below)[::2][: num_heads - below]
    return np.concatenate([slopes, more]).astype(dtype)


def _slopes_of_power(heads: int) -> np.ndarray:
    return 2.0 ** (-8 * np.arange(1, heads + 1) / heads)


def t5_arguments(
    weight: np.ndarray,
    seqlen_q: int,
    seqlen_k: int,
    *,
    bidirectional: bool = True,
    max_distance: int = 128,
    offset: int | None = None,
) -> dict[str, Any]:
    """Return the arguments of fastattn.attention() that add T5's relative bias to the scores.

    Parameters
    ----------
    weight : (num_buckets, num_heads) float32 or float64
        relative_attention_bias of the stack's first layer, which all its layers share. They also
        share what is returned here.
    seqlen_q, seqlen_k : int. Of the call that gets the arguments.
    bidirectional : bool. True in the encoder, False in the decoder.
    max_distance : int. Distances from here on share the last bucket.
    offset : int. Position of query 0 among the keys. Default seqlen_k - seqlen_q.

    Returns
    -------
    dict with score_mod and aux. T5 does not scale its scores: pass scale=1 as well.

    References
    ----------
    Raffel et al. 2020, T5, arXiv:1910.10683, section 2.1.
    """
    check_float_array("weight", weight)
    if weight.ndim != 2:
        raise ValueError(f"weight must have shape (num_buckets, num_heads), got {weight.shape}")
    table = mods.t5_table(
        weight,
        seqlen_q,
        seqlen_k,
        bidirectional=bidirectional,
        max_distance=max_distance,
        offset=offset,
    )
    return {"score_mod": _T5_BIAS, "aux": table}
