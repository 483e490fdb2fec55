"""What kernels read of their Job (cpu/job.py), and the numbers of one work item."""

from __future__ import annotations

from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from ..machine import VectorUnit
from .job import FLOATS, OFFSET
from .memory import address, at, fetch_add, load_acquire, pause, pointer_to
from .registers import FLOAT, I64, jit

# A work item's own numbers, ITEM_SIZE int64s at the start of its thread's scratch.
BATCH = 0
HEAD = 1  # key head
ROW = 2  # first row; row = query * group + head in group
COUNT = 3  # rows
OFFSET_IN_KEYS = 4  # query i stands at key position i + this
KEYS = 5  # keys of this batch entry
FIRST_KEY = 6  # where they start in k and v
FIRST_BIAS = 7  # where they start in mask and bias
FIRST_QUERY = 8  # where the queries start in q, out and lse
NUMBER = 9  # its place in the list of all
NEXT = 16  # from here on, the numbers of an item that this thread may do next
ASKS = 32  # and what products ask for: see asks.py

INTEGERS = pointer_to("int64")
PATIENCE = 1 << 12  # pauses, of 10 to 40 ns each: about the time that being woken by another takes


@intrinsic(prefer_literal=True)
def field(typingctx, job, name):
    """One field of the Job at this address, by name: float64 or int64."""
    is_float = name.literal_value in FLOATS
    kind, element = (types.float64, FLOAT["float64"]) if is_float else (types.int64, I64)

    def codegen(context, builder, sig, args):
        byte = ir.IntType(8).as_pointer()
        offset = ir.Constant(I64, OFFSET[name.literal_value])
        place = builder.gep(builder.bitcast(args[0], byte), [offset])
        return builder.load(builder.bitcast(place, element.as_pointer()))

    return kind(job, name), codegen


def drawing_items(do_item, unit: VectorUnit):
    """Return the kernel that draws work items and does them, do_item(job, number, scratch), until
    none is left (0) or `quota` of them are done (1). With a quota of 0 it waits a while for other
    threads to do theirs: 0 if all items are done.
    """
    relax = pause(unit)

    @jit
    def wait(done, num_items):
        for _ in range(PATIENCE):
            if load_acquire(done) >= num_items:
                return 0
            relax()
        return 1

    def kernel(job, scratch, quota):
        counter, num_items = INTEGERS(field(job, "counter")), field(job, "num_items")
        done = at(counter, 1)
        if quota == 0:
            return wait(done, num_items)
        while quota > 0:
            number = fetch_add(counter, 1)
            if number >= num_items:
                return 0
            do_item(job, number, address(scratch))
            fetch_add(done, 1)
            quota -= 1
        return 1

    return kernel


@jit
def batch_offset(table, stride, b):
    """Elements from the start of an operand to batch b."""
    return INTEGERS(table)[b] if table != 0 else b * stride


@jit
def next_row(i, r, group):
    """(query, head in group) of the next row. Dividing for each costs 7 % at 128 keys."""
    last = r + 1 == group
    return (i + 1, 0) if last else (i, r + 1)


@jit
def low_key(job, position):
    """First key that window and chunk let a query at this position see. Grows with the position."""
    low = position - field(job, "left")
    chunk, before = field(job, "chunk"), field(job, "keys_before")
    if chunk != 0:
        low = max(low, (position + before) // chunk * chunk - before)
    return max(low, 0)


@jit
def high_key(job, position, keys):
    """The key after the last that it may see, of `keys`. Grows with the position."""
    high = min(position + field(job, "right") + 1, keys)
    chunk, before = field(job, "chunk"), field(job, "keys_before")
    if chunk != 0:
        high = min(high, ((position + before) // chunk + 1) * chunk - before)
    return high
