"""A Numba whose inside is another: it is not used, or says so."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

pytest.importorskip("numba")

from fastattn.cpu import compile, lowering


def kernel(job, scratch, quota):
    total = 0
    for n in range(quota):
        total += n
    return total


def test_parts_that_are_gone_leave_the_work_to_numpy(monkeypatch):
    monkeypatch.delitem(sys.modules, "fastattn.cpu.translation", raising=False)
    monkeypatch.delattr("numba.core.transforms.canonicalize_cfg")
    monkeypatch.setattr(compile, "_import_problem", compile._import_problem.__wrapped__)
    why = compile.unavailable("a key of no kernel")
    assert why.startswith("numba cannot be imported: ImportError: cannot import name 'canonicalize")


def test_parts_that_behave_otherwise_are_an_error(monkeypatch):
    monkeypatch.setattr(lowering, "cgutils", SimpleNamespace())
    rule = "numba must translate kernel kernel, got .* from numba .*: backend='numpy' needs none"
    with pytest.raises(NotImplementedError, match=rule + "[^$]* no attribute 'alloca_once'"):
        compile.translate(kernel)


def test_full_memory_is_no_fault_of_numba(monkeypatch):
    def full(*given, **named):
        raise MemoryError

    monkeypatch.setattr("fastattn.cpu.translation.jit", full)
    with pytest.raises(MemoryError):
        compile.translate(kernel)
