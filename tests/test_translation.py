"""What Numba keeps of a translation, and what other threads may do meanwhile."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest
from processes import fresh

pytest.importorskip("numba")


class Local:
    """Something that a caller has."""


def kernel(job, scratch, quota):
    return min(quota, quota, 3)  # which Numba tries as that of an array


def test_no_frame_of_the_caller_is_kept():
    """Numba notes what it tried, in cycles. Their garbage is found late: it counts as old."""
    from fastattn.cpu.translation import translate

    def call():
        local = Local()
        translate(kernel)
        return weakref.ref(local)

    gc.collect()
    gc.disable()
    try:
        assert call()() is None
    finally:
        gc.enable()


# A stencil's helper that is typed for long and then compiled, while another thread translates.
STENCIL = """
import faulthandler, json, threading, time
faulthandler.dump_traceback_later(200, exit=True)
import numba
import numpy as np
from numba.extending import overload
from fastattn.cpu.translation import translate

typing = threading.Event()

def next_of(x):
    return x + 1

@overload(next_of)
def compiled_next_of(x):
    typing.set()
    time.sleep(0.5)  # until the other thread is at its locks
    return lambda x: x + 1

@numba.stencil
def around(a):
    return next_of(a[-1] + a[1])

def kernel(job, scratch, quota):
    return quota

def translated():
    typing.wait()
    answers.append("kernel" in translate(kernel)[1])

answers = []
threads = [
    threading.Thread(target=translated),
    threading.Thread(target=lambda: answers.append(around(np.arange(4.0)).tolist())),
]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(json.dumps(sorted(answers, key=str)))
"""


def test_a_stencil_compiles_meanwhile(tmp_path):
    """Its thread types under one lock of Numba and then waits for that of the compiler."""
    assert fresh(STENCIL, tmp_path) == [True, [0.0, 3.0, 5.0, 0.0]]


def test_other_threads_find_where_variables_live():
    """What numba.stencil decorates is looked at without the locks of translate()."""
    from numba.core.compiler import run_frontend

    from fastattn.cpu.translation import _translating

    found = []

    def look():
        found.append(run_frontend(kernel).variable_lifetime)

    with _translating():
        look()
        other = threading.Thread(target=look)
        other.start()
        other.join()
    assert found[0] is None
    assert found[1] is not None


def test_an_error_lets_go_of_the_locks():
    from numba.core.compiler_lock import global_compiler_lock
    from numba.core.errors import TypingError
    from numba.core.registry import cpu_target

    from fastattn.cpu.translation import translate

    def wrong(job, scratch, quota):
        return quota + "text"

    with pytest.raises(TypingError):
        translate(wrong)
    locks = [global_compiler_lock._lock, cpu_target.typing_context.callstack._lock]
    free = []

    def look():
        for lock in locks:
            free.append(lock.acquire(blocking=False))
            if free[-1]:
                lock.release()

    other = threading.Thread(target=look)  # this one may take what it holds once more
    other.start()
    other.join()
    assert free == [True, True]
