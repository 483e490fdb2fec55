"""What products ask for while they multiply: memory that is wanted next, a line at each step.

Packing only copies, and so waits for memory; a product hardly reads any and has room for its lines.
"""

from __future__ import annotations

from .job import LINE, MOST_ASKS
from .memory import address, at, pointer_to
from .registers import jit

INTEGERS, BYTES = pointer_to("int64"), pointer_to("bool")
# A list: which of its entries is at work, how many there are, rows and lines of a row asked for of
# that entry; then the entries: address, bytes from row to row, rows, lines of a row.
ENTRY = 4


@jit
def forget(asks):
    """Begin a list."""
    for n in range(ENTRY):
        asks[n] = 0


@jit
def want(asks, place, step, rows, width):
    """Add `rows` rows of `width` bytes at this address, `step` bytes apart; MOST_ASKS in all."""
    if asks[1] == MOST_ASKS or rows <= 0 or width <= 0:
        return
    entry = at(asks, ENTRY * (1 + asks[1]))
    if step == width:  # in the order of memory
        step, rows, width = LINE, (rows * width + LINE - 1) // LINE, LINE
    entry[0], entry[1], entry[2], entry[3] = place, step, rows, (width + LINE - 1) // LINE
    asks[1] += 1


@jit
def take(asks, depth, here):
    """(pointer, step) of the lines that the next `depth` steps ask for: over and over the line
    `here` where there is nothing to ask for, or no list (null).
    """
    if address(asks) == 0 or asks[0] == asks[1]:
        return BYTES(address(here)), 0
    entry = at(asks, ENTRY * (1 + asks[0]))
    row, line, step = asks[2], asks[3], entry[1]
    place = entry[0] + line * LINE + row * step
    row += depth
    if row >= entry[2]:
        row, line = 0, line + 1
        if line == entry[3]:
            line = 0
            asks[0] += 1
    asks[2], asks[3] = row, line
    return BYTES(place), step
