"""Threads of a block as Numba's simulator should run them: one at a time, from barrier to barrier.

The simulator itself lets them run at once, which finds races by chance, and two threads that ask
for a shared array at the same moment may get one each. Here an answer is the same in each run, and
what barriers must order is looked at with each access to shared memory.
"""

from __future__ import annotations

import contextlib
import random
import sys
import threading
from pathlib import Path
from typing import ClassVar
from unittest import mock

import numpy as np
from numba.cuda.simulator import kernel, kernelapi

import fastattn.cuda

KERNELS = str(Path(fastattn.cuda.__file__).parent)
Barrier = tuple[str, int]  # the file that has it, and its line


class SharedMemoryError(Exception):
    """A race, a read of what nobody wrote, or a place that does not exist."""


class Thread(kernel.BlockThread):
    """A thread of a block."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.may_run, self.has_stopped = threading.Semaphore(0), threading.Semaphore(0)
        self.barrier: Barrier | None = None  # where it waits
        self.arrays = 0  # that it has asked for
        self.vote = False

    def run_on(self):
        """To the next barrier, or to the end."""
        self.barrier = None
        self.may_run.release()
        self.has_stopped.acquire()

    def run(self):
        self.may_run.acquire()
        super().run()
        self.has_stopped.release()

    def syncthreads(self):
        frame = sys._getframe(1)
        while not frame.f_code.co_filename.startswith(KERNELS):
            frame = frame.f_back
        self.barrier = Path(frame.f_code.co_filename).name, frame.f_lineno
        self.has_stopped.release()
        self.may_run.acquire()

    def syncthreads_or(self, value):
        self.vote = bool(value)
        self.syncthreads()
        return self._manager.any_vote


class Block(kernel.BlockManager):
    """A block of threads and its shared arrays."""

    missing: ClassVar[Barrier | None] = None  # the one that is taken to order nothing
    needed: ClassVar[set[Barrier]] = set()  # those without which there would have been a race

    def run(self, grid_point, *arguments):
        self.arrays: list[SharedArray] = []
        self.barriers: list[Barrier | None] = [None]  # that all threads have come to
        self.any_vote = False
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
                self.running = thread
                thread.run_on()
                if thread.exception:
                    raise thread.exception[0].with_traceback(thread.exception[1])
            barriers = {thread.barrier for thread in threads}
            if None in barriers:
                if len(barriers) > 1:
                    raise SharedMemoryError("a barrier that not all threads reach")
                return
            self._meet(threads, barriers)

    def _meet(self, threads, barriers):
        self.any_vote = any(thread.vote for thread in threads)
        for thread in threads:
            thread.vote = False
        if len(barriers) > 1:
            raise SharedMemoryError(f"threads at different barriers: {sorted(barriers)}")
        (barrier,) = barriers
        if barrier != Block.missing:
            self.barriers.append(barrier)

    def race(self, thread, time):
        """Whether no barrier orders a thread's access at this time before one now of the running
        thread. If one alone does, it is needed.
        """
        if thread is self.running:
            return False
        if time == len(self.barriers) - 1:
            Block.needed.add(self.barriers[-1])
        return time == len(self.barriers)


class SharedArray:
    """Numbers in shared memory: of each the last write, and each thread's last read since then."""

    def __init__(self, block: Block, size: int, dtype: type):
        self.block, self.dtype = block, dtype
        self.values = [None] * size
        self.writes: list[tuple[Thread | None, int]] = [(None, -1)] * size
        self.reads: list[dict[Thread, int]] = [{} for _ in range(size)]

    def _place(self, index):
        if not 0 <= index < len(self.values):
            raise SharedMemoryError(f"place {index} of {len(self.values)} in shared memory")
        return int(index)

    def __getitem__(self, index):
        i, block = self._place(index), self.block
        if self.values[i] is None:
            raise SharedMemoryError("read of shared memory that nothing has written")
        if block.race(*self.writes[i]):
            raise SharedMemoryError("race: read of what another thread has written")
        self.reads[i][block.running] = len(block.barriers)
        return self.values[i]

    def __setitem__(self, index, value):
        i, block = self._place(index), self.block
        if block.race(*self.writes[i]):
            raise SharedMemoryError("race: write over what another thread has written")
        racing = [block.race(*read) for read in self.reads[i].items()]  # each says what is needed
        if any(racing):
            raise SharedMemoryError("race: write over what another thread may still read")
        self.values[i] = self.dtype(value)
        self.writes[i] = block.running, len(block.barriers)
        self.reads[i].clear()


def shared_array(shared, size, dtype):
    """cuda.shared.array(): all threads ask for the same ones, one after another."""
    thread = threading.current_thread()
    block, number = thread._manager, thread.arrays
    thread.arrays += 1
    if number == len(block.arrays):
        block.arrays.append(SharedArray(block, size, dtype))
    return block.arrays[number]


@contextlib.contextmanager
def one_thread_at_a_time():
    """The simulator runs kernels like this here."""
    with (
        mock.patch.object(kernel, "BlockManager", Block),
        mock.patch.object(kernelapi.FakeCUDAShared, "array", shared_array),
    ):
        yield
