"""The number of threads, the pool, and what it must survive: fork, exit, exceptions, Ctrl-C."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
from cases import Case
from test_import import fresh

import fastattn
from fastattn import machine
from fastattn.cpu import threads

needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
quiet_fork = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")


@pytest.fixture(autouse=True)
def restore_limit(monkeypatch):
    monkeypatch.setattr(threads, "_limit", None)


@pytest.fixture
def cpu():
    """Only the kernels use the pool."""
    one = np.ones((1, 1), np.float32)
    try:
        fastattn.explain(one, one, one, backend="cpu")
    except ImportError as error:
        pytest.skip(str(error))


def in_thread(function):
    """What function() answers in a thread of its own."""
    found = []
    thread = threading.Thread(target=lambda: found.append(function()))
    thread.start()
    thread.join()
    return found[0]


# --- how many -----------------------------------------------------------------------------------


def test_set_num_threads_holds_everywhere():
    fastattn.set_num_threads(5)
    assert fastattn.get_num_threads() == 5
    assert in_thread(fastattn.get_num_threads) == 5
    in_thread(lambda: fastattn.set_num_threads(3))
    assert fastattn.get_num_threads() == 3


def test_num_threads_holds_in_its_block_and_thread_only():
    fastattn.set_num_threads(5)
    with fastattn.num_threads(2):
        assert fastattn.get_num_threads() == 2
        assert in_thread(fastattn.get_num_threads) == 5
        with fastattn.num_threads(3):
            assert fastattn.get_num_threads() == 3
        assert fastattn.get_num_threads() == 2
        fastattn.set_num_threads(4)  # the block is the nearer one
        assert fastattn.get_num_threads() == 2
    assert fastattn.get_num_threads() == 4


def test_num_threads_ends_with_an_exception():
    fastattn.set_num_threads(5)
    with pytest.raises(KeyError), fastattn.num_threads(2):
        raise KeyError
    assert fastattn.get_num_threads() == 5


def test_num_threads_is_per_task():
    async def task(n):
        with fastattn.num_threads(n):
            await asyncio.sleep(0)
            return fastattn.get_num_threads()

    async def main():
        return await asyncio.gather(*(task(n) for n in (2, 3, 4)))

    assert asyncio.run(main()) == [2, 3, 4]


@pytest.mark.parametrize("change", [fastattn.set_num_threads, fastattn.num_threads])
@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        (0, ValueError, "num_threads must be at least 1, got 0"),
        (-2, ValueError, "num_threads must be at least 1, got -2"),
        (1.0, TypeError, "num_threads must be an int, got 1.0"),
        ("2", TypeError, "num_threads must be an int, got '2'"),
        (None, TypeError, "num_threads must be an int, got None"),
        (True, TypeError, "num_threads must be an int, got True"),
    ],
    ids=repr,
)
def test_what_is_no_number_of_threads(change, value, error, message):
    with pytest.raises(error) as caught, change(value):
        pass
    assert str(caught.value) == message
    assert fastattn.get_num_threads() == machine.default_num_threads()


def test_a_numpy_integer_is_a_number_of_threads():
    fastattn.set_num_threads(np.int64(2))
    assert fastattn.get_num_threads() == 2
    assert type(fastattn.get_num_threads()) is int


@pytest.mark.parametrize(
    ("cpus", "omp", "files", "expected"),
    [
        (8, None, {}, 8),
        (8, "3", {}, 3),
        (8, "4,2", {}, 4),  # nested levels: the first is the outermost
        (8, "100", {}, 8),
        (8, "0", {}, 8),
        (8, "many", {}, 8),
        (8, "", {}, 8),
        (8, None, {"/sys/fs/cgroup/cpu.max": "200000 100000"}, 2),
        (8, None, {"/sys/fs/cgroup/cpu.max": "150000 100000"}, 2),
        (8, None, {"/sys/fs/cgroup/cpu.max": "10000 100000"}, 1),
        (8, None, {"/sys/fs/cgroup/cpu.max": "max 100000"}, 8),
        (8, "2", {"/sys/fs/cgroup/cpu.max": "400000 100000"}, 2),
        (8, None, {"/sys/fs/cgroup/a/b/cpu.max": "300000 100000"}, 3),
        # a group is also held to what the groups around it may use
        (8, None, {"/sys/fs/cgroup/a/cpu.max": "200000 100000"}, 2),
        (
            8,
            None,
            {
                "/sys/fs/cgroup/a/b/cpu.max": "700000 100000",
                "/sys/fs/cgroup/a/cpu.max": "500000 100000",
            },
            5,
        ),
        (
            8,
            None,
            {
                "/sys/fs/cgroup/cpu/cpu.cfs_quota_us": "250000",
                "/sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
            },
            3,
        ),
        (
            8,
            None,
            {
                "/sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1",
                "/sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
            },
            8,
        ),
    ],
    ids=str,
)
def test_default_is_the_least_of_all_limits(monkeypatch, cpus, omp, files, expected):
    files = {"/proc/self/cgroup": "0::/a/b"} | files
    monkeypatch.setattr(machine, "_read", lambda path: files.get(path, ""))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(cpus), raising=False)
    if omp is None:
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    else:
        monkeypatch.setenv("OMP_NUM_THREADS", omp)
    assert machine.default_num_threads.__wrapped__() == expected


def test_default_where_affinity_is_unknown(monkeypatch):
    monkeypatch.setattr(machine, "_read", lambda path: "")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    for count, expected in ((6, 6), (None, 1)):
        monkeypatch.setattr(os, "cpu_count", lambda count=count: count)
        assert machine.default_num_threads.__wrapped__() == expected


# --- the pool -----------------------------------------------------------------------------------


def meet(count, timeout=20):
    """Run a share on each of `count` threads at once; return the threads."""
    barrier, seen = threading.Barrier(count), []

    def work():
        barrier.wait(timeout)
        seen.append(threading.current_thread())

    threads.run_on_threads(work, count)
    return seen


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


def test_shares_that_have_not_begun_are_withdrawn():
    """All pool threads are busy: the caller does everything, waits for nobody."""
    assert_pool_works()
    release, busy = threading.Event(), threading.Semaphore(0)
    others = threads._workers
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

    monkeypatch.setattr(threads, "_workers", 0)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    seen = []
    threads.run_on_threads(lambda: seen.append(1), 4)
    assert seen == [1]


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


def interrupt(times, every=0.02):
    """Send SIGINT to the main thread, several times, from a thread of its own."""

    def send():
        for _ in range(times):
            time.sleep(every)
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    thread = threading.Thread(target=send)
    thread.start()
    return thread


needs_signals = pytest.mark.skipif(not hasattr(signal, "pthread_kill"), reason="no pthread_kill")


@needs_signals
@pytest.mark.parametrize("times", [1, 2, 5])
def test_interrupted_wait_still_waits(times):
    """However often Ctrl-C is pressed, memory that the pool works on is not given back early."""
    barrier, ended = threading.Barrier(2), []

    def work():
        barrier.wait(20)
        if threading.current_thread() is not threading.main_thread():
            time.sleep(0.3)
            ended.append(1)

    sender = interrupt(times)
    try:
        with pytest.raises(KeyboardInterrupt):
            threads.run_on_threads(work, 2)
        assert ended == [1]
    finally:
        sender.join()
    assert_pool_works()


@needs_signals
def test_interrupted_work_still_waits():
    barrier, ended = threading.Barrier(2), []

    def work():
        barrier.wait(20)
        if threading.current_thread() is threading.main_thread():
            time.sleep(5)
        else:
            time.sleep(0.3)
            ended.append(1)

    sender = interrupt(3)
    try:
        with pytest.raises(KeyboardInterrupt):
            threads.run_on_threads(work, 2)
        assert ended == [1]
    finally:
        sender.join()
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
    import weakref

    class Memory:
        pass

    memory = Memory()
    seen = weakref.ref(memory)
    share = threads._Share(lambda memory=memory: memory)
    del memory
    share.settle()
    assert seen() is None


def call_for_ever(*arrays):
    while True:
        fastattn.attention(*arrays, causal=True, backend="cpu")


@needs_signals
@pytest.mark.slow
def test_interrupted_calls_leave_the_process_well(cpu):
    """Many interrupts at random moments of real calls: no crash, and right answers afterwards."""
    case = Case("interrupt", 300, 700, 64, heads_q=8, causal=True)
    q, k, v = case.arrays()
    expected = fastattn.attention(q, k, v, causal=True, backend="cpu")
    with fastattn.num_threads(3):
        for n in range(40):
            sender = interrupt(2, every=0.0005 * (n % 7))
            with pytest.raises(KeyboardInterrupt):
                call_for_ever(q, k, v)
            try:
                sender.join()
            except KeyboardInterrupt:  # the second one came here
                sender.join()
        out = fastattn.attention(q, k, v, causal=True, backend="cpu")
    np.testing.assert_array_equal(out, expected)


# --- calls --------------------------------------------------------------------------------------

CASES = [
    Case("large", 300, 300, 64, heads_q=4, causal=True),
    Case("split", 1, 5000, 64, heads_q=4, heads_kv=2),
    Case("small", 3, 5),
    Case("double", 130, 260, 40, heads_q=3, dtype="float64"),
    Case("masked", 200, 333, 32, heads_q=8, mask="1qk"),
]


def answer(case, count=2):
    with fastattn.num_threads(count):
        return fastattn.attention(*case.arrays(), **case.flags(), return_lse=True, backend="cpu")


def assert_same(got, expected):
    for ours, theirs in zip(got, expected, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_same_bits_for_any_number_of_threads(cpu):
    for case in CASES:
        one = answer(case, 1)
        for count in (2, 3, 8):
            assert_same(answer(case, count), one)


def test_many_python_threads_with_mixed_calls(cpu):
    expected = [answer(case, 1) for case in CASES]
    wrong = []

    def work(first):
        for n in range(first, first + 25):
            index = n % len(CASES)
            try:
                assert_same(answer(CASES[index], 1 + n % 4), expected[index])
            except BaseException as error:
                wrong.append(error)

    callers = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert not wrong


@needs_fork
@quiet_fork
def test_forked_child_calls(cpu):
    """After a call on several threads, with a thread that holds the pool's locks at the time."""
    expected = answer(CASES[0], 3)
    stop = threading.Event()
    rest = SimpleNamespace(calls=0)

    def keep_calling():
        while not stop.is_set():
            answer(CASES[0], 3)
            rest.calls += 1

    caller = threading.Thread(target=keep_calling)
    caller.start()
    try:
        for _ in range(5):
            child = os.fork()
            if not child:
                try:
                    assert_same(answer(CASES[0], 3), expected)
                    meet(2)  # in a pool of its own
                    os._exit(0)
                finally:
                    os._exit(1)
            assert os.waitpid(child, 0)[1] == 0
    finally:
        stop.set()
        caller.join()
    assert_same(answer(CASES[0], 3), expected)


@needs_fork
@quiet_fork
def test_child_forked_during_a_compilation(cpu):
    """The lock that the compiling thread holds is free in the child."""
    from fastattn.cpu import compile

    inside, leave = threading.Event(), threading.Event()

    def compile_slowly():
        with compile._lock:
            inside.set()
            leave.wait(0.2)

    compiling = threading.Thread(target=compile_slowly)
    compiling.start()
    assert inside.wait(20)
    child = os.fork()
    if not child:
        os._exit(0 if compile._lock.acquire(timeout=5) else 1)
    leave.set()
    compiling.join()
    assert os.waitpid(child, 0)[1] == 0
    assert compile._lock.acquire(timeout=5)
    compile._lock.release()


@quiet_fork
@pytest.mark.parametrize(
    "method",
    [pytest.param("fork", marks=needs_fork), pytest.param("spawn", marks=pytest.mark.slow)],
)
def test_multiprocessing_pool(cpu, method):
    expected = [answer(case, 2) for case in CASES[:3]]
    with multiprocessing.get_context(method).Pool(2) as pool:
        found = pool.starmap(answer, [(case, 2) for case in CASES[:3]], chunksize=1)
    for got, exact in zip(found, expected, strict=True):
        assert_same(got, exact)


EXIT = """
import atexit, sys, threading
import numpy as np
import fastattn

q = np.ones((4, 300, 64), np.float32)
def call(where):
    with fastattn.num_threads(3):
        out = fastattn.attention(q, q, q, causal=True, backend='cpu')
    sys.stdout.write(where + str(bool((out == 1).all())) + " ")
    sys.stdout.flush()

class Late:
    def __init__(self):
        self.call = call
    def __del__(self):
        self.call("del ")

if {before}:
    call("before ")
atexit.register(call, "atexit ")
late = Late()
sys.modules["keeps it to the very end"] = late
"""


@pytest.mark.parametrize("before", [True, False])
def test_calls_while_the_interpreter_ends(cpu, before):
    told = fresh(EXIT.format(before=before), "-W", "error").split()
    assert told[-2:] == ["del", "True"] or told[-2:] == ["atexit", "True"]
    assert "False" not in told
    assert ("before" in told) is before


def test_a_daemon_thread_that_calls_does_not_hold_up_the_end(cpu):
    code = """
import threading, time
import numpy as np
import fastattn
q = np.ones((4, 300, 64), np.float32)
def work():
    while True:
        with fastattn.num_threads(3):
            fastattn.attention(q, q, q, backend='cpu')
threading.Thread(target=work, daemon=True).start()
fastattn.attention(q, q, q, backend='cpu')
time.sleep(0.2)
print("end")
"""
    assert fresh(code, "-W", "error") == "end"
