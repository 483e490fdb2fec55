"""Which keys a mask lets rows see, as the kernel finds them, against looking at every pair."""

from __future__ import annotations

import os
from ctypes import addressof

import numpy as np
import pytest
from cases import Case
from kernels import machines, run, survives, unreadable

import fastattn
from fastattn.cpu.job import ITEM_SIZE, PLACE, Job

STEP = 8
HEADS, GROUP, KEYS = 2, 3, 70  # key heads, query heads of each


def spans(unit):
    """Kernel: mask_span()."""
    from fastattn.cpu.fields import INTEGERS
    from fastattn.cpu.registers import jit
    from fastattn.cpu.spans import mask_span

    @jit
    def body(job):
        fields, item, to = INTEGERS(job[0]), INTEGERS(job[1]), INTEGERS(job[2])
        found = mask_span(fields, item, job[3], job[4], job[5], job[6], job[7], job[8])
        to[0], to[1], to[2] = found[0], found[1], found[2]

    return body


def call(mask, row, count, n_start, start, stop, hidden):
    """mask_span() of the second key head, on a mask (1 or HEADS * GROUP, queries or 1, keys)."""
    job, item, to = Job(), np.zeros(ITEM_SIZE, np.int64), np.zeros(3, np.int64)
    strides = [
        0 if size == 1 else stride for size, stride in zip(mask.shape, mask.strides, strict=True)
    ]
    values = {"mask": mask.ctypes.data, "group": GROUP}
    values |= dict(zip(("mask_head", "mask_row", "mask_col"), strides, strict=True))
    for name, value in values.items():
        job[PLACE[name]] = value
    item[1] = 1
    numbers = (row, count, n_start, start, stop, hidden)
    run(machines()[0], "mask_span", spans, addressof(job), item, to, *numbers)
    return tuple(to.tolist())


def expected(seen, start, stop, hidden):
    """The same of seen (rows, keys); the answers hold to STEP keys."""
    steps = range(start, stop, STEP)
    some = [n for n in steps if seen[:, n : min(n + STEP, stop)].any()]
    holes = [n for n in steps if not seen[:, n : min(n + STEP, stop)].all()]
    begin, end = (some[0], min(some[-1] + STEP, stop)) if some else (stop, start)
    first = min(holes[0], hidden) if holes else hidden
    return begin, end, min(first, end)


def masks(rng):
    """(heads, queries, keys) truth values that hide all, nothing, both ends, holes, half."""
    i, j = np.arange(9)[:, None], np.arange(KEYS)
    for heads, queries in ((1, 1), (1, 9), (HEADS * GROUP, 9), (HEADS * GROUP, 1)):
        for shown in (
            j < 0,
            j >= 0,
            j < 41,
            j >= 19,
            (j >= 16) & (j < 48),
            (j < 8) | (j > 60),
            j != 64,
            rng.random((HEADS * GROUP, 9, KEYS)) < 0.5,
            j <= 7 * i,
            j >= 7 * i,
        ):
            whole = np.broadcast_to(shown, (HEADS * GROUP, 9, KEYS))
            yield np.ascontiguousarray(whole[:heads, :queries])


@pytest.mark.skipif(not machines(), reason="no kernel can be compiled here")
def test_mask_span(rng):
    for mask in masks(rng):
        rows = np.broadcast_to(mask, (HEADS * GROUP, 9, KEYS))[GROUP:].swapaxes(0, 1)
        rows = rows.reshape(9 * GROUP, KEYS)
        for row, count in ((0, 1), (4, 11), (0, 27)):
            for n_start, start, stop in ((0, 0, 70), (0, 16, 64), (5, 0, 37), (0, 32, 32)):
                seen = rows[row : row + count, n_start:]
                for hidden in (start, stop):
                    found = call(mask, row, count, n_start, start, stop, hidden)
                    assert found == expected(seen, start, stop, hidden)


@pytest.mark.unguarded
@pytest.mark.skipif(not machines(), reason="no kernel can be compiled here")
@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("queries", [1, 70])
def test_keys_at_the_ends_that_a_mask_hides_are_never_read(queries):
    """They lie on pages that kill whoever reads them: of two batch entries, other ones."""
    keys = os.sysconf("SC_PAGE_SIZE") // 128  # of one head, on a page
    q, k, v = Case("pages", 70, 40 * keys, 32, batch=2, heads_q=4, heads_kv=2).arrays()
    j = np.arange(40 * keys)
    start, stop = (
        np.array(ends)[:, None, None, None] for ends in ([keys, 0], [39 * keys, 7 * keys])
    )
    mask = np.broadcast_to((j >= start) & (j < stop), (2, 1, queries, 40 * keys))
    expected = fastattn.attention(q, k, v, mask=mask[:, :, :1], backend="numpy")
    hidden = ~mask[:, :, 0, :, None]

    def call():
        found = fastattn.attention(q, hidden_k, hidden_v, mask=mask.copy(), backend="cpu")
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)

    with unreadable(k, hidden) as hidden_k, unreadable(v, hidden) as hidden_v:
        assert survives(call)
        assert not survives(lambda: hidden_k[0, 1, -1].sum())


@pytest.mark.skipif(not machines(), reason="no kernel can be compiled here")
@pytest.mark.parametrize("gradients", [False, True])
def test_masks_may_end_amid_a_register(gradients):
    """Of a block, the keys up to the next whole register are computed; they must not count."""
    q, k, v = Case("ends", 9, 70, 8).arrays()
    dout = np.ones_like(q)
    for stop in range(1, 70):
        for mask in (np.arange(70) < stop, np.arange(70) >= stop):
            found, exact = (both(q, k, v, dout, mask, name, gradients) for name in ("cpu", "numpy"))
            for a, b in zip(found, exact, strict=True):
                np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def both(q, k, v, dout, mask, backend, gradients):
    """(out,), or with the gradients of q, k and v."""
    out, lse = fastattn.attention(q, k, v, mask=mask, return_lse=True, backend=backend)
    if not gradients:
        return (out,)
    given = {"mask": mask, "backend": backend}
    return out, *fastattn.attention_backward(dout, q, k, v, out, lse, **given)[:3]
