"""bench/gpu.py and bench/gpu_build.py where there is no GPU: that they run, and what of."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[1] / "bench"


@pytest.fixture
def script(monkeypatch):
    """A script of bench/ as a module, by its name."""
    pytest.importorskip("torch")
    pytest.importorskip("rich")
    monkeypatch.syspath_prepend(BENCH)
    yield importlib.import_module
    for name in ("gpu", "gpu_build", "gpu_cases", "repository"):
        sys.modules.pop(name, None)


def test_steps_run(script, monkeypatch, tmp_path, capsys):
    gpu, path = script("gpu"), tmp_path / "report.json"
    steps = "limits,forward,backward,decode,overhead,sanitizer"
    options = ["--device", "cpu", "--quick", "--steps", steps, "--json", str(path)]
    monkeypatch.setattr(sys, "argv", ["gpu.py", *options])
    gpu.main()
    report = json.loads(path.read_text())
    assert list(report) == ["setting", *steps.split(",")]
    (row,) = report["forward"].values()
    assert set(row["seconds"]) | set(row["refused"]) == {"fastattn", "torch flash", "torch cudnn"}
    assert "FLOP/s" not in capsys.readouterr().out


def test_a_wrong_answer_is_shown(script, monkeypatch, capsys):
    gpu = script("gpu")
    monkeypatch.setattr(gpu, "error_ratio", lambda *_: 2.0)
    monkeypatch.setattr(gpu, "results", lambda *_: None)
    options = type("options", (), {"quick": True, "backend": "numpy"})
    found = gpu.correct(options)
    assert set(found["plain bfloat16"]) == {"failed"}
    assert "  plain bfloat16: error 2.00" in capsys.readouterr().out


def test_unknown_steps_are_refused(script, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--steps", "correct,nothing"])
    with pytest.raises(SystemExit):
        script("gpu").main()
    assert "must be some of correct, limits, forward" in capsys.readouterr().err


def test_work_counts_visible_pairs(script):
    cases = script("gpu_cases")
    case = cases.Timed("one", 2, 4, 2, 3, 3, 8, causal=True)
    assert case.flop == 4 * 8 * 2 * 4 * 6
    assert case.nbytes == 2 * 8 * 2 * (2 * 4 * 3 + 2 * 2 * 3)


def test_kernels_to_build(script):
    build = script("gpu_build")
    names = {key[0] for key in build.keys(build.device_of((7, 5)))}
    gradients = {"gradient_" + name for name in ("rows", "bias", "sums")}
    gradients |= {"simt_gradient_q", "simt_gradient_kv"}
    assert names == {"simt", "combine", "missing"} | gradients
