"""Calls from many threads, forked children and a process that ends or is interrupted."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from types import SimpleNamespace

import numpy as np
import pytest
from cases import Case
from pool import interrupt, meet, needs_fork, needs_signals, quiet_fork
from test_import import fresh

import fastattn


@pytest.fixture
def cpu():
    """Only the kernels use the pool."""
    one = np.ones((1, 1), np.float32)
    try:
        fastattn.explain(one, one, one, backend="cpu")
    except ImportError as error:
        pytest.skip(str(error))


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


def call_while(thread, *arrays):
    while thread.is_alive():
        fastattn.attention(*arrays, causal=True, backend="cpu")


def raise_in_calls(signum, frame):
    """A handler: what comes before or after the calls would end the tests."""
    while frame is not None:
        if frame.f_code is call_while.__code__:
            raise KeyboardInterrupt
        frame = frame.f_back


@needs_signals
@pytest.mark.slow
def test_interrupted_calls_leave_the_process_well(cpu):
    """Many interrupts at random moments of real calls: no crash, and right answers afterwards."""
    case = Case("interrupt", 300, 700, 64, heads_q=8, causal=True)
    q, k, v = case.arrays()
    expected = fastattn.attention(q, k, v, causal=True, backend="cpu")
    before, interrupted = signal.signal(signal.SIGINT, raise_in_calls), 0
    with fastattn.num_threads(3):
        for n in range(40):
            sender = threading.Thread(target=interrupt, args=(2, 0.0005 * (n % 7)))
            sender.start()
            try:
                call_while(sender, q, k, v)
            except KeyboardInterrupt:
                interrupted += 1
            sender.join()
        signal.signal(signal.SIGINT, before)
        assert interrupted > 0
        out = fastattn.attention(q, k, v, causal=True, backend="cpu")
    np.testing.assert_array_equal(out, expected)
