"""What happens to one score of the SIMT kernel before the softmax, and whether its key is seen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import types

from ..block_mask import FULL, SKIPPED
from ..problem import Variant
from .modifiers import device_function


def changed_score(variant: Variant, words: Any) -> Callable:
    """Device function (job, block, score, head, i, j) -> (score, hidden) after softcap, score_mod,
    bias and ALiBi. -inf from the latter hides the key, not -inf from the product.
    """
    real = np.dtype(variant.dtype).type
    real_type = getattr(types, variant.dtype)
    tanh = words.functions(variant.dtype).tanh
    bias_at, slope_at = bias_of(variant.dtype, words), words.load(variant.dtype)
    modifies, modify = variant.score_mod is not None, None
    if variant.score_mod is not None:
        modify = device_function(variant.score_mod, variant.dtype, words)
    empty = real(-np.inf)

    @words.device(types.Tuple((real_type, types.boolean)))
    def change(job, block, score, head, i, j):
        hidden = False
        if job.softcap > 0:
            cap = real(job.softcap)
            score = cap * tanh(score / cap)
        if modifies:
            score = modify(score, block.b, head, i, j + block.first_key, job.score_aux)
            hidden = score == empty
        if job.bias_kind != 0:
            added = bias_at(job, block.b, head, i, j + block.kv_start)
            hidden = hidden or added == empty
            score += added
        if job.alibi != 0:
            slope = slope_at(job.alibi, block.b * job.alibi_batch + head)
            score -= slope * real(abs(i + block.offset - j))
        return score, hidden

    return change


def bias_of(dtype: str, words: Any) -> Callable:
    """Device function (job, b, head, i, j): an element of the bias, however it is stored."""
    real = np.dtype(dtype).type
    load_4, load_8 = words.load("float32"), words.load("float64")
    load_2, load_b = words.load("float16"), words.load("bfloat16")
    offset = offset_of_entry(words)

    @words.device(getattr(types, dtype))
    def bias_at(job, b, head, i, j):
        at = offset(job.bias_table, job.bias_batch, b)
        at += head * job.bias_head + i * job.bias_row + j * job.bias_col
        if job.bias_kind == 1:
            return real(load_4(job.bias, at))
        if job.bias_kind == 2:
            return real(load_8(job.bias, at))
        if job.bias_kind == 3:
            return real(load_2(job.bias, at))
        return real(load_b(job.bias, at))

    return bias_at


def visible_key(variant: Variant, words: Any) -> Callable:
    """Device function (job, block, head, i, j): whether a row sees a key that exists."""
    load_bool = words.load("bool")
    offset = offset_of_entry(words)
    in_window = key_in_window(words)
    allowed = allowed_key(variant, words)
    has_mod = variant.mask_mod is not None

    @words.device(types.boolean)
    def visible(job, block, head, i, j):
        if not in_window(job, i + block.offset, j):
            return False
        if job.mask != 0:
            at = offset(job.mask_table, job.mask_batch, block.b)
            at += head * job.mask_head + i * job.mask_row
            if not load_bool(job.mask, at + (j + block.kv_start) * job.mask_col):
                return False
        if has_mod:
            return allowed(job, block, head, i, j + block.first_key)
        return True

    return visible


def key_in_window(words: Any) -> Callable:
    """Device function (job, position, j): whether window and chunk let a row see key j."""

    @words.device(types.boolean)
    def in_window(job, position, j):
        if j < position - job.left or j > position + job.right:
            return False
        if job.chunk == 0:
            return True
        return (j + job.keys_before) // job.chunk == (position + job.keys_before) // job.chunk

    return in_window


def allowed_key(variant: Variant, words: Any) -> Callable | None:
    """Device function (job, block, head, i, j): what block mask and mask_mod say of key j of the
    caller's array; None without a mask_mod, which a block mask always has.
    """
    if variant.mask_mod is None:
        return None
    allows = device_function(variant.mask_mod, variant.dtype, words)
    load_kind = words.load("uint8")

    @words.device(types.boolean)
    def allowed(job, block, head, i, j):
        if job.block_mask != 0:
            at = block.b * job.block_mask_batch + head * job.block_mask_head
            at += i // job.block_mask_m * job.block_mask_row
            kind = load_kind(job.block_mask, at + j // job.block_mask_n * job.block_mask_col)
            if kind == SKIPPED:
                return False
            if kind == FULL:
                return True
        return allows(block.b, head, i, j, job.mask_aux)

    return allowed


def offset_of_entry(words: Any) -> Callable:
    """Device function (table, stride, b): elements to batch entry b of an operand."""
    load = words.load("int64")

    @words.device(types.int64)
    def start_of(table, stride, b):
        if table != 0:
            return load(table, b)
        return stride * b

    return start_of
