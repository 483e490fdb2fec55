"""The rows that see no key: 0 in fastattn, in JAX the mean of the values of masked keys.

JAX gives a masked pair the score LARGE_NEGATIVE, and a softmax of these alone is uniform. Keys
hidden by a bias of -inf stay at -inf, and so do not count; if there are no others, the row is NaN.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from .options import Options

LARGE_NEGATIVE = float(np.float32(-0.7 * np.finfo(np.float32).max))
ROWS_AT_ONCE = 256  # of a head: seqlen_k weights each


def are_possible(options: Options, seqlen_q: int, seqlen_k: int) -> bool:
    """Whether a row may see no key."""
    if not seqlen_k:
        return False  # nor is there a mean
    left, right = options.left, options.right
    if {"bias", "mask", "key_value_seq_lengths"}.intersection(options.names):
        return True
    # Row i sees max(0, i - left) <= j <= min(seqlen_k - 1, i + right).
    last_sees_none = left is not None and seqlen_q - 1 - left > seqlen_k - 1
    first_sees_none = right is not None and right < 0
    return last_sees_none or first_sees_none or _is_empty_band(left, right)


def _is_empty_band(left: int | None, right: int | None) -> bool:
    return left is not None and right is not None and left + right < 0


def empty_rows(
    options: Options, operands: dict[str, np.ndarray], lse: np.ndarray
) -> Iterator[tuple[tuple[Any, ...], np.ndarray, np.ndarray]]:
    """Yield (batch and head, rows, weights) for the rows whose lse is -inf, a few at a time.

    weights : (rows, seqlen_k) dtype of lse
        What JAX's softmax gives: 1 / count at masked keys; NaN where there are none.
    """
    seqlen_k = operands["key"].shape[-3]
    empty = np.isneginf(lse)
    if "query_seq_lengths" in operands:  # rows past them are 0 in JAX too
        lengths = operands["query_seq_lengths"][..., None, None]
        empty &= np.arange(lse.shape[-1]) < lengths
    for head in zip(*np.nonzero(empty.any(axis=-1)), strict=True):
        rows = np.flatnonzero(empty[head])
        for start in range(0, len(rows), ROWS_AT_ONCE):
            some = rows[start : start + ROWS_AT_ONCE]
            masked = _masked(options, operands, lse.shape, head, some, seqlen_k)
            counts = np.count_nonzero(masked, axis=-1)[:, None]
            with np.errstate(divide="ignore", invalid="ignore"):
                yield head, some, masked / counts.astype(lse.dtype)


def _masked(
    options: Options,
    operands: dict[str, np.ndarray],
    shape: tuple[int, ...],
    head: tuple[int, ...],
    rows: np.ndarray,
    seqlen_k: int,
) -> np.ndarray:
    """Return (rows, seqlen_k) bool: which keys are hidden by other means than a bias."""
    i, j = rows[:, None], np.arange(seqlen_k)
    masked = np.zeros((len(rows), seqlen_k), np.bool_)
    if options.left is not None:
        masked |= j < i - options.left
    if options.right is not None:
        masked |= j > i + options.right
    if "key_value_seq_lengths" in operands:
        lengths = np.broadcast_to(operands["key_value_seq_lengths"], shape[:-2])
        masked |= j >= lengths[head[:-1]]
    if "mask" in operands:
        mask = np.broadcast_to(operands["mask"], (*shape, seqlen_k))
        masked |= ~mask[head][rows]
    return masked
