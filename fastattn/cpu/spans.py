"""Which keys of a block any row sees, and which all do: no others are computed, or masked."""

from __future__ import annotations

from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from ..block_mask import FULL, SKIPPED
from .fields import BATCH, FIRST_BIAS, HEAD, batch_offset, field, next_row
from .memory import at, pointer_to
from .registers import I64, jit

BYTES = pointer_to("bool")
STEP = 8  # truth values of a mask that are looked at together
ALL_TRUE = 0x0101010101010101


@jit
def block_kinds(job, item, row, count, key_block):
    """(some, all): whether the block mask lets any of these rows see any key of one of its key
    blocks; and whether it lets all see all.
    """
    group, block_m = field(job, "group"), field(job, "block_mask_m")
    kinds = at(BYTES(field(job, "block_mask")), item[BATCH] * field(job, "block_mask_batch"))
    kinds = at(kinds, key_block * field(job, "block_mask_col"))
    some, every = False, True
    first, last = row // group // block_m, (row + count - 1) // group // block_m
    for r in range(group):
        head = at(kinds, (item[HEAD] * group + r) * field(job, "block_mask_head"))
        for m in range(first, last + 1):
            kind = head[m * field(job, "block_mask_row")]
            some = some or kind != SKIPPED
            every = every and kind == FULL
    return some, every


@jit
def visible_span(job, item, row, count, n_start, start, stop):
    """(start, stop, full): [start, stop) without the skipped blocks of the block mask at both ends,
    and whether all rows see all that is left.
    """
    block_n = field(job, "block_mask_n")
    first_key = n_start + item[FIRST_BIAS] + field(job, "first_key")
    begin, end, full = max(start, stop), start, True  # stop may lie before start
    for n in range((first_key + start) // block_n, (first_key + stop - 1) // block_n + 1):
        some, every = block_kinds(job, item, row, count, n)
        if some:
            low = max(n * block_n - first_key, start)
            full = full and every and (end == start or low == end)
            begin, end = min(begin, low), min((n + 1) * block_n - first_key, stop)
    return begin, end, full


@intrinsic
def load_step(typingctx, truths, index):
    """STEP truth values as one number."""

    def codegen(context, builder, sig, args):
        place = builder.bitcast(builder.gep(args[0], [args[1]]), ir.PointerType(I64))
        return builder.load(place, align=1)

    return types.int64(truths, types.int64), codegen


@jit
def all_seen(truths, n):
    """Whether 4 * STEP truth values from n on are all 1."""
    return (
        load_step(truths, n)
        & load_step(truths, n + STEP)
        & load_step(truths, n + 2 * STEP)
        & load_step(truths, n + 3 * STEP)
    ) == ALL_TRUE


@jit
def seen(truths, n, stop):
    """(some, all) of the truth values [n, n + STEP) that lie before stop."""
    if n + STEP <= stop:
        step = load_step(truths, n)
        # Truth may be any number but 0; a mask of others than 1 is merely taken for partial.
        return step != 0, step == ALL_TRUE
    some, every = False, True
    for j in range(n, stop):
        some, every = some or truths[j] != 0, every and truths[j] != 0
    return some, every


@jit
def mask_span(job, item, row, count, n_start, start, stop, hidden):
    """(start, stop, hidden): [start, stop) without the keys at both ends that the mask hides from
    all rows; and a key up to which, from the given start on, all rows see all, the new stop at
    most. All to STEP keys. Keys from the given `hidden` on are not looked at for it.

    A mask that hides keys here and there is known after its first row.
    """
    if field(job, "mask_col") != 1:
        return start, stop, start
    group, by_row, by_head = field(job, "group"), field(job, "mask_row"), field(job, "mask_head")
    if by_row == 0 and (by_head == 0 or group == 1):
        count = min(count, 1)
    base = batch_offset(field(job, "mask_table"), field(job, "mask_batch"), item[BATCH])
    base += n_start + item[FIRST_BIAS]
    last = start + (stop - start - 1) // STEP * STEP
    begin, end = max(start, stop), start
    i, r = row // group, row % group
    for _ in range(count):
        place = base + (item[HEAD] * group + r) * by_head + i * by_row
        truths = at(BYTES(field(job, "mask")), place)
        n = start
        while n + 4 * STEP <= hidden and all_seen(truths, n):  # a mask without effect: 1.05 -> 1.03
            n += 4 * STEP
        while n < hidden and seen(truths, n, stop)[1]:
            n += STEP
        hidden, n = min(hidden, n), start
        while n < begin and not seen(truths, n, stop)[0]:
            n += STEP
        begin, n = min(begin, n), last
        while n >= end and not seen(truths, n, stop)[0]:
            n -= STEP
        end = max(end, min(n + STEP, stop))
        if begin == start and end == stop and hidden == start:
            break
        i, r = next_row(i, r, group)
    return begin, end, min(hidden, end)
