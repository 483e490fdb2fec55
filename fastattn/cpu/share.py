"""The shares of a job that threads take, and the scratch memory that each needs."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from ctypes import Array, addressof
from typing import Any, NamedTuple

from .. import guards
from ..machine import VectorUnit
from . import compile, threads
from .image import entry_of
from .job import LINE, NO_MORE, PLACE, Body
from .mailbox import Direct
from .scratch import SCRATCH_KEPT, aligned, take

BODY, AWAKE = "body of a region", "awake"  # keys of kernels
# In a region, all threads wait for the last before Python acts: less often, every 20 to 200 ms.
CALLS_A_REGION = 4


class Share(NamedTuple):
    """A kernel's job and all the memory it reaches, which lives as long as a thread works on it."""

    kernel: compile.Kernel
    job: Array
    counter: Array  # a Counter
    scratch_bytes: int
    keep: tuple[Any, ...]

    def run(self, num_threads: int, items_per_call: int) -> None:
        """Run the kernel on the job's items until none is left.

        Raises MemoryError before it has begun if this thread finds no scratch; pool threads that
        find none leave their items to others.
        """
        region = None if num_threads == 1 or guards.ON else threads.lent()
        body = None if region is None else _body()
        if region is not None and body is not None:
            self._run_in(region, body, num_threads, CALLS_A_REGION * items_per_call)
            return
        kernel = self._guarded if guards.ON else self.kernel
        mine = take(self.scratch_bytes)
        if num_threads == 1:
            run_until_done(kernel, self.job, mine[1], items_per_call, self.counter)
            return
        caller = threading.get_ident()

        def work() -> None:
            scratch = mine
            if threading.get_ident() != caller:
                try:
                    scratch = take(self.scratch_bytes)
                except MemoryError:
                    return
            run_until_done(kernel, self.job, scratch[1], items_per_call, self.counter)

        if guards.ON:  # nobody would hear of damage that a thread finds once the others are done
            threads.run_on_threads(work, num_threads)
            return
        entry = functools.partial(entry_of, self.kernel)
        direct = Direct(entry, addressof(self.job), self.scratch_bytes, self, _awake)
        threads.run_on_threads(work, num_threads, self.is_done, direct)

    def _run_in(
        self, region: threads.Region, body: compile.Kernel, num_threads: int, quota: int
    ) -> None:
        """The same on the threads of another library."""
        stride = (self.scratch_bytes + LINE - 1) & -LINE
        _, scratch = take(num_threads * stride + LINE, num_threads * SCRATCH_KEPT)
        entry, job = entry_of(self.kernel), addressof(self.job)
        data = Body(0, entry.address, job, scratch, stride, quota, region.thread_number, 0)
        while self.counter[1] < self.job[PLACE["num_items"]]:
            region.open(entry_of(body).address, addressof(data), num_threads)
            if data[-1]:
                raise entry.failure(data[-1])

    def is_done(self) -> bool:
        """Wait a while; return whether all items are done."""
        return not self.kernel(addressof(self.job), 0, 0)

    def _guarded(self, job: int, scratch: int, items_per_call: int) -> int:
        """The kernel, for one item, in scratch of its own, between guards."""
        own = guards.Guarded(self.scratch_bytes)
        left = self.kernel(job, aligned(own.memory), 1)
        own.check("scratch")
        return left


def run_until_done(
    kernel: Callable[[int, int, int], int],
    job: Array,
    scratch: int,
    items_per_call: int,
    counter: Any,
    keep: Any = None,
) -> None:
    """Run a kernel on its job until no item is left. `keep` is memory that it reaches."""
    try:
        place = addressof(job)
        while kernel(place, scratch, items_per_call):
            pass
    except BaseException:  # an interrupt: the other threads need not finish the job
        counter[0] = NO_MORE
        raise


def run_alone(kernel: compile.Kernel, job: Array, scratch_bytes: int, items_per_call: int) -> None:
    """Run a kernel on all items of a job that no other thread has: Share.run() without what others
    need, 0.6 us of a small call. guards.ON must be off.

    Raises MemoryError before it has begun if this thread finds no scratch.
    """
    place, (_memory, scratch) = addressof(job), take(scratch_bytes)
    while kernel(place, scratch, items_per_call):
        pass


@functools.cache
def _body() -> compile.Kernel | None:
    """The body of a parallel region; None where it would have to be compiled and cannot be."""
    return None if compile.unavailable(BODY) else compile.kernel(BODY, body_builder)


def body_builder(unit: VectorUnit) -> Callable:
    """What builds the kernel BODY."""
    from .region import body_kernel

    return body_kernel(unit)


@functools.cache
def _awake() -> compile.Kernel | None:
    """What a pool thread waits awake in; None as above."""
    return None if compile.unavailable(AWAKE) else compile.kernel(AWAKE, awake_builder)


def awake_builder(unit: VectorUnit) -> Callable:
    """What builds the kernel AWAKE."""
    from .awake import awake_kernel

    return awake_kernel(unit)
