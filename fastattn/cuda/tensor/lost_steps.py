"""Values that are not finite, in blocks of keys that some row does not see.

A hidden key has probability 0, and 0 * NaN would be NaN. So in such blocks values are looked at,
which costs three instructions for two of them. Where one is not finite it becomes 0 in shared
memory, and when its rows are written, each gets what it sees of them added: slowly, one thread for
each output, with no register taken from the loop for a case that hardly ever comes.
"""

from __future__ import annotations

from .mma import I32, INF
from .operation import boolean, operation, u32, void
from .shapes import Shapes
from .tiles import Copy
from .tilings import Tiling

# Of the elements of a register: their exponents, whose bits are all ones where they are not finite,
# and what carries from such an exponent to the sign. The last numbers of float32 are rounded to
# infinity: all bits but the sign, and what carries from the first of them.
EXPONENTS = {"float16": 0x7C007C00, "bfloat16": 0x7F807F80, "float32": 0x7FFFFFFF}
CARRY = {"float16": 0x04000400, "bfloat16": 0x00800080, "float32": 0x00801000}
SIGNS = {"float16": 0x80008000, "bfloat16": 0x80008000, "float32": 0x80000000}
LARGEST_TF32 = (2 - 2**-10) * 2.0**127


def carried(e, storage: str, x):
    """The signs of those elements of a register that are not finite."""
    return e.both(e.add(e.both(x, EXPONENTS[storage]), CARRY[storage]), SIGNS[storage])


def cleared(e, storage: str, x):
    """A register with 0 for what is not finite."""
    if storage == "float32":  # and what would be rounded to infinity is finite
        value, limit = e.as_float(x), e.f32(LARGEST_TF32)
        near = e.fmax(e.fmin(value, limit), e.negative(limit))
        finite = e.b.fcmp_ordered("<", e.absolute(value), e.f32(INF))
        return e.b.bitcast(e.b.select(finite, near, e.f32(0)), I32)
    signs = carried(e, storage, x)
    # 0x8000 - 1 is 0x7FFF: the whole element
    return e.both(x, e.xor(e.b.or_(signs, e.sub(signs, e.shr(signs, 15))), -1))


def lost_steps(tiling: Tiling) -> dict:
    """look, clear and any_thread for values, by name."""
    return finite_steps(tiling.storage, Copy(Shapes.of(tiling).v, tiling.threads), waits=True)


def finite_steps(storage: str, copying: Copy, *, waits: bool) -> dict:
    """The same for the tile that these copies fill. waits: look() sees to their arrival."""
    tile = copying.tile

    @operation(storage, boolean, u32)
    def look(e, shared):
        """Whether a value is not finite among those that this thread has copied. shared: where to,
        as Copy.shared_address() has it.
        """
        if waits:
            e.wait(1)
        found = e.i32(0)
        for row, chunk in copying.passes():
            address, place = tile.moved(e, shared, row, chunk)
            for x in e.load_shared_16(address, place):
                found = e.b.or_(found, carried(e, storage, x))
        return e.b.icmp_unsigned("!=", found, e.i32(0))

    @operation(storage, void, u32)
    def clear(e, shared):
        """Make 0 of them."""
        for row, chunk in copying.passes():
            address, place = tile.moved(e, shared, row, chunk)
            finite = [cleared(e, storage, x) for x in e.load_shared_16(address, place)]
            e.store_shared(address, place, finite)

    @operation(storage, boolean, boolean)
    def any_thread(e, truth):
        """Whether it is true in any thread of the block; a barrier."""
        return e.any_thread(truth)

    return {"look": look, "clear": clear, "any_thread": any_thread}
