"""Dropout's random numbers on registers: the same as dropout.py's, to the bit."""

from __future__ import annotations

import numpy as np
from kernels import Guarded, everywhere, lanes_of, run

from fastattn import dropout

EDGES = [0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**63 - 1, 2**63, 2**64 - 1, dropout.GOLDEN]


def numbers(dtype):
    """Kernel (which, key, index, threshold, to): row_key(), or one register of kept()."""

    def build(unit):
        from fastattn.cpu.memory import pointer_to
        from fastattn.cpu.random import kept, row_key
        from fastattn.cpu.registers import ITEMSIZE, jit
        from fastattn.cpu.simd import operations

        lanes = unit.lanes(ITEMSIZE[dtype])
        simd, real, integers = operations(dtype, lanes), pointer_to(dtype), pointer_to("int64")
        keep, store, where = kept(dtype, lanes), simd.store, simd.where
        one, zero = getattr(np, dtype)(1), getattr(np, dtype)(0)

        @jit
        def body(job):
            key = integers(job[1])[0]
            if job[0] == 0:
                integers(job[4])[0] = np.int64(row_key(key, job[2]))
            else:
                truth = keep(np.uint64(key), job[2], job[3])
                store(real(job[4]), 0, where(truth, one, zero))

        return body

    return build


def call(machine, dtype, which, key, index, threshold, to):
    key = np.array([key], np.uint64)
    run(machine, ("numbers", dtype), numbers(dtype), which, key, index, threshold, to)
    to.check()
    return to.view


@everywhere
def test_row_key(machine, dtype, rng):
    for head_key in (*EDGES, *dropout.head_keys(7, 2, 3).ravel()):
        for i in (0, 1, 2, 1000, 2**31 - 1, 2**31, 2**40, int(rng.integers(1 << 40))):
            to = Guarded((1,), np.uint64, value=0)
            expected = dropout.chained(np.array([head_key], np.uint64), np.array([i]))
            assert call(machine, dtype, 0, head_key, i, 0, to)[0] == expected[0]


@everywhere
def test_kept(machine, dtype, rng):
    lanes = lanes_of(machine, dtype)
    keys = np.concatenate([np.array(EDGES, np.uint64), rng.integers(0, 1 << 63, 20, np.uint64)])
    # p = 1 drops all but one number of 2**32
    for dropout_p in (0.0, 1e-9, 0.1, 0.5, 0.999, 1.0):
        threshold = dropout.threshold(dropout_p)
        for key in keys:
            # the numbers repeat after 2**32 keys
            for first in (0, 1, 13, 2**31 - 3, 2**32 - 3, 2**40 + 1):
                j = first + np.arange(lanes)
                expected = dropout.kept(np.array([key], np.uint64), j, dropout_p)[0]
                to = Guarded((lanes,), dtype)
                got = call(machine, dtype, 1, key, first, threshold, to)
                np.testing.assert_array_equal(got, expected)


@everywhere
def test_kept_takes_the_share_that_it_should(machine, dtype):
    """And p = 0.25 keeps whatever p = 0.75 keeps: one number decides."""
    lanes, key = lanes_of(machine, dtype), dropout.head_keys(3, 1, 1)[0, 0]
    count = 4096 // lanes
    kept = [
        np.concatenate(
            [
                call(machine, dtype, 1, key, n * lanes, threshold, Guarded((lanes,), dtype))
                for n in range(count)
            ]
        )
        for threshold in (1 << 30, 3 << 30)
    ]
    assert abs(kept[0].mean() - 0.75) < 0.04
    assert abs(kept[1].mean() - 0.25) < 0.04
    assert (kept[1] <= kept[0]).all()


def number_of(key, j):
    """The number, of 2**32, that decides over key index j: the largest threshold that keeps it."""
    low, high = 0, 2**32
    while high - low > 1:
        middle = (low + high) // 2
        keeps = dropout.kept(np.array([key], np.uint64), np.array([j]), middle / 2**32)[0, 0]
        low, high = (middle, high) if keeps else (low, middle)
    return low


@everywhere
def test_kept_to_the_last_bit(machine, dtype):
    lanes = lanes_of(machine, dtype)
    for key in dropout.head_keys(5, 1, 3).ravel():
        for lane in range(lanes):
            number = number_of(key, 40 + lane)
            for threshold, keeps in ((number, 1), (number + 1, 0)):
                to = Guarded((lanes,), dtype)
                assert call(machine, dtype, 1, key, 40, threshold, to)[lane] == keeps
