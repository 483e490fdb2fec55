"""From products to probabilities and gradients of scores, a tile at a time, in shared memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import cuda, types

from ..problem import Variant
from . import random
from .modifiers import device_function
from .scores import changed_score, visible_key
from .tile import LAST_THREAD, Tile


def differentiate(variant: Variant, tile: Tile, words: Any, *, keys_own: bool) -> Callable:
    """Device function (job, entry, queries, buffer, first_key): each thread changes its own numbers
    of two tiles of products, scale * q · k and dout · v, in place. With what dropout makes of 1, D,
    and the derivative c of the score by the product,

        ds = p * (D * dout · v - delta)
        the first tile becomes D * p where rows are keys, else ds; the second c * ds

    and 0 for what is hidden, whatever it holds. first_key is that of row or column 0.

    keys_own  rows are keys and columns are queries; else the other way round
    """
    real = np.dtype(variant.dtype).type
    threads_m, threads_n, keys = tile.threads_m, tile.threads_n, tile.keys
    own_scores, p_start, p_pitch, p_size = (
        tile.rows * keys,
        tile.piece_size,
        tile.p_pitch,
        tile.p_size,
    )
    exp, is_kept = words.functions(variant.dtype).exp, random.kept(words)
    change, visible = changed_score(variant, words), visible_key(variant, words)
    slope_of = score_slope(variant, words)

    @words.device(types.void)
    def change_own(job, entry, queries, buffer, first_key):
        tid = np.int64(cuda.threadIdx.x & LAST_THREAD)
        ty, tx = tid // threads_n, tid % threads_n
        for e in range(own_scores):
            r, c = ty + threads_m * (e // keys), tx + threads_n * (e % keys)
            x, j = (c, first_key + r) if keys_own else (r, first_key + c)
            at, i = p_start + r * p_pitch + c, queries.i[x]
            first, second, head = real(0), real(0), queries.head[x]
            exists = i >= 0 and 0 <= j < entry.seqlen_k
            if exists and visible(job, entry, head, i, j):
                product = buffer[at]
                score, hidden = change(job, entry, product, head, i, j)
                if not hidden:
                    p, factor = exp(score - queries.reference[x]) * queries.weight[x], real(1)
                    dp = buffer[at + p_size]
                    if job.dropout_keys != 0:
                        place = j + job.keys_before
                        factor = real(job.dropout_factor)
                        if not is_kept(queries.dropout[x], place, job.dropout_threshold):
                            factor, dp = real(0), real(0)
                    ds = p * (factor * dp - queries.delta[x])
                    first = factor * p if keys_own else ds
                    second = ds * slope_of(job, entry, product, head, i, j)
            buffer[at], buffer[at + p_size] = first, second

    return change_own


def score_slope(variant: Variant, words: Any) -> Callable:
    """Device function (job, entry, product, head, i, j): the derivative of the score by it."""
    real, tanh = np.dtype(variant.dtype).type, words.functions(variant.dtype).tanh
    modifies, slope_at = variant.score_mod_grad is not None, None
    if variant.score_mod_grad is not None:
        slope_at = device_function(variant.score_mod_grad, variant.dtype, words)

    @words.device(getattr(types, variant.dtype))
    def slope_of(job, entry, product, head, i, j):
        slope, score = real(1), product
        if job.softcap > 0:
            share = tanh(score / real(job.softcap))
            slope, score = real(1) - share * share, real(job.softcap) * share
        if modifies:
            slope *= slope_at(score, entry.b, head, i, j + entry.first_key, job.score_aux)
        return slope

    return slope_of
