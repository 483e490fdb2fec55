"""The SIMT kernels in Numba's simulator, through the whole of attention(backend="cuda")."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import fastattn

SCRIPT = Path(__file__).with_name("simulated_cases.py")


def names():
    """The cases of the script, which this process, without a simulator, cannot import."""
    found = []
    for node in ast.walk(ast.parse(SCRIPT.read_text())):
        kind = getattr(node.func, "id", "") if isinstance(node, ast.Call) else ""
        if kind in ("trial", "gradient") and isinstance(node.args[0], ast.Constant):
            found.append("gradients, " * (kind == "gradient") + node.args[0].value)
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "OTHERS":
            found += [name.id for name in node.value.elts]
    return [name for name in found if name != "other tile"]


@pytest.fixture(scope="module")
def answers():
    """What is wrong with each case, and without each barrier: one process for all."""
    pytest.importorskip("numba")
    variables = os.environ | {"NUMBA_ENABLE_CUDASIM": "1", "FASTATTN_CACHE": "0"}
    variables["PYTHONPATH"] = os.pathsep.join(
        (str(Path(fastattn.__file__).parent.parent), str(SCRIPT.parent))
    )
    done = subprocess.run(
        [sys.executable, SCRIPT], capture_output=True, text=True, timeout=550, env=variables
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", names())
def test_the_answer_is_that_of_the_oracle(answers, name):
    assert answers[0][name] == ""


def test_no_other_case_is_in_the_script(answers):
    assert set(answers[0]) == set(names())


def test_each_barrier_is_needed(answers):
    """Without it some case has a race; and there is none that no case needs. (One that counts votes
    is needed for these.)
    """
    barriers = set()
    for path in Path(fastattn.__file__).parent.joinpath("cuda").glob("*.py"):
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if "cuda.syncthreads" in line and "return not cuda.syncthreads_or" not in line:
                barriers.add(f"{path.name}:{number}")
    assert set(answers[1]) == barriers
    assert all("race: " in wrong for wrong in answers[1].values())
