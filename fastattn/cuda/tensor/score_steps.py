"""What the general kernel does to scores before the softmax: softcap, score_mod, bias, ALiBi; and
what hides a key from a row: chunk, mask, mask_mod, a bias of -inf.

Each step works on the scores of a thread one by one. What an option costs is paid where it is used:
a step is jumped over as a whole.
"""

from __future__ import annotations

import math
from types import SimpleNamespace

from .. import words
from ..job import BIAS_KINDS
from ..modifiers import scalar_function
from .block_masks import allowed_key
from .mma import F32, I32, I64, LARGEST
from .operation import boolean, f32, floats, i32, i64, operation, types
from .random_steps import chained_key, row_number
from .shapes import Shapes
from .tilings import Tiling

LN_2, LOG2_E = math.log(2), 1 / math.log(2)
SMALL = 0.2  # tanh(x) / x is a polynomial of x * x below it, to 6e-8
TANH = (1.0, -1 / 3, 2 / 15, -17 / 315)
INTEGERS = (types.int64,) * 5


def score_steps(tiling: Tiling) -> SimpleNamespace:
    """All of them, by name; from base-2 logits to base-2 logits, but for `scaled`."""
    scores, storage = Shapes.of(tiling).scores, tiling.storage
    fragment = floats(scores.size)

    def each(e, s, n):
        """(register, row of the block, key, score) of a thread's scores; key n is the first."""
        lane = e.lane()
        first = e.add(e.mul(e.warp(), tiling.warp_m), e.shr(lane, 2))
        column = e.add(e.shl(e.both(lane, 3), 1), n)
        for r in range(scores.thread_rows):
            row = e.add(first, scores.row_of(r))
            for i, more in scores.of_row(r):
                yield i, row, e.add(column, more), s[i]

    def places(e, s, n, address, row_bytes, column_bytes, rows, keys):
        """(register, score, address, exists) of what each score has of its own in memory."""
        for i, row, key, x in each(e, s, n):
            place = e.add(e.mul(e.i64(row), row_bytes), e.mul(e.b.sext(key, I64), column_bytes))
            exists = e.b.and_(e.less(row, rows), e.less(key, keys))
            yield i, x, e.add(address, place), exists

    @operation(storage, fragment, fragment, types.float64)
    def scaled(e, s, factor):
        factor = e.b.fptrunc(factor, F32)
        return [e.b.fmul(x, factor) for x in s]

    @operation(storage, fragment, fragment, types.float64)
    def capped(e, s, cap):
        """cap * tanh(x / cap) of natural scores: 1e-7 off, where tanh.approx would be 5e-4."""
        cap = e.fmin(e.b.fptrunc(cap, F32), e.f32(LARGEST))
        inverse = e.inverse(cap)  # a division proper is a function of the compiler's
        return [e.b.fmul(cap, _tanh(e, e.b.fmul(x, inverse))) for x in s]

    @operation(storage, fragment, fragment)
    def base_2(e, s):
        return [e.finite_in(x, LOG2_E) for x in s]

    @operation(storage, fragment, fragment, f32, i32, i32)
    def sloped(e, s, slope, position, n):
        """Less slope * |position of the row - key|, the slope natural."""
        slope = e.b.fmul(slope, e.f32(-LOG2_E))
        s = list(s)
        for i, row, key, x in each(e, s, n):
            distance = e.b.sitofp(e.sub(e.add(position, row), key), F32)
            s[i] = e.fma(e.absolute(distance), slope, x)
        return s

    def biased(kind: str):
        @operation(storage, fragment, fragment, i32, i64, i64, i64, i32, i32)
        def step(e, s, n, address, row_bytes, column_bytes, rows, keys):
            s = list(s)
            for i, x, place, exists in places(
                e, s, n, address, row_bytes, column_bytes, rows, keys
            ):
                bias = _loaded(e, kind, place, exists)
                hidden = e.b.fcmp_ordered("==", bias, e.f32(-math.inf))
                moved = e.b.fadd(x, e.finite_in(bias, LOG2_E))
                s[i] = e.b.select(hidden, e.f32(-math.inf), moved)
            return s

        return step

    @operation(storage, fragment, fragment, i32, i64, i64, i64, i32, i32)
    def masked(e, s, n, address, row_bytes, column_bytes, rows, keys):
        s = list(s)
        for i, x, place, exists in places(e, s, n, address, row_bytes, column_bytes, rows, keys):
            truth = e.load_global("u8", place, exists)
            hidden = e.b.icmp_signed("==", truth, e.i32(0))
            s[i] = e.b.select(hidden, e.f32(-math.inf), x)
        return s

    @operation(storage, fragment, fragment, i32, i32, i32)
    def chunked(e, s, position, n, chunk):
        """Only keys whose key // chunk is that of the row's position."""
        s = list(s)
        last = None
        for i, row, key, x in each(e, s, n):
            if last is None or last[0] is not row:
                last = row, e.chunk_start(e.add(position, row), chunk)
            behind = e.sub(key, last[1])  # as an unsigned number: far, where it is before
            s[i] = e.b.select(e.b.icmp_unsigned("<", behind, chunk), x, e.f32(-math.inf))
        return s

    @operation(storage, fragment, fragment, i64, i64, i32, i64)
    def dropped(e, p, head_key, first_row, n, threshold):
        """0 for probabilities that dropout takes. head_key: of Operands.dropout_keys."""
        p = list(p)
        threshold, last = e.b.trunc(threshold, I32), None
        for i, row, key, x in each(e, p, n):
            if last is None or last[0] is not row:
                row_key = chained_key(e, head_key, e.add(first_row, e.i64(row)))
                last = row, e.b.trunc(row_key, I32), e.b.trunc(e.shr(row_key, 32), I32)
            number = row_number(e, key, *last[1:])
            taken = e.b.icmp_unsigned("<", number, threshold)
            p[i] = e.b.select(taken, e.f32(0), x)
        return p

    def score_modifying():
        """The score_mod of natural scores."""
        function = scalar_function(tiling.score_mod, "float32", words)
        signature = f32(f32, *INTEGERS)

        @operation(storage, fragment, fragment, i32, i64, i64, i64, i64, i64)
        def step(e, s, n, batch, head, first_row, first_key, aux):
            s = list(s)
            for i, row, key, x in each(e, s, n):
                at = (e.add(first_row, e.i64(row)), e.add(first_key, e.b.sext(key, I64)))
                s[i] = e.call(function, signature, (x, batch, head, *at, aux))
            return s

        return step

    def mask_modifying():
        """What block mask and mask_mod hide; of rows and keys from the first ones on."""
        function, signature = allowed_key(tiling.mask_mod), boolean(*INTEGERS, *[i64] * 7)

        @operation(storage, fragment, fragment, i32, *[i64] * 10, i32, i32)
        def step(e, s, n, batch, head, first_row, first_key, aux, *blocks_and_counts):
            *blocks, rows, keys = blocks_and_counts
            last = [
                e.add(first, e.b.sext(e.sub(count, 1), I64))
                for first, count in ((first_row, rows), (first_key, keys))
            ]
            s = list(s)
            for i, row, key, x in each(e, s, n):
                at = (e.add(first_row, e.i64(row)), e.add(first_key, e.b.sext(key, I64)))
                arguments = (batch, head, *at, aux, *blocks, *last)
                sees = e.call(function, signature, arguments)
                s[i] = e.b.select(e.truth(sees), x, e.f32(-math.inf))
            return s

        return step

    return SimpleNamespace(
        scaled=scaled,
        capped=capped,
        base_2=base_2,
        sloped=sloped,
        biased=[biased(kind) for kind in BIAS_KINDS[1:]],
        masked=masked,
        chunked=chunked,
        dropped=dropped,
        score_mod=score_modifying() if tiling.score_mod is not None else None,
        mask_mod=mask_modifying() if tiling.mask_mod is not None else None,
    )


def _tanh(e, x):
    """By its series around 0, where 1 - 2 / (exp(2 x) + 1) would lose the bits of a small x."""
    square, series = e.b.fmul(x, x), e.f32(TANH[-1])
    for coefficient in TANH[-2::-1]:
        series = e.fma(series, square, e.f32(coefficient))
    grown = e.b.fadd(e.exp2(e.b.fmul(x, e.f32(2 * LOG2_E))), e.f32(1))
    far = e.fma(e.inverse(grown), e.f32(-2), e.f32(1))
    is_small = e.b.fcmp_ordered("<", e.absolute(x), e.f32(SMALL))
    return e.b.select(is_small, e.b.fmul(x, series), far)


def _loaded(e, kind: str, address, wanted):
    """A bias as float32, finite where it is finite."""
    if kind == "float32":
        return e.load_global("f32", address, wanted)
    if kind == "float64":
        wide = e.load_global("f64", address, wanted)
        return e.narrowed(wide)
    half = e.load_global("b16", address, wanted)
    if kind == "float16":
        return e.asm("cvt.f32.f16 $0, $1;", "=f,h", [F32], [half])
    return e.b.bitcast(e.shl(e.b.zext(half, I32), 16), F32)
