"""Handing a share of a job to a pool thread that waits awake: no step of it needs Python's lock.

The thread waits, and runs what it finds, in one call of a kernel: awake.py. A share is a letter,
whose address a caller puts into the thread's mailbox if that is open.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from .job import LINE

if TYPE_CHECKING:
    import numpy as np

    from .image import Entry, Kernel

LOOKS = 1 << 12  # for the next share, of 10 to 40 ns each
# For the end of a share whose items are all done: the thread is on its way out, and if nobody
# waited, the result's memory could not be used for that of the next call.
A_WHILE = 1 << 8
NAP = 50e-6  # seconds from one look for the end of a share to the next
# Words of a mailbox. The first holds the address of a letter, or one of the three below it.
LETTER, LEAVE, SCRATCH, MAILBOX_WORDS = range(4)
CLOSED, OPEN, TAKEN = range(3)
# Words of a letter, and what the first may hold.
STATE, KERNEL, JOB, STATUS, LETTER_WORDS = range(5)
NOT_POSTED, POSTED, ENDED = range(3)
# What the kernel does instead of waiting, as its quota.
POST, WITHDRAW, HAS_ENDED = 0, -1, -2
_Words, _Letter = ctypes.c_int64 * MAILBOX_WORDS, ctypes.c_int64 * LETTER_WORDS


class Direct(NamedTuple):
    """A share as the call of a kernel that ends when no item is left."""

    entry: Callable[[], Entry]  # finds where the kernel begins
    job: int  # its address
    scratch_bytes: int
    keep: Any  # all that it reaches
    awake: Callable[[], Kernel | None]  # finds the kernel of awake.py


class Mailbox:
    """Of one pool thread."""

    def __init__(self) -> None:
        # Cache lines of its own: while the thread looks there, nobody should write beside it.
        self._memory = ctypes.create_string_buffer(3 * LINE)
        self.place = (ctypes.addressof(self._memory) + LINE - 1) & -LINE
        self._words = _Words.from_address(self.place)
        self._scratch_bytes = 0
        self._late: set[Letter] = set()  # each step on it is atomic

    def is_open(self, scratch_bytes: int) -> bool:
        """Whether the thread waits, with so much scratch."""
        return self._words[LETTER] == OPEN and self._scratch_bytes >= scratch_bytes

    def leave(self) -> None:
        """Let the thread not wait any longer."""
        self._words[LEAVE] = 1

    def stay(self) -> None:
        """By its thread, before wait(): forget leave()."""
        self._words[LEAVE] = 0

    def wait(self, kernel: Kernel, memory: np.ndarray, scratch: int) -> int:
        """By its thread: run what is posted until nothing has come for a while; return how many.

        memory   holds scratch, which begins there. While the interpreter shuts down, nothing but
                 this call may keep it, and the kernel.
        """
        self._words[SCRATCH], self._scratch_bytes = scratch, memory.nbytes
        self._words[LETTER] = OPEN
        ran = kernel(self.place, 0, LOOKS)
        self._late.clear()
        return ran

    def keep_until_ended(self, letter: Letter) -> None:
        """Keep a letter alive whose end nobody waits for."""
        self._late.add(letter)

    def forget_ended(self) -> None:
        """Keep none longer than that."""
        for letter in tuple(self._late):
            if letter.has_ended():
                self._late.discard(letter)


class Letter:
    """A share for a mailbox. An interrupt may come between any two steps: calling withdraw() or
    settle() again is right after each.
    """

    def __init__(self, mailbox: Mailbox, direct: Direct, kernel: Kernel):
        self._mailbox, self._direct, self._kernel = mailbox, direct, kernel
        self._entry = direct.entry()
        self._words = _Letter(NOT_POSTED, self._entry.address, direct.job)
        self._place = ctypes.addressof(self._words)

    def post(self) -> bool:
        """Put it into the mailbox; return whether that was open."""
        self._mailbox.forget_ended()
        return bool(self._kernel(self._mailbox.place, self._place, POST))

    def withdraw(self) -> bool:
        """Let the share not begin any more; return whether it had not. It may run on."""
        self._take_back()
        if self._words[STATE] == POSTED and not self.has_ended():
            self._mailbox.keep_until_ended(self)
        return self._words[STATE] == NOT_POSTED

    def settle(self) -> None:
        """Withdraw the share if it has not begun, else wait for its end."""
        self._take_back()
        while not self.has_ended():
            time.sleep(NAP)

    def _take_back(self) -> None:
        if self._words[STATE] == POSTED:
            self._kernel(self._mailbox.place, self._place, WITHDRAW)

    def has_ended(self) -> bool:
        """Whether no thread runs it, nor will; where one does, wait a little for its end."""
        return bool(self._kernel(self._place, 0, HAS_ENDED))

    @property
    def error(self) -> BaseException | None:
        """Of a share that has ended."""
        status = self._words[STATUS]
        return self._entry.failure(status) if status else None
