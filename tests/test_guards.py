"""FASTATTN_DEBUG=1: what it must notice, each done on purpose."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from cases import Case
from numpy.lib.stride_tricks import as_strided
from processes import fresh

import fastattn
from fastattn import guards, launch, reference
from fastattn.cpu.cache import cache_folder
from fastattn.cpu.share import Share

CASE = Case("guards", 9, 20, 8, heads_q=4, heads_kv=2, mask="qk", bias="hqk", lengths="q_len")


@pytest.fixture(autouse=True)
def on(monkeypatch):
    monkeypatch.setattr(guards, "ON", True)


def call(backend="numpy", **more):
    flags = CASE.flags() | {"return_lse": True} | more
    return fastattn.attention(*CASE.arrays(), **flags, backend=backend)


def spoil(monkeypatch, harm):
    """Let the NumPy backend do something wrong after its work."""

    def run(plan, problem, operands):
        reference.run(plan, problem, operands)
        harm(operands)

    monkeypatch.setattr(launch, "_launcher", lambda backend: run)


def beside(a, elements):
    """One element before or after those of a contiguous array."""
    at = a.ctypes.data + elements * a.itemsize
    return np.ctypeslib.as_array((ctypes.c_float * 1).from_address(at))


def unwritten(operands):
    operands.out[0, 1, 2, 3].view(np.uint32)[...] = 0xFFFFFFFF


def test_right_calls_have_the_same_results(backend, monkeypatch):
    found = call(backend)
    monkeypatch.setattr(guards, "ON", False)
    for ours, plain in zip(found, call(backend), strict=True):
        np.testing.assert_array_equal(ours, plain)


HARM = {
    "memory before out was written": lambda x: beside(x.out, -1).fill(1),
    "memory after out was written": lambda x: beside(x.out, x.out.size).fill(1),
    "memory after lse was written": lambda x: beside(x.lse, x.lse.size + 60).fill(1),
    "q was written": lambda x: x.q[0, 0].fill(1),
    "memory after k was written": lambda x: beside(x.k, x.k.size).fill(1),
    "mask was written": lambda x: x.mask[0, 0, 0].fill(True),
    "out has 1 elements that no input can give": lambda x: x.out.view(np.uint32)[0, 1, 2].put(
        3, 0xFFFFFFFF
    ),
    "lse has 4 elements that no input can give": lambda x: x.lse[..., 0].fill(
        beside(x.k, x.k.size)[0]
    ),
}


@pytest.mark.parametrize("what", HARM)
def test_damage_is_noticed(what, monkeypatch):
    spoil(monkeypatch, HARM[what])
    with pytest.raises(guards.Damage, match=what):
        call()


def test_memory_between_the_elements_of_out(monkeypatch):
    wide = np.zeros((*CASE.shape("bhq"), 16), np.float32)
    call(out=wide[..., ::2])

    def harm(operands):
        as_strided(operands.out, (1,), (4,))
        beside(operands.out, 1).fill(1)

    spoil(monkeypatch, harm)
    with pytest.raises(guards.Damage, match="between the elements of out was written"):
        call(out=wide[..., ::2])


def test_a_caller_may_give_the_poison_itself(backend):
    q, k, v = CASE.arrays()
    q[0, 0, 0].view(np.uint32)[...] = 0xFFFFFFFF
    assert np.isnan(fastattn.attention(q, k, v, backend=backend)[0, 0, 0]).all()


def test_gradients(backend, monkeypatch):
    q, k, v = CASE.arrays()
    flags = CASE.flags()
    out, lse = fastattn.attention(q, k, v, **flags, return_lse=True, backend=backend)
    found = fastattn.attention_backward(
        out, q, k, v, out, lse, **flags, return_dbias=True, backend=backend
    )
    monkeypatch.setattr(guards, "ON", False)
    plain = fastattn.attention_backward(
        out, q, k, v, out, lse, **flags, return_dbias=True, backend=backend
    )
    for a, b in zip(found, plain, strict=True):
        np.testing.assert_array_equal(a, b)

    def harm(plan, problem, operands, gradients):
        beside(gradients.dk, gradients.dk.size).fill(1)

    monkeypatch.setattr(guards, "ON", True)
    monkeypatch.setattr("fastattn.backward._launcher", lambda backend: harm)
    with pytest.raises(guards.Damage, match="memory after dk was written"):
        fastattn.attention_backward(out, q, k, v, out, lse, **flags, backend=backend)


def test_scratch():
    """A kernel that writes one byte too many, in its second item."""
    left = [2, 1, 0]

    def kernel(job, place, quota):
        assert quota == 1
        nbytes = 1000 - (place % 64 > 0) * 64
        ctypes.memset(place, 0, nbytes + 200 * (left[0] == 1))
        return left.pop(0)

    job, counter = (ctypes.c_int64 * 1)(), (ctypes.c_int64 * 2)()
    with pytest.raises(guards.Damage, match="memory after scratch was written"):
        Share(kernel, job, counter, 1000, ()).run(1, 100)
    assert left == [0]


def test_the_variable_turns_it_on():
    code = "import json, fastattn.guards; print(json.dumps(fastattn.guards.ON))"
    for value, is_on in (("1", True), ("0", False), ("", False), (None, False)):
        assert fresh(code, cache_folder(), FASTATTN_DEBUG=value) is is_on
