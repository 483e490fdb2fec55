"""Threads of a block as Numba's simulator should run them: one at a time, from barrier to barrier.

The simulator itself lets them run at once, and two threads that ask for a shared array at the same
moment may get one each. Here an answer is the same in each run, and a missing barrier is seen: the
order of the threads changes from barrier to barrier, and shared memory starts as NaN.
"""

from __future__ import annotations

import contextlib
import random
import sys
import threading
from unittest import mock

import numpy as np
from numba.cuda.simulator import kernel, kernelapi


class Thread(kernel.BlockThread):
    """A thread of a block."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.may_run, self.has_stopped = threading.Semaphore(0), threading.Semaphore(0)
        self.at_barrier = False

    def run_on(self):
        """To the next barrier, or to the end."""
        self.at_barrier = False
        self.may_run.release()
        self.has_stopped.acquire()

    def run(self):
        self.may_run.acquire()
        super().run()
        self.has_stopped.release()

    def syncthreads(self):
        self.at_barrier = True
        self.has_stopped.release()
        self.may_run.acquire()


class Block(kernel.BlockManager):
    """A block of threads and its shared arrays."""

    def run(self, grid_point, *arguments):
        self.arrays = {}
        order = random.Random(0)
        threads = [
            Thread(lambda: self._f(*arguments), self, grid_point, place, self._debug)
            for place in np.ndindex(*self._block_dim)
        ]
        for thread in threads:
            thread.start()
        while threads:
            order.shuffle(threads)
            for thread in threads:
                thread.run_on()
                if thread.exception:
                    raise thread.exception[0].with_traceback(thread.exception[1])
            threads = [thread for thread in threads if thread.at_barrier]


def shared_array(shared, shape, dtype):
    """cuda.shared.array(): one for each line that asks."""
    arrays, line = threading.current_thread()._manager.arrays, sys._getframe(1)
    place = line.f_code, line.f_lineno
    if place not in arrays:
        arrays[place] = np.empty(shape, dtype)
        arrays[place].view(np.uint8)[:] = 0xFF
    return arrays[place]


@contextlib.contextmanager
def one_thread_at_a_time():
    """The simulator runs kernels like this here."""
    with (
        mock.patch.object(kernel, "BlockManager", Block),
        mock.patch.object(kernelapi.FakeCUDAShared, "array", shared_array),
    ):
        yield
