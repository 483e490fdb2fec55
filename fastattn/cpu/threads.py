"""The thread pool: work stealing over an atomic counter, aware of fork.

Numba's own threading is not used: its workqueue layer aborts the process when two Python threads
enter it and its OpenMP layer kills forked children. Kernels are serial and release the GIL; every
thread runs the same loop over one counter.
"""

from __future__ import annotations

import contextlib
import contextvars
import os
import queue
import threading
from collections.abc import Callable, Iterator

from ..machine import default_num_threads

_limit: int | None = None  # set_num_threads; None = the machine's default
_scope: contextvars.ContextVar[int | None] = contextvars.ContextVar(
    "fastattn_num_threads", default=None
)
_nested = threading.local()


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
    _limit = _checked(n)


@contextlib.contextmanager
def num_threads(n: int) -> Iterator[None]:
    """Limit the threads of the calls inside a `with` block, in this thread or task only.

    Raises as set_num_threads does.
    """
    token = _scope.set(_checked(n))
    try:
        yield
    finally:
        _scope.reset(token)


def _checked(n: int) -> int:
    if not isinstance(n, int) or isinstance(n, bool):
        raise TypeError(f"num_threads must be an int, got {n!r}")
    if n < 1:
        raise ValueError(f"num_threads must be at least 1, got {n}")
    return n


class _Task:
    """One share of a job: claimed by a pool thread, or withdrawn by the caller before that."""

    __slots__ = ("_claim", "_done", "error", "work")

    def __init__(self, work: Callable[[], object]):
        self.work = work
        self.error: BaseException | None = None
        self._claim = threading.Lock()
        self._done = threading.Lock()
        self._done.acquire()

    def run(self) -> None:
        if not self._claim.acquire(blocking=False):
            return  # withdrawn
        try:
            self.work()
        except BaseException as error:  # reaches the caller through finish()
            self.error = error
        finally:
            self._done.release()

    def finish(self) -> None:
        """Withdraw the share if it has not begun, else wait for it."""
        if not self._claim.acquire(blocking=False):
            self._done.acquire()
            if self.error is not None:
                raise self.error


_tasks: queue.SimpleQueue[_Task] = queue.SimpleQueue()
_workers = 0
_grow = threading.Lock()


def _worker(tasks: queue.SimpleQueue[_Task]) -> None:
    _nested.inside = True
    while True:
        tasks.get().run()


def _ensure_workers(count: int) -> None:
    """Start pool threads until there are `count`. They are daemons: they hold nothing that needs
    an orderly end.
    """
    global _workers
    with _grow:
        while _workers < count:
            threading.Thread(target=_worker, args=(_tasks,), name="fastattn", daemon=True).start()
            _workers += 1


def _reset_after_fork() -> None:
    """In a forked child only the forking thread lives: forget the parent's pool and its locks."""
    global _tasks, _workers, _grow
    _tasks, _workers, _grow = queue.SimpleQueue(), 0, threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reset_after_fork)


def run_on_threads(work: Callable[[], object], count: int) -> None:
    """Run work() on up to `count` threads at once, this one included, and return when every run has
    ended.

    work() must share out its items through a counter, so that fewer runs than `count` also finish
    the job: calls from inside the pool and calls while the interpreter shuts down run on the
    calling thread alone.
    """
    shares: list[_Task] = []
    if count > 1 and not getattr(_nested, "inside", False):
        try:
            _ensure_workers(count - 1)
        except (
            RuntimeError
        ):  # no new thread can be started: at interpreter shutdown, or past a system limit
            count = _workers + 1
        shares = [_Task(work) for _ in range(count - 1)]
        for share in shares:
            _tasks.put(share)
    try:
        work()
    finally:
        for share in shares:
            share.finish()
