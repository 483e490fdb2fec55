"""Facts about the machine, as /proc tells them."""

from __future__ import annotations

import platform

import pytest

from fastattn import machine

DESKTOP = """\
processor\t: 0
cpu family\t: 25
model\t\t: 97
model name\t: Some(R) CPU 7950 16-Core
flags\t\t: fpu: avx2

processor\t: 1
cpu family\t: 25
model\t\t: 98
model name\t: Another CPU
"""
GUEST = DESKTOP.replace("Some(R) CPU 7950 16-Core", "AMD EPYC")
BOARD = "processor\t: 0\nFeatures\t: fp asimd\n\nModel\t\t: Some Board Rev 1.4\n"


@pytest.mark.parametrize(
    ("cpuinfo", "name"),
    [
        (DESKTOP, "Some(R) CPU 7950 16-Core"),
        (GUEST, "AMD EPYC (family 25, model 97)"),
        (BOARD, "Some Board Rev 1.4"),
        (BOARD.replace(" Rev 1.4", ""), "Some Board"),
        ("", platform.processor() or platform.machine()),
    ],
)
def test_the_processor_by_name(cpuinfo, name, monkeypatch):
    monkeypatch.setattr(machine, "_read", lambda path: cpuinfo)
    assert machine.cpu_name.__wrapped__() == name
