"""The thread pool: shares, exceptions and Ctrl-C."""

from __future__ import annotations

import os
import threading
import time
import weakref

import pytest
from pool import interrupt, meet, needs_signals

from fastattn.cpu import threads


def assert_pool_works():
    assert len(set(meet(3))) == 3


def test_shares_run_at_the_same_time():
    seen = meet(4)
    assert len(set(seen)) == 4
    assert threading.current_thread() in seen
    assert all(t.daemon for t in seen if t is not threading.current_thread())


def test_one_thread_uses_no_pool(monkeypatch):
    monkeypatch.setattr(threads, "_ensure_workers", lambda count: pytest.fail("asked for threads"))
    seen = []
    threads.run_on_threads(lambda: seen.append(threading.current_thread()), 1)
    assert seen == [threading.current_thread()]


def test_nested_call_runs_on_its_own_thread():
    inner, barrier = [], threading.Barrier(2)

    def work():
        barrier.wait(20)
        me = threading.current_thread()
        if me is not threading.main_thread():
            threads.run_on_threads(lambda: inner.append(threading.current_thread() is me), 4)

    threads.run_on_threads(work, 2)
    assert inner == [True]


@pytest.mark.parametrize("done", [True, False])
def test_caller_waits_only_for_what_is_not_done(done):
    begun, release, ended = threading.Event(), threading.Event(), threading.Event()

    def work():
        if threading.current_thread() is not threading.main_thread():
            begun.set()
            release.wait(20)
            ended.set()

    def is_done():
        assert begun.wait(20)
        if not done:
            threading.Timer(0.1, release.set).start()
        return done

    threads.run_on_threads(work, 2, is_done)
    assert ended.is_set() != done
    release.set()
    assert ended.wait(20)


def test_shares_that_have_not_begun_are_withdrawn():
    """All pool threads are busy: the caller does everything, waits for nobody."""
    assert_pool_works()
    release, busy = threading.Event(), threading.Semaphore(0)
    others = len(threads._workers)
    blocked = threading.Thread(
        target=threads.run_on_threads,
        args=(lambda: (busy.release(), release.wait(20)), others + 1),
    )
    blocked.start()
    try:
        for _ in range(others + 1):
            assert busy.acquire(timeout=20)
        seen = []
        threads.run_on_threads(lambda: seen.append(threading.current_thread()), 3)
        assert seen == [threading.current_thread()]
    finally:
        release.set()
        blocked.join(20)
    assert_pool_works()


def test_no_more_threads_can_be_started(monkeypatch):
    def refuse(self):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threads, "_workers", [])
    monkeypatch.setattr(threading.Thread, "start", refuse)
    seen = []
    threads.run_on_threads(lambda: seen.append(1), 4)
    assert seen == [1]


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no sched_setaffinity")
@pytest.mark.parametrize("allowed", [1, 2])
def test_pool_threads_stay_off_the_callers_cpu(monkeypatch, allowed):
    """They may run wherever the caller may, but not where it runs, if there is another place."""
    before = os.sched_getaffinity(0)
    if len(before) < allowed:
        pytest.skip("needs two CPUs")
    meet(2)
    pool = [thread.native_id for thread in threads._workers]
    cpus = sorted(before)[:allowed]
    try:
        os.sched_setaffinity(0, cpus)
        for cpu in cpus:
            monkeypatch.setattr(threads, "_getcpu", lambda cpu=cpu: cpu)
            meet(2)
            others = set(cpus) - {cpu}
            if others:
                assert all(os.sched_getaffinity(thread) == others for thread in pool)
        assert os.sched_getaffinity(0) == set(cpus)
    finally:
        os.sched_setaffinity(0, before)
        monkeypatch.undo()
        threads._shunned = -1
    meet(2)


@pytest.mark.parametrize("error", [ValueError, MemoryError, SystemExit, KeyboardInterrupt])
def test_exception_in_a_worker_reaches_the_caller(error):
    barrier, late = threading.Barrier(3), []

    def work():
        rank = barrier.wait(20)
        if threading.current_thread() is threading.main_thread():
            return
        if rank:  # of two pool threads, one fails and one takes its time
            time.sleep(0.05)
        late.append(1)
        raise error("from the pool")

    with pytest.raises(error, match="from the pool"):
        threads.run_on_threads(work, 3)
    assert len(late) == 2, "returned before every share had ended"
    assert_pool_works()


def test_exception_in_the_caller_waits_for_the_workers():
    barrier, ended = threading.Barrier(2), []

    def work():
        barrier.wait(20)
        if threading.current_thread() is threading.main_thread():
            raise ValueError("mine")
        time.sleep(0.1)
        ended.append(1)

    with pytest.raises(ValueError, match="mine"):
        threads.run_on_threads(work, 2)
    assert ended == [1]
    assert_pool_works()


# --- Ctrl-C -------------------------------------------------------------------------------------


@needs_signals
@pytest.mark.parametrize("times", [1, 2, 5])
def test_interrupted_wait_still_waits(times):
    """However often Ctrl-C is pressed, memory that the pool works on is not given back early."""
    barrier, ended = threading.Barrier(2), []

    def work():
        barrier.wait(20)
        if threading.current_thread() is not threading.main_thread():
            interrupt(times)
            time.sleep(0.2)
            ended.append(1)

    with pytest.raises(KeyboardInterrupt):
        threads.run_on_threads(work, 2)
    assert ended == [1]
    assert_pool_works()


@needs_signals
def test_interrupted_work_still_waits():
    barrier, ended = threading.Barrier(2), []

    def work():
        barrier.wait(20)
        if threading.current_thread() is threading.main_thread():
            time.sleep(60)
        else:
            interrupt(3)
            time.sleep(0.2)
            ended.append(1)

    with pytest.raises(KeyboardInterrupt):
        threads.run_on_threads(work, 2)
    assert ended == [1]
    assert_pool_works()


def test_settling_again_after_any_step_is_right():
    """settle() may be cut short anywhere: here after its claim, and after the wait."""
    withdrawn = threads._Share(lambda: pytest.fail("ran"))
    withdrawn._claims.append("caller")  # interrupted here
    withdrawn.settle()
    withdrawn.settle()
    withdrawn.run()
    ran = threads._Share(lambda: None)
    ran.run()
    for _ in range(3):
        ran.settle()


def test_a_withdrawn_share_keeps_nothing_alive():
    class Memory:
        pass

    memory = Memory()
    seen = weakref.ref(memory)
    share = threads._Share(lambda memory=memory: memory)
    del memory
    share.settle()
    assert seen() is None
