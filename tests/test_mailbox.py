"""Pool threads that wait awake: when they do, and what becomes of shares posted to them."""

from __future__ import annotations

import ctypes
import gc
import threading
import time
import weakref
from types import SimpleNamespace

import emulated
import numpy as np
import pytest
from pool import meet, needs_fork
from processes import fresh

import fastattn
from fastattn.cpu import compile, image, mailbox, share, threads
from fastattn.cpu.cache import cache_folder
from fastattn.cpu.job import PLACE, Counter, Job
from fastattn.cpu.mailbox import Direct, Letter, Mailbox
from fastattn.machine import NEON

pytest.importorskip("numba")
pytestmark = pytest.mark.unguarded

LONG = 1 << 40  # looks: until leave()
SCRATCH = 256


class Memory:
    """What a job reaches."""


class Thread:
    """One that waits awake at a mailbox of its own, and a job whose kernel it runs."""

    def __init__(self, status=0):
        self.begun, self.go_on, self.runs = threading.Event(), threading.Event(), []
        self.go_on.set()

        @image.ENTRY
        def run(result, error, job, scratch, quota):
            self.runs.append((threading.current_thread(), job, scratch))
            self.begun.set()
            self.go_on.wait(20)
            return status

        self.entry = image.Entry(ctypes.cast(run, ctypes.c_void_p).value, "test", run)
        self.mailbox, self.memory = Mailbox(), np.empty(SCRATCH, np.uint8)
        self.thread = threading.Thread(target=self.wait)

    def wait(self):
        self.mailbox.wait(share._awake(), self.memory, self.memory.ctypes.data)

    def letter(self, keep=None):
        direct = Direct(lambda: self.entry, 77, SCRATCH, keep, share._awake)
        return Letter(self.mailbox, direct, share._awake())

    def __enter__(self):
        self.thread.start()
        until(lambda: self.mailbox.is_open(SCRATCH))
        return self

    def __exit__(self, *error):
        self.go_on.set()
        self.mailbox.leave()
        self.thread.join(20)
        assert not self.thread.is_alive()


@pytest.fixture(autouse=True)
def long(monkeypatch):
    """No thread gives up by itself, and none is left awake."""
    monkeypatch.setattr(mailbox, "LOOKS", LONG)
    yield
    for box in threads._mailboxes:
        box.leave()


@pytest.fixture
def eager(monkeypatch):
    """All calls count as coming at once, and as if there were CPUs enough."""
    assert share._awake()  # not compiled while they come
    monkeypatch.setattr(threads, "AT_ONCE", 1 << 61)
    monkeypatch.setattr(threads, "default_num_threads", lambda: 64)
    monkeypatch.setattr(threads, "_PASSIVE", False)
    monkeypatch.setattr(threads, "NO_WAIT", 0)
    monkeypatch.setattr(threads, "_no_wait", 0)
    monkeypatch.setattr(threads, "_wait_from", 0)


@pytest.fixture
def posted(monkeypatch):
    """Whether each letter found its mailbox open."""
    seen, real = [], Letter.post

    def post(letter):
        seen.append(real(letter))
        return seen[-1]

    monkeypatch.setattr(Letter, "post", post)
    return seen


@pytest.fixture
def qkv(rng):
    return rng.standard_normal((3, 8, 200, 32)).astype(np.float32)


def until(condition, seconds=20):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


def call_often(qkv, count=2, times=threads.AWAKE_AFTER + 20):
    """Calls on so many threads, until these wait awake; check the bits of each."""
    with fastattn.num_threads(1):
        wanted = fastattn.attention(*qkv)
    with fastattn.num_threads(count):
        for _ in range(times):
            np.testing.assert_array_equal(fastattn.attention(*qkv), wanted)
            time.sleep(0.001)  # for the thread to come to its mailbox


def test_what_is_posted_runs_there():
    with Thread() as waiting:
        for _ in range(3):
            letter = waiting.letter()
            assert letter.post()
            until(letter.has_ended)
            assert not letter.withdraw()
            letter.settle()
            assert letter.error is None
            until(lambda: waiting.mailbox.is_open(SCRATCH))
    assert waiting.runs == [(waiting.thread, 77, waiting.memory.ctypes.data)] * 3


def test_what_is_not_posted_does_not_run():
    waiting = Thread()
    assert not waiting.mailbox.is_open(SCRATCH)
    letter = waiting.letter()
    assert not letter.post()
    assert letter.withdraw()
    letter.settle()
    with waiting:
        assert not waiting.mailbox.is_open(SCRATCH + 1)
    assert not waiting.runs


def test_a_letter_is_withdrawn_until_it_is_taken(monkeypatch):
    """A mailbox that its thread does not look into: the kernel's steps of both, one by one."""
    waiting = Thread()
    waiting.mailbox._words[mailbox.LETTER] = mailbox.OPEN
    letter, second = waiting.letter(), waiting.letter()
    assert letter.post()
    assert not second.post()
    assert not letter.has_ended()
    for _ in range(2):  # an interrupt may have come after the first
        assert letter.withdraw()
        letter.settle()
    assert second.post()
    second.settle()
    assert waiting.mailbox._words[mailbox.LETTER] == mailbox.OPEN


def test_a_letter_lives_until_its_share_has_ended():
    memory = Memory()
    seen = weakref.ref(memory)
    with Thread() as waiting:
        waiting.go_on.clear()
        letter = waiting.letter(memory)
        assert letter.post()
        assert waiting.begun.wait(20)
        assert not letter.withdraw()
        del letter, memory
        gc.collect()
        assert seen() is not None
        waiting.go_on.set()
        until(lambda: waiting.mailbox.is_open(SCRATCH))
        second = waiting.letter()
        second.post()
        second.settle()
        assert seen() is None


@pytest.mark.parametrize("in_time", [True, False])
def test_a_letter_is_not_kept_if_its_share_ends_at_once(monkeypatch, in_time):
    """Else the next call could not use the memory of this one's result."""
    memory = Memory()
    seen = weakref.ref(memory)
    with Thread() as waiting:
        waiting.go_on.clear()
        letter = waiting.letter(memory)
        assert letter.post()
        assert waiting.begun.wait(20)
        monkeypatch.setattr(Letter, "has_ended", lambda letter: in_time)
        assert not letter.withdraw()
        monkeypatch.undo()
        waiting.go_on.set()
        until(letter.has_ended)
        del letter, memory
        gc.collect()
        assert (seen() is None) == in_time


def test_settle_waits_for_the_end():
    with Thread() as waiting:
        waiting.go_on.clear()
        letter = waiting.letter()
        assert letter.post()
        assert waiting.begun.wait(20)
        threading.Timer(0.05, waiting.go_on.set).start()
        letter.settle()
        assert waiting.go_on.is_set()
        assert letter.has_ended()


def test_errors_reach_the_caller():
    with Thread(status=-3) as waiting:
        letter = waiting.letter()
        assert letter.post()
        until(letter.has_ended)
        assert str(letter.error) == "kernel test failed with status -3"


def test_on_arm():
    """By an emulator, on one thread. The kernel that a letter names is the same one: it finds
    another mailbox, which it is to leave.
    """
    from fastattn.cpu.awake import awake_kernel

    entry, code = compile.compile_object(awake_kernel(NEON), compile.named_target("aarch64"))
    linked = image.link(code, entry)
    kernel = emulated.kernel(linked)
    start = emulated.CODE + image.HEADER.unpack_from(linked)[1]
    box, other = Mailbox(), Mailbox()
    other.leave()
    direct = Direct(lambda: image.Entry(start, "test", None), other.place, 0, None, lambda: None)
    letter = Letter(box, direct, kernel)
    assert not letter.post()
    box._words[mailbox.LETTER] = other._words[mailbox.LETTER] = mailbox.OPEN
    assert letter.post()
    assert not letter.has_ended()
    assert letter.withdraw()
    assert letter.post()
    assert kernel(box.place, 0, 9) == 1
    assert letter.has_ended()
    assert letter.error is None
    assert not box.is_open(0)


def test_nothing_comes(monkeypatch):
    monkeypatch.setattr(mailbox, "LOOKS", 1 << 11)
    waiting = Thread()
    waiting.thread.start()
    waiting.thread.join(20)
    assert not waiting.thread.is_alive()
    assert not waiting.mailbox.is_open(0)


@pytest.mark.parametrize("count", [2, 4])
def test_calls_that_follow_at_once_are_posted(eager, posted, qkv, count):
    call_often(qkv, count)
    assert sum(posted) > count


def test_calls_that_do_not_follow_at_once_are_not(eager, posted, qkv, monkeypatch):
    monkeypatch.setattr(threads, "AT_ONCE", 500_000)
    call_often(qkv)
    assert not any(posted)


def test_a_wait_in_vain_is_not_soon_tried_again(monkeypatch):
    now, waits, results = [10**9], [], []
    clock = SimpleNamespace(perf_counter_ns=lambda: now[0])
    monkeypatch.setattr(threads, "time", clock)
    monkeypatch.setattr(threads, "_awake", lambda: print, raising=False)
    monkeypatch.setattr(threads, "_no_wait", threads.NO_WAIT)
    monkeypatch.setattr(threads, "_wait_from", 0)
    monkeypatch.setattr(Mailbox, "wait", lambda *args: waits.append(now[0]) or results.pop(0))

    def waits_after(brought, ns):
        """Whether a thread waits again so long after a wait that brought so many shares."""
        results[:] = [brought, 0]
        monkeypatch.setattr(threads, "_wait_from", 0)
        threads._wait_awake(Mailbox())
        now[0] += ns
        before, no_wait = len(waits), threads._no_wait
        threads._wait_awake(Mailbox())
        monkeypatch.setattr(threads, "_no_wait", no_wait)
        return len(waits) > before

    paid, vain = threads.AWAKE_AFTER, threads.AWAKE_AFTER - 1
    assert waits_after(paid, 0)
    for times in (1, 2, 4, 8, 16, 16):
        assert not waits_after(vain, times * threads.NO_WAIT - 1)
        monkeypatch.setattr(threads, "_no_wait", times * threads.NO_WAIT)
        assert waits_after(0, times * threads.NO_WAIT)
    assert waits_after(paid, 0)
    assert not waits_after(vain, threads.NO_WAIT - 1)


@pytest.mark.parametrize("reason", ["more threads than CPUs", "OMP_WAIT_POLICY"])
def test_none_waits_awake(eager, posted, qkv, monkeypatch, reason):
    if reason == "OMP_WAIT_POLICY":
        monkeypatch.setattr(threads, "_PASSIVE", True)
    else:
        monkeypatch.setattr(threads, "default_num_threads", lambda: 1)
    call_often(qkv)
    assert not any(posted)


def test_other_work_gets_the_threads(eager, posted, qkv):
    """Functions of Python are not posted: threads that wait awake come for them."""
    for _ in range(3):
        call_often(qkv)
        assert len(set(meet(2))) == 2
    assert any(posted)


def test_a_kernel_that_fails(eager, qkv):
    """Of those who run it, the pool thread fails."""
    caller, failed = threading.get_ident(), threading.Event()

    @image.ENTRY
    def fails(result, error, job, scratch, quota):
        ctypes.c_int64.from_address(result).value = not quota  # asked if all is done
        if threading.get_ident() != caller:
            failed.set()
            return -1
        if quota:
            failed.wait(20)
        return 0

    call_often(qkv)
    until(lambda: any(box.is_open(64) for box in threads._mailboxes))
    kernel = image.call_at(ctypes.cast(fails, ctypes.c_void_p).value, "('test', 'fails')", fails)
    job, counter = Job(), Counter()
    job[PLACE["num_items"]] = 5
    with pytest.raises(RuntimeError, match=r"kernel \('test', 'fails'\) failed with status -1"):
        share.Share(kernel, job, counter, 64, ()).run(2, 1)
    call_often(qkv)


def test_several_callers(eager, posted, qkv):
    callers = [threading.Thread(target=call_often, args=(qkv, 3)) for _ in range(3)]
    errors = []
    hook, threading.excepthook = threading.excepthook, errors.append
    try:
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join()
    finally:
        threading.excepthook = hook
    assert not errors


AWAKE = """
import json, os, sys, threading, numpy as np, fastattn
from fastattn.cpu import mailbox, threads
threads.AT_ONCE, threads.default_num_threads, mailbox.LOOKS = 1 << 61, lambda: 2, 1 << 40
fastattn.set_num_threads(2)
q = np.ones((8, 200, 32), np.float32)
q[:, ::3] = 2
def call():
    while not threads._mailboxes or not threads._mailboxes[0].is_open(0):
        out = fastattn.attention(q, q, q)
    return fastattn.attention(q, q, q).tobytes()
before = call()
"""


@needs_fork
@pytest.mark.slow
def test_a_forked_child_has_threads_of_its_own():
    code = """
child = os.fork()
if not child:
    fresh = not threads._mailboxes
    os._exit(0 if fresh and call() == before else 1)
print(json.dumps([os.waitpid(child, 0)[1], call() == before]))
"""
    assert fresh(AWAKE + code, cache_folder()) == [0, True]


@pytest.mark.slow
def test_an_interpreter_ends_while_a_thread_waits_awake():
    assert fresh(AWAKE + "print(json.dumps(1))", cache_folder()) == 1
