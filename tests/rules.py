"""Arguments that tests of the rules break."""

from __future__ import annotations

import numpy as np

F4 = np.float32
WINDOW = "window must be a pair of ints >= 0 or None"
FLOAT = "float16, bfloat16, float32 or float64"


def ones(*shape, dtype=F4):
    return np.ones(shape, dtype)


def valid():
    """Return the arguments of a call that works; each rule below breaks one of them."""
    q, k = ones(2, 4, 7, 8), ones(2, 2, 5, 8)
    return {"q": q, "k": k, "v": ones(2, 2, 5, 6), "out": np.full((2, 4, 7, 6), 9, F4)}


def masked(*shape):
    return np.ma.masked_array(ones(*shape))


def unaligned(*shape):
    size = 4 * int(np.prod(shape))
    return np.zeros(size + 1, np.uint8)[1:].view(F4).reshape(shape)


def packed():
    """Return the arguments of a packed call that works: members of 3 and 4 rows, 5 and 0 keys."""
    arrays = {"q": ones(7, 4, 8), "k": ones(5, 2, 8), "v": ones(5, 2, 6)}
    arrays["out"] = np.full((7, 4, 6), 9, F4)
    return arrays | {"cu_seqlens_q": [0, 3, 7], "cu_seqlens_k": np.array([0, 5, 5], np.int32)}


def rule_id(value):
    return "-".join(value) if isinstance(value, dict) else ""
