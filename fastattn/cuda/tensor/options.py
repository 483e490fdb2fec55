"""The options of the general kernel, in their order: scale, softcap, score_mod, bias, ALiBi, and
what hides keys.
"""

from __future__ import annotations

import math
from types import SimpleNamespace

from ..words import device, load
from .block_masks import allowed_key, block_reached, kinds_of
from .operation import boolean, floats, i32
from .placement import batch_offset, float_at, integer_at, near, same_chunk
from .score_steps import score_steps
from .shapes import Shapes
from .tilings import Tiling

LN_2 = math.log(2)


def option_functions(tiling: Tiling) -> SimpleNamespace:
    """Device functions, by name; of a kernel that is not general, those that do nothing.

    change(s, job, batch, head, m_start, offset, rows, n, keys, hidden)
        from products of the rows from m_start and the keys from n to base-2 logits, -inf where an
        option hides a key
    hides(job)
        whether one may do so
    sees(job, batch, head, i, j, offset, hidden)
        whether row i sees key j as far as options say, a score_mod aside
    drop(p, job, batch, head, m_start, n)
        probabilities that dropout leaves
    reached(job, batch, head, m_start, rows, n, start, keys, hidden)
        the first key of the first block from n downwards that the block mask does not skip; one
        below `start` if there is none
    """
    fragment = floats(Shapes.of(tiling).scores.size)
    nothing = _no_options(fragment)
    if not tiling.general:
        return nothing
    steps = score_steps(tiling)
    return SimpleNamespace(
        change=_change(tiling, steps, fragment),
        hides=_hides(tiling),
        sees=_sees(tiling),
        drop=_drop(steps, fragment),
        reached=block_reached(tiling) if tiling.mask_mod else nothing.reached,
    )


def _no_options(fragment) -> SimpleNamespace:
    @device(fragment)
    def change(s, job, batch, head, m_start, offset, rows, n, keys, hidden):
        return s

    @device(boolean)
    def hides(job):
        return False

    @device(boolean)
    def sees(job, batch, head, i, j, offset, hidden):
        return True

    @device(fragment)
    def drop(p, job, batch, head, m_start, n):
        return p

    @device(i32)
    def reached(job, batch, head, m_start, rows, n, start, keys, hidden):
        return n

    return SimpleNamespace(change=change, hides=hides, sees=sees, drop=drop, reached=reached)


def _drop(steps, fragment):
    dropped = steps.dropped

    @device(fragment)
    def drop(p, job, batch, head, m_start, n):
        if job.dropout_keys == 0:
            return p
        key = integer_at(job.dropout_keys, batch * job.heads_q + head)
        return dropped(p, key, m_start, n, job.dropout_threshold)

    return drop


def _change(tiling: Tiling, steps, fragment):
    scaled, capped, base_2, sloped = steps.scaled, steps.capped, steps.base_2, steps.sloped
    masked, chunked = steps.masked, steps.chunked
    add_32, add_64, add_16, add_b16 = steps.biased
    modifies, hides = tiling.score_mod is not None, tiling.mask_mod is not None
    score_mod, mask_mod = steps.score_mod, steps.mask_mod

    @device(fragment)
    def change(s, job, batch, head, m_start, offset, rows, n, keys, hidden):
        position, rows, keys = near(m_start + offset), near(rows), near(keys)
        if job.softcap > 0.0 or modifies:
            s = scaled(s, job.scale_log2 * LN_2)
            if job.softcap > 0.0:
                s = capped(s, job.softcap)
            if modifies:
                s = score_mod(s, n, batch, head, m_start, hidden + job.first_key, job.score_aux)
            s = base_2(s)
        else:
            s = scaled(s, job.scale_log2)
        if job.bias != 0:
            at = batch_offset(job.bias_table, job.bias_batch, batch) + head * job.bias_head
            at += m_start * job.bias_row + hidden * job.bias_col
            row, col = job.bias_row, job.bias_col
            if job.bias_kind == 1:
                s = add_32(s, n, job.bias + 4 * at, 4 * row, 4 * col, rows, keys)
            elif job.bias_kind == 2:
                s = add_64(s, n, job.bias + 8 * at, 8 * row, 8 * col, rows, keys)
            elif job.bias_kind == 3:
                s = add_16(s, n, job.bias + 2 * at, 2 * row, 2 * col, rows, keys)
            else:
                s = add_b16(s, n, job.bias + 2 * at, 2 * row, 2 * col, rows, keys)
        if job.alibi != 0:
            s = sloped(s, float_at(job.alibi, batch * job.alibi_batch + head), position, n)
        if job.mask != 0:
            at = batch_offset(job.mask_table, job.mask_batch, batch) + head * job.mask_head
            at += m_start * job.mask_row + hidden * job.mask_col
            s = masked(s, n, job.mask + at, job.mask_row, job.mask_col, rows, keys)
        if job.chunk != 0:
            s = chunked(s, position, n, near(job.chunk))
        if hides:
            s = mask_mod(
                s,
                n,
                batch,
                head,
                m_start,
                hidden + job.first_key,
                job.mask_aux,
                kinds_of(job, batch, head),
                job.block_mask_row,
                job.block_mask_col,
                job.block_mask_m,
                job.block_mask_n,
                rows,
                keys,
            )
        return s

    return change


def _hides(tiling: Tiling):
    modified = tiling.score_mod is not None or tiling.mask_mod is not None

    @device(boolean)
    def hides(job):
        return modified or job.mask != 0 or job.bias != 0 or job.chunk != 0

    return hides


def _sees(tiling: Tiling):
    bias_32, bias_64 = load("float32"), load("float64")
    bias_16, bias_b16 = load("float16"), load("bfloat16")
    truth, hidden_bias = load("bool"), -math.inf
    modified, mask_mod = tiling.mask_mod is not None, None
    if tiling.mask_mod is not None:
        mask_mod = device(boolean)(allowed_key(tiling.mask_mod))

    @device(boolean)
    def sees(job, batch, head, i, j, offset, hidden):
        if job.mask != 0:
            at = batch_offset(job.mask_table, job.mask_batch, batch) + head * job.mask_head
            if not truth(job.mask, at + i * job.mask_row + (hidden + j) * job.mask_col):
                return False
        if job.bias != 0:
            at = batch_offset(job.bias_table, job.bias_batch, batch) + head * job.bias_head
            at += i * job.bias_row + (hidden + j) * job.bias_col
            if job.bias_kind == 1 and bias_32(job.bias, at) == hidden_bias:
                return False
            if job.bias_kind == 2 and bias_64(job.bias, at) == hidden_bias:
                return False
            if job.bias_kind == 3 and bias_16(job.bias, at) == hidden_bias:
                return False
            if job.bias_kind == 4 and bias_b16(job.bias, at) == hidden_bias:
                return False
        if job.chunk != 0 and not same_chunk(i + offset, j, job.chunk):
            return False
        if modified:
            key = hidden + j + job.first_key
            kinds, row, col = kinds_of(job, batch, head), job.block_mask_row, job.block_mask_col
            sizes = job.block_mask_m, job.block_mask_n
            return mask_mod(
                batch, head, i, key, job.mask_aux, kinds, row, col, sizes[0], sizes[1], i, key
            )
        return True

    return sees
