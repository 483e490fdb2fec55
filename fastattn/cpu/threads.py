"""The thread pool: work stealing over an atomic counter, aware of fork.

Numba's own threading is not used: its workqueue layer aborts the process when two Python threads
enter it and its OpenMP layer kills forked children. Kernels are serial and release the GIL; every
thread runs the same loop over one counter.
"""

from __future__ import annotations

import contextlib
import contextvars
import ctypes
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from ..arguments import count
from ..machine import default_num_threads
from . import scratch
from .mailbox import Direct, Letter, Mailbox

if TYPE_CHECKING:
    from .image import Kernel

# With more pool threads, one that shares its CPU costs less than moving all of them.
KEEP_OFF = 16
# A pool thread waits awake for its next share (8 heads of 128 tokens: 127 -> 100 us) after so many
# calls in a row, each AT_ONCE after the one before. A BLAS that is called next finds its CPU taken
# for 60 us. So after a wait that brings fewer shares than that there is none for a time, and after
# each further one for twice as long.
AWAKE_AFTER = 4
AT_ONCE = 100_000  # ns, about mailbox.LOOKS
NO_WAIT, NO_WAIT_AT_MOST = 5_000_000, 80_000_000  # ns
IN_A_CALL = 1 << 62

_limit: int | None = None  # set_num_threads; None = the machine's default
_scope: contextvars.ContextVar[int | None] = contextvars.ContextVar(
    "fastattn_num_threads", default=None
)
_this_thread = threading.local()
_PASSIVE = os.environ.get("OMP_WAIT_POLICY", "").lower() == "passive"


def get_num_threads() -> int:
    """Threads that a call made here would use at most."""
    return _scope.get() or _limit or default_num_threads()


def set_num_threads(n: int) -> None:
    """Set the number of threads for all calls in this process.

    Parameters
    ----------
    n : int >= 1. More than the CPUs of the machine only adds overhead.

    Raises
    ------
    TypeError    n is no int
    ValueError   n is less than 1
    """
    global _limit
    _limit = count("num_threads", n, 1)


@contextlib.contextmanager
def num_threads(n: int) -> Iterator[None]:
    """Limit the threads of the calls inside a `with` block, in this thread or task only.

    Raises as set_num_threads does.
    """
    token = _scope.set(count("num_threads", n, 1))
    try:
        yield
    finally:
        _scope.reset(token)


class Region(NamedTuple):
    """Threads of another library, which run the body of a parallel region all at once."""

    open: Callable[[int, int, int], None]  # (address of body, of its data, threads): when all end
    thread_number: int  # address of the C function that tells a thread its number, from 0 on


def lend(region: Region | None) -> None:
    """Let kernels called in this thread run on another library's threads, until lend(None)."""
    _this_thread.region = region


def lent() -> Region | None:
    """What was lent to this thread."""
    return getattr(_this_thread, "region", None)


class _Share:
    """One share of a job: begun by a pool thread, or withdrawn by the caller before that."""

    __slots__ = ("_claims", "_ended", "_lock", "error", "work")

    def __init__(self, work: Callable[[], object]):
        self.work = work
        self.error: BaseException | None = None
        # Whoever stands first owns the share: append is atomic, and asking again changes nothing.
        self._claims: list[str] = []
        self._ended = False
        self._lock = threading.Lock()  # held until the run has ended
        self._lock.acquire()

    def run(self) -> None:
        """In the pool: run the share unless it was withdrawn."""
        self._claims.append("pool")
        if self._claims[0] != "pool":
            return
        try:
            self.work()
        except BaseException as error:  # reaches the caller through run_on_threads()
            self.error = error
        finally:
            self._ended = True
            self._lock.release()

    def withdraw(self) -> bool:
        """By the caller: let the share not begin any more; return whether it had not."""
        self._claims.append("caller")
        if self._claims[0] != "caller":
            return False
        self.work = int  # the queue may keep the share for a while, but not what it works on
        return True

    def settle(self) -> None:
        """By the caller: withdraw the share if it has not begun, else wait for its end.

        An interrupt may come between any two steps; calling again is right after each.
        """
        if not self.withdraw() and not self._ended:
            self._lock.acquire()


_tasks: queue.SimpleQueue[_Share] = queue.SimpleQueue()
_workers: list[threading.Thread] = []
_mailboxes: list[Mailbox] = []
_at_once = 0  # calls in a row, each of which came at once after the one before
_last_end = 0  # of a call, ns; IN_A_CALL while one has not ended
_no_wait = NO_WAIT  # after the next wait in vain, ns
_wait_from = 0  # ns
_awake: Callable[[], Kernel | None]  # once there was a call to count
_grow = threading.Lock()
_shunned = -1  # the CPU that pool threads may not run on


def _worker(tasks: queue.SimpleQueue[_Share], mailbox: Mailbox) -> None:
    _this_thread.inside = True
    while True:
        tasks.get().run()
        mailbox.stay()
        if _at_once >= AWAKE_AFTER and tasks.empty():
            _wait_awake(mailbox)


def _wait_awake(mailbox: Mailbox) -> None:
    """Run the shares that are posted until none comes any more, unless it was in vain of late."""
    global _no_wait, _wait_from
    if time.perf_counter_ns() < _wait_from or (kernel := _awake()) is None:
        return
    if mailbox.wait(kernel, *scratch.kept()) >= AWAKE_AFTER:
        _no_wait = NO_WAIT
    else:
        _wait_from = time.perf_counter_ns() + _no_wait
        _no_wait = min(2 * _no_wait, NO_WAIT_AT_MOST)


def _ensure_workers(count: int) -> None:
    """Start pool threads until there are `count`. They are daemons: they hold nothing that needs
    an orderly end.
    """
    global _shunned
    with _grow:
        while len(_workers) < count:
            mailbox = Mailbox()
            thread = threading.Thread(
                target=_worker, args=(_tasks, mailbox), name="fastattn", daemon=True
            )
            thread.start()
            _workers.append(thread)
            _mailboxes.append(mailbox)
            _shunned = -1


def _reset_after_fork() -> None:
    """In a forked child only the forking thread lives: forget the parent's pool and its locks."""
    global _tasks, _workers, _grow, _mailboxes
    _tasks, _workers, _grow, _mailboxes = queue.SimpleQueue(), [], threading.Lock(), []


def _current_cpu() -> Callable[[], int] | None:
    """The C library's sched_getcpu(), where threads can also be kept off a CPU."""
    if not hasattr(os, "sched_setaffinity"):
        return None
    try:
        # PyDLL: releasing the GIL would cost more than the call.
        return ctypes.PyDLL(None).sched_getcpu
    except (AttributeError, OSError, TypeError):
        return None


_getcpu = _current_cpu()


def _keep_off_this_cpu() -> None:
    """Let no pool thread run on the calling thread's CPU, where it would wait for this one to end.

    Linux may wake it there although another CPU is idle: under a hypervisor, which takes an idle
    CPU away, always (12 heads of 512 on two virtual CPUs: 8.7 ms, as on one thread, for 4.4).
    """
    global _shunned
    if _getcpu is None or len(_workers) > KEEP_OFF:
        return
    cpu = _getcpu()
    if cpu == _shunned:
        return
    others = os.sched_getaffinity(0) - {cpu}
    if others:
        with contextlib.suppress(OSError):  # not permitted: the system places threads as it likes
            for thread in _workers:
                if thread.native_id is not None:
                    os.sched_setaffinity(thread.native_id, others)
    _shunned = cpu


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reset_after_fork)


def run_on_threads(
    work: Callable[[], object],
    count: int,
    is_done: Callable[[], bool] | None = None,
    direct: Direct | None = None,
) -> None:
    """Run work() on up to `count` threads at once, this one included, and return when every run has
    ended: also if one raises, and if Ctrl-C interrupts the wait.

    is_done() is asked after this thread's run, and should wait a little where others still work: if
    all is done, nobody waits for their ends (some 30 us), nor hears of their errors. `direct` is
    work() for a thread that waits awake.

    work() must share out its items through a counter, so that fewer runs than `count` also finish
    the job: calls from inside the pool and calls while the interpreter shuts down run on the
    calling thread alone. It should hold a reference to all memory that it touches: Python may
    interrupt this function anywhere, so the caller's references alone would not be enough.
    """
    shares: list[_Share | Letter] = []
    try:
        if count > 1 and not getattr(_this_thread, "inside", False):
            _note_begin(count, direct)
            _share_out(work, count - 1, shares, direct)
        work()
        if shares and is_done is not None and is_done():
            for share in shares:
                share.withdraw()
            shares.clear()
    finally:
        _settle(shares)
        _note_end()
    for share in shares:
        if share.error is not None:
            raise share.error


def _note_begin(count: int, direct: Direct | None) -> None:
    """Count a call that came at once, alone, can be posted and has a CPU for each thread."""
    global _at_once, _last_end, _awake
    gap, _last_end = time.perf_counter_ns() - _last_end, IN_A_CALL
    if direct is None or not 0 <= gap < AT_ONCE or count > default_num_threads() or _PASSIVE:
        _at_once = 0
    else:
        _at_once, _awake = _at_once + 1, direct.awake


def _note_end() -> None:
    global _last_end
    _last_end = time.perf_counter_ns()


def _share_out(
    work: Callable[[], object], count: int, shares: list[_Share | Letter], direct: Direct | None
) -> None:
    """Hand `count` shares to the pool, each entered in `shares` before a thread can see it."""
    try:
        _ensure_workers(count)
    except RuntimeError:  # no thread can be started: at shutdown, or past a system limit
        count = min(count, len(_workers))
    _keep_off_this_cpu()
    others = _mailboxes
    if direct is not None:
        count, others = _post(direct, count, shares)
    for _ in range(count):
        share = _Share(work)
        shares.append(share)
        _tasks.put(share)
    if count:
        for mailbox in others:
            mailbox.leave()


def _post(direct: Direct, count: int, shares: list[_Share | Letter]) -> tuple[int, list[Mailbox]]:
    """Post shares to threads that wait awake; return how many of `count` are left, and the
    mailboxes of the other threads.
    """
    others = []
    for mailbox in _mailboxes:
        if count and mailbox.is_open(direct.scratch_bytes) and (kernel := direct.awake()):
            letter = Letter(mailbox, direct, kernel)
            shares.append(letter)
            if letter.post():
                count -= 1
                continue
        others.append(mailbox)
    return count, others


def _settle(shares: list[_Share | Letter]) -> None:
    """Return when no share runs any more, and raise only then what interrupted the wait."""
    interrupt = None
    while True:
        try:
            for share in shares:
                share.settle()
            break
        except BaseException as error:
            interrupt = error
    if interrupt is not None:
        raise interrupt
