"""What the fuzzer of tests/fuzz calls, on inputs of its own: with atheris or without."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from fuzz import call
from processes import PACKAGE

FILE = Path(call.__file__)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_inputs_at_random(backend, rng):
    """Most are refused; some are not."""
    cases = call.small_cases()
    told = [
        call.check(rng.integers(0, 256, 2 * rng.integers(1, 4)).astype(np.uint8).tobytes(), cases,
                   ("numpy", backend))
        for _ in range(300)
    ]  # fmt: skip
    refused = [answer for answer in told if isinstance(answer, call.REFUSALS)]
    assert 100 < len(refused) < 280
    assert len({str(error)[:20] for error in refused}) > 20


def test_a_difference_is_noticed(monkeypatch):
    right = call.call

    def wrong(given, backend):
        out, lse = right(given, "numpy")
        return (out * np.nan, lse) if backend == "cpu" else (out, lse)

    monkeypatch.setattr(call, "call", wrong)
    with pytest.raises(AssertionError):
        call.check(b"\0\0", call.small_cases(), ("numpy", "cpu"))


@pytest.mark.slow
def test_fuzzer_finds_nothing(tmp_path):
    pytest.importorskip("atheris")
    environment = {**os.environ, "PYTHONPATH": str(PACKAGE.parent)}
    # Linux counts what this process once used as used by what it starts: test_large's gigabytes.
    limits = ["-max_total_time=60", "-max_len=18", "-timeout=60", "-rss_limit_mb=16384"]
    command = [sys.executable, str(FILE), *limits]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (runs,) = re.findall(r"Done (\d+) runs", done.stderr)
    assert int(runs) > 500
