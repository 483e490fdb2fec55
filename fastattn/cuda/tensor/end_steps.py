"""How a kernel ends: from the softmax's state to rows of out and lse, or of a part of the keys."""

from __future__ import annotations

import math

from .mma import F32, I16, I32
from .operation import floats, i64, operation, types, u32, void
from .shapes import Shapes
from .tiles import CHUNK_BYTES, Copy, SharedTile, elements_from
from .tilings import Tiling

LN_2, LOG2_E = math.log(2), 1 / math.log(2)


def end_steps(tiling: Tiling) -> dict:
    """The last steps, by name."""
    shapes = Shapes.of(tiling)
    output = shapes.output
    state = floats(output.thread_rows)
    # The warp's own rows of q's memory, which nobody else reads.
    staged = SharedTile(tiling.warp_m, tiling.head_dim_v, shapes.q.row_bytes, tiling.item)
    copying = Copy(staged, 32)

    def own_rows(e, rows):
        """(row, exists) of each of a thread's rows in the thread block."""
        first = e.add(e.mul(e.warp(), tiling.warp_m), e.shr(e.lane(), 2))
        rows = e.b.trunc(e.smaller(rows, tiling.block_m), I32)
        for r in range(output.thread_rows):
            row = e.add(first, output.row_of(r))
            yield row, e.less(row, rows)

    def is_first(e):
        """Whether this is the first of the four lanes that share rows."""
        return e.b.icmp_signed("==", e.both(e.lane(), 3), e.i32(0))

    def shared_sum(e, x):
        """Of the four lanes that share a row."""
        for mask in (1, 2):
            x = e.b.fadd(x, e.lane_xor(x, mask))
        return x

    @operation(tiling.storage, types.UniTuple(state, 2), state, state, types.float64, i64, i64)
    def finish(e, row_max, row_sum, scale, sinks, rows):
        """(factor, lse) of each row: what its output is to be multiplied by. Both count the sink of
        the row's head, if there are sinks; lse is natural. sinks: address of the first row's.
        """
        own = list(own_rows(e, rows))
        scale, nothing = e.b.fptrunc(scale, F32), e.f32(-math.inf)
        factors, lses = [], []
        for own_max, own_sum, (row, exists) in zip(row_max, row_sum, own, strict=True):
            place = e.shl(e.i64(row), 2) if tiling.packed else e.i64(0)
            wanted = e.b.and_(exists, e.b.icmp_signed("!=", sinks, e.i64(0)))
            sink = e.load_global("f32", e.add(sinks, place), wanted)
            sink = e.b.select(wanted, sink, nothing)
            sink_2 = e.finite_in(sink, LOG2_E)
            largest = e.b.fmul(own_max, scale)
            top = e.fmax(largest, sink_2)
            top = e.b.select(e.b.fcmp_ordered("==", top, nothing), e.f32(0), top)
            weight = e.exp2(e.b.fsub(largest, top))
            total = e.b.fmul(shared_sum(e, own_sum), weight)
            total = e.b.fadd(total, e.exp2(e.b.fsub(sink_2, top)))
            empty = e.b.fcmp_ordered("==", total, e.f32(0))
            factor = e.b.fmul(weight, e.inverse(total))
            factors.append(e.b.select(empty, e.f32(0), factor))
            lse = e.b.fmul(e.b.fadd(top, e.log2(total)), e.f32(LN_2))
            # Without a visible key it is the sink to the bit, or -inf.
            unseen = e.b.fcmp_ordered("==", own_max, nothing)
            unseen = e.b.and_(unseen, e.b.fcmp_ordered("==", own_sum, e.f32(0)))
            lses.append(e.b.select(unseen, sink, lse))
        return [factors, lses]

    @operation(tiling.storage, void, floats(output.size), state, u32, i64, i64, i64, i64, i64)
    def store_rows(e, acc, factor, base, out, row_bytes, columns, column_bytes, rows):
        """out = acc * factor, through shared memory: whole chunks of a row, neighbours together.

        Since the warp has read q, all threads have waited for values.
        """
        first = e.mul(e.warp(), tiling.warp_m)
        lane = e.lane()
        base = e.add(base, e.mul(first, staged.row_bytes))
        if tiling.item == 2:  # a pair of neighbours is one of four words of a chunk
            to, count = staged.address(e, base, e.shr(lane, 2), e.i32(0)), 2
            to = e.add(to, e.shl(e.both(lane, 3), 2))
        else:  # eight neighbours are two chunks
            to, count = staged.address(e, base, e.shr(lane, 2), e.shl(e.both(lane, 3), 1)), 4
        for r in range(output.thread_rows):
            row = output.of_row(r)
            for n in range(0, len(row), count):
                words = e.stored([e.b.fmul(acc[i], factor[r]) for i, _ in row[n : n + count]])
                chunk = row[n][1] // staged.chunk
                address, place = staged.moved(e, to, output.row_of(r), chunk)
                e.store_shared(address, place, words)
        e.warp_barrier()
        row, chunk = copying.own(e)
        at = staged.address(e, base, row, chunk)
        out = e.add(out, e.mul(e.i64(first), row_bytes))
        out = e.add(out, copying.offset(e, row_bytes, column_bytes if tiling.strided else None))
        rows = e.sub(e.b.trunc(e.smaller(rows, tiling.block_m), I32), first)
        columns = e.b.trunc(columns, I32)
        for more_rows, more_chunks in copying.passes():
            address, place = staged.moved(e, at, more_rows, more_chunks)
            wanted = e.less(e.add(row, more_rows), rows)
            left = elements_from(e, columns, e.add(chunk, more_chunks), tiling.item)
            to = e.add(out, e.mul(row_bytes, more_rows))
            words = e.load_shared_16(address, place)
            if tiling.strided:
                _store_elements(e, words, to, more_chunks, column_bytes, left, wanted)
                continue
            if tiling.padded:
                wanted = e.b.and_(wanted, e.less(0, left))
            to = e.add(to, more_chunks * CHUNK_BYTES)
            e.store_global("v4.b32", to, words, wanted)

    @operation(tiling.storage, void, state, i64, i64, i64)
    def store_lse(e, lse, address, row_bytes, rows):
        for value, (row, exists) in zip(lse, own_rows(e, rows), strict=True):
            at = e.add(address, e.mul(e.i64(row), row_bytes))
            e.store_global("f32", at, [value], e.b.and_(exists, is_first(e)))

    @operation(tiling.storage, void, floats(output.size), i64, i64, i64, i64)
    def store_partial(e, acc, address, row_bytes, columns, rows):
        """acc as it is, float32."""
        columns = e.b.trunc(columns, I32)
        column = e.mul(e.both(e.lane(), 3), output.neighbours)
        for r, (row, exists) in enumerate(own_rows(e, rows)):
            to = e.add(address, e.mul(e.i64(row), row_bytes))
            to = e.add(to, e.i64(e.shl(column, 2)))
            for i, n in output.of_row(r):
                wanted = e.b.and_(exists, e.less(e.add(column, n), columns))
                e.store_global("f32", e.add(to, 4 * n), [acc[i]], wanted)

    @operation(tiling.storage, void, state, state, types.float64, i64, i64, i64)
    def store_state(e, row_max, row_sum, scale, address, row_bytes, rows):
        """Reference, natural, and sum of each row."""
        natural = e.b.fptrunc(e.b.fmul(scale, e.f64(LN_2)), F32)
        for r, (row, exists) in enumerate(own_rows(e, rows)):
            at = e.add(address, e.mul(e.i64(row), row_bytes))
            wanted = e.b.and_(exists, is_first(e))
            e.store_global("f32", at, [e.b.fmul(row_max[r], natural)], wanted)
            e.store_global("f32", e.add(at, 4), [shared_sum(e, row_sum[r])], wanted)

    return {
        "finish": finish,
        "store_rows": store_rows,
        "store_lse": store_lse,
        "store_partial": store_partial,
        "store_state": store_state,
    }


def _store_elements(e, words, address, chunk, column_bytes, left, wanted):
    """The elements of a chunk, of which `left` exist, one by one."""
    halves = 1 if e.storage == "tf32" else 2
    for i in range(halves * len(words)):
        value, kind = words[i // halves], "b32"
        if halves == 2:
            value, kind = e.b.trunc(e.shr(value, 16 * (i % 2)), I16), "b16"
        at = e.add(address, e.mul(column_bytes, chunk * halves * len(words) + i))
        e.store_global(kind, at, [value], e.b.and_(wanted, e.less(i, left)))
