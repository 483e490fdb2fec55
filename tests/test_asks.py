"""Which lines products ask for, of rows that are wanted next."""

from __future__ import annotations

import numpy as np
import pytest
from kernels import machines, run

from fastattn.cpu.job import ITEM_SIZE, MOST_ASKS

pytest.importorskip("numba")
pytestmark = pytest.mark.skipif(not machines(), reason="kernels need AVX2 or NEON")
DEPTHS = (64, 7, 1, 200)


def asking(unit):
    """Kernel: a list of entries (address, step, rows, width), then what take() gives out of it."""
    from fastattn.cpu.asks import INTEGERS, forget, take, want
    from fastattn.cpu.memory import address
    from fastattn.cpu.registers import jit

    @jit
    def body(job):
        asks, entries, depths, found = (
            INTEGERS(job[0]),
            INTEGERS(job[1]),
            INTEGERS(job[3]),
            INTEGERS(job[5]),
        )
        forget(asks)
        for n in range(job[2]):
            want(asks, entries[4 * n], entries[4 * n + 1], entries[4 * n + 2], entries[4 * n + 3])
        for n in range(job[4]):
            place, step = take(INTEGERS(job[6]), depths[n], INTEGERS(job[7]))
            found[2 * n], found[2 * n + 1] = address(place), step

    return body


def asked(entries, depths, null=False):
    """[(address, step)] of takes of these depths; `here` is 5."""
    asks, found = np.full(ITEM_SIZE, -1), np.zeros((len(depths), 2), np.int64)
    given, depths = np.array(entries, np.int64).reshape(-1, 4), np.array(depths)
    sizes = given, len(given), depths, len(depths), found
    run(machines()[0], "asks", asking, asks, *sizes, 0 if null else asks, 5)
    return found.tolist()


@pytest.mark.parametrize("depth", DEPTHS)
def test_each_line_of_each_row_is_asked_for_once(depth):
    entries = [(4096, 1000, 50, 256), (1 << 20, 96, 30, 96), (1 << 30, -640, 3, 20)]
    lines = [4096 + 1000 * row + line for row in range(50) for line in range(0, 256, 64)]
    lines += [(1 << 20) + place for place in range(0, 30 * 96, 64)]  # one behind the other
    lines += [(1 << 30) - 640 * row for row in range(3)]
    takes = 4 * -(-50 // depth) + -(-45 // depth) + -(-3 // depth)
    found = asked(entries, [depth] * (takes + 1))
    assert found.pop() == [5, 0]
    places = [place + n * step for place, step in found for n in range(depth)]
    assert [place for place in lines if places.count(place) != 1] == []


def test_nothing_is_asked_for_without_a_list_or_rows():
    nothing = [[5, 0]] * 2
    assert asked([(4096, 64, 9, 64)], [8, 8], null=True) == nothing
    assert asked([], [8, 8]) == nothing
    assert asked([(4096, 64, 0, 64), (4096, 64, -3, 64), (4096, 64, 9, 0)], [8, 8]) == nothing


def test_a_list_holds_no_more_than_its_place():
    entries = [(4096 * (n + 1), 0, 1, 4) for n in range(MOST_ASKS + 2)]
    found = asked(entries, [1] * (MOST_ASKS + 1))
    assert [place for place, _ in found] == [4096 * (n + 1) for n in range(MOST_ASKS)] + [5]
