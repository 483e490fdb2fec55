"""Ctrl-C in a call that takes seconds: it ends at once, and nothing is the worse for it."""

from __future__ import annotations

import signal
import threading
import time

import numpy as np
import pytest
from pool import meet, needs_signals

import fastattn

SOON = 0.1  # seconds
ATTEMPTS = 5  # on a busy machine, one may come late

pytestmark = [needs_signals, pytest.mark.slow]


def forward(q, backend):
    fastattn.attention(q, q, q, backend=backend)


def packed(q, backend):
    tokens = q[0].swapaxes(0, 1)
    edges = [0, tokens.shape[0]]
    fastattn.attention_varlen(tokens, tokens, tokens, edges, edges, backend=backend)


def masked(q, backend):
    fastattn.attention(q, q, q, mask=np.ones(2 * q.shape[2:3], bool), softcap=3.0, backend=backend)


def backward(q, backend):
    lse = np.zeros(q.shape[:-1], np.float32)
    fastattn.attention_backward(q, q, q, q, q, lse, backend=backend)


def seconds_to_stop(call):
    """Seconds from the signal to the exception: of the clock, or of the process where a busy
    machine let it wait.
    """
    sent = []

    def send():
        time.sleep(0.4)
        sent.append((time.perf_counter(), time.process_time()))
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    sender = threading.Thread(target=send)
    sender.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            call()
        return min(time.perf_counter() - sent[0][0], time.process_time() - sent[0][1])
    finally:
        sender.join()


@pytest.mark.parametrize("num_threads", [1, 2])
def test_a_signal_handler_may_call(num_threads, backend):
    """In the midst of another call on the same thread, whose scratch it must leave alone."""
    q = np.random.default_rng(0).standard_normal((1, 4, 3000, 64)).astype(np.float32)
    small, told = q[:, :, :200], []
    with fastattn.num_threads(num_threads):
        expected = fastattn.attention(q, q, q, backend=backend)
        exact = fastattn.attention(small, small, small, backend=backend)

        def handle(signum, frame):
            told.append(fastattn.attention(small, small, small, backend=backend))
            signal.setitimer(signal.ITIMER_REAL, 0.01)  # the next one, however long this one took

        before = signal.signal(signal.SIGALRM, handle)
        signal.setitimer(signal.ITIMER_REAL, 0.01)
        try:
            while len(told) < 10:
                out = fastattn.attention(q, q, q, backend=backend)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
    np.testing.assert_array_equal(out, expected)
    for found in told:
        np.testing.assert_array_equal(found, exact)


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("function", [forward, packed, masked, backward])
def test_a_long_call_ends_soon(function, num_threads, backend):
    q = np.random.default_rng(0).standard_normal((1, 8, 12288, 64)).astype(np.float32)
    small = q[:, :, :70]
    with fastattn.num_threads(num_threads):
        expected = fastattn.attention(small, small, small, backend=backend)
        function(small, backend)  # compiled
        times = []
        while not times or (min(times) > SOON and len(times) < ATTEMPTS):
            times.append(seconds_to_stop(lambda: function(q, backend)))
        assert min(times) <= SOON, times
        again = fastattn.attention(small, small, small, backend=backend)
    np.testing.assert_array_equal(again, expected)
    assert len(set(meet(2))) == 2
