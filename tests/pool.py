"""Helpers of tests that use the thread pool, interrupt it or fork."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest

from fastattn.cpu import threads

needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
quiet_fork = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
needs_signals = pytest.mark.skipif(not hasattr(signal, "pthread_kill"), reason="no pthread_kill")


def meet(count, timeout=20):
    """Run a share on each of `count` threads at once; return the threads."""
    barrier, seen = threading.Barrier(count), []

    def work():
        barrier.wait(timeout)
        seen.append(threading.current_thread())

    threads.run_on_threads(work, count)
    return seen


def interrupt(times, every=0.02):
    """Send SIGINT to the main thread, several times: from a thread that it waits for."""
    for _ in range(times):
        time.sleep(every)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
