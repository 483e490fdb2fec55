"""A pool thread that waits awake, and those who hand it shares: see mailbox.py."""

from __future__ import annotations

from numba.core import types
from numba.extending import intrinsic

from ..machine import VectorUnit
from .fields import INTEGERS
from .mailbox import (
    A_WHILE,
    CLOSED,
    ENDED,
    JOB,
    KERNEL,
    LEAVE,
    LETTER,
    NOT_POSTED,
    OPEN,
    POST,
    POSTED,
    SCRATCH,
    STATE,
    STATUS,
    TAKEN,
    WITHDRAW,
)
from .memory import address, at, load_acquire, pause, store_release, swap
from .region import call_kernel
from .registers import I64, jit

ALL = 1 << 62  # a quota that no job reaches: a pool thread need not return for Python to act


@intrinsic
def _status_of(typingctx, kernel, job, scratch, quota):
    """Call the kernel at this address."""

    def codegen(context, builder, sig, args):
        return builder.sext(call_kernel(builder, *args), I64)

    return types.int64(*[types.int64] * 4), codegen


@jit
def _post(box, place):
    letter = INTEGERS(place)
    store_release(at(letter, STATE), POSTED)
    if swap(at(box, LETTER), OPEN, place):
        return 1
    store_release(at(letter, STATE), NOT_POSTED)
    return 0


@jit
def _withdraw(box, place):
    if swap(at(box, LETTER), place, OPEN):
        store_release(at(INTEGERS(place), STATE), NOT_POSTED)
        return 1
    return 0


@jit
def _run(box, place):
    letter = INTEGERS(place)
    letter[STATUS] = _status_of(letter[KERNEL], letter[JOB], box[SCRATCH], ALL)
    store_release(at(letter, STATE), ENDED)  # from here on, the letter may be gone
    store_release(at(box, LETTER), OPEN)


def awake_kernel(unit: VectorUnit):
    """Return the kernel.

    (mailbox, 0, looks > 0)  run what is posted until nothing has come for that many; then close it;
                             how many
    (mailbox, letter, POST), (mailbox, letter, WITHDRAW)  1 if the mailbox was open, or still had it
    (letter, 0, HAS_ENDED)   1 if no thread has the letter, or if it gives it up within A_WHILE
    """
    relax = pause(unit)

    @jit
    def wait(box, most):
        looks, ran = most, 0
        while True:
            place = load_acquire(at(box, LETTER))
            if place != OPEN:
                if swap(at(box, LETTER), place, TAKEN):
                    _run(box, place)
                    looks, ran = most, ran + 1
            elif looks > 0 and load_acquire(at(box, LEAVE)) == 0:
                looks -= 1
                relax()
            elif swap(at(box, LETTER), OPEN, CLOSED):
                return ran

    @jit
    def has_ended(letter):
        for _ in range(A_WHILE):
            if load_acquire(at(letter, STATE)) != POSTED:
                return 1
            relax()
        return 0

    def kernel(job, scratch, quota):
        words = INTEGERS(address(job))
        if quota > 0:
            return wait(words, quota)
        if quota == POST:
            return _post(words, address(scratch))
        if quota == WITHDRAW:
            return _withdraw(words, address(scratch))
        return has_ended(words)

    return kernel
