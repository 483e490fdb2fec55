"""What a user waits for before the first result: imports and the first call, in fresh processes.

    python bench/startup.py
    python bench/startup.py --rounds 9 --json
    python bench/startup.py --calls '*' --warm                       # every kernel
    pip wheel . --no-deps -w dist; python bench/startup.py --wheel dist/*.whl

Seconds are taken inside the fresh process, so that starting Python is not counted.
"""

from __future__ import annotations

import fnmatch
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
import repository
from rich.console import Console
from rich.table import Table

from fastattn.benchmark import record, summary
from fastattn.commands.terminal import checked, count
from fastattn.machine import default_num_threads

IMPORT = """
import time
start = time.perf_counter()
import {module}
print(time.perf_counter() - start)
"""

FIRST_CALL = """
import time
import numpy as np
if "{dtype}" == "bfloat16":
    import ml_dtypes
x, one = np.ones((1, 8, 256, 64), "{dtype}"), np.ones((1, 8, 1, 64), "{dtype}")
keys = np.ones((1, 8, 8192, 64), "{dtype}")
start = time.perf_counter()
import fastattn
{call}
print(time.perf_counter() - start)
"""

ATTENTION = "fastattn.attention(x, x, x)"
GRADIENTS = "fastattn.attention_backward(x, x, x, x, *fastattn.attention(x, x, x, return_lse=True))"
# What needs a kernel of its own: {name: (call, dtypes)}.
FLOATS = ("float32", "float64")
DTYPES = (*FLOATS, "float16", "bfloat16")
CALLS = {
    "attention": (ATTENTION, DTYPES),
    "decoding": ("fastattn.attention(one, keys, keys)", DTYPES),
    "gradients": (GRADIENTS, DTYPES),
    "relu": ("fastattn.nn.relu(x)", FLOATS),
    "silu": ("fastattn.nn.silu(x)", FLOATS),
    "gelu": ("fastattn.nn.gelu(x)", FLOATS),
    "gelu_tanh": ("fastattn.nn.gelu_tanh(x)", FLOATS),
    "layer_norm": ("fastattn.nn.layer_norm(x, fastattn.nn.LayerNormWeights(one[0, 0, 0]))", FLOATS),
    "rms_norm": ("fastattn.nn.rms_norm(x, fastattn.nn.RMSNormWeights(one[0, 0, 0]))", FLOATS),
}


class Stage(NamedTuple):
    """What is timed in a process of its own."""

    program: str
    cold: bool = False  # whether FASTATTN_CACHE is a fresh folder
    package: Path | None = None  # where fastattn is installed, if not these sources


IMPORTS = {f"import {name}": Stage(IMPORT.format(module=name)) for name in ("numpy", "fastattn")}
PROGRAM = FIRST_CALL.format(call=ATTENTION, dtype="float32")
FIRST_CALLS = {
    "first call, cold cache": Stage(PROGRAM, cold=True),
    "first call, warm cache": Stage(PROGRAM),
}


def first_calls(wanted: str) -> dict[str, Stage]:
    """The first call, cold and warm, of the kernels that match a pattern: "gradients, float64".

    Raises
    ------
    ValueError  none does
    """
    stages = {}
    for name, (call, dtypes) in CALLS.items():
        for dtype in dtypes:
            if fnmatch.fnmatch(of := f"{name}, {dtype}", wanted):
                program = FIRST_CALL.format(call=call, dtype=dtype)
                stages[f"first call, cold cache, {of}"] = Stage(program, cold=True)
                stages[f"first call, warm cache, {of}"] = Stage(program)
    if not stages:
        raise ValueError(f"calls must be a pattern of {tuple(CALLS)} and dtypes, got {wanted!r}")
    return stages


@contextmanager
def installed(wheel: Path) -> Iterator[dict[str, Stage]]:
    """The first call of what pip installs from a wheel into a new folder."""
    with tempfile.TemporaryDirectory() as folder:
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", folder]
        subprocess.run([*pip, str(wheel.resolve())], check=True)
        yield {"first call, installed wheel": Stage(PROGRAM, cold=True, package=Path(folder))}


def seconds_in_fresh_process(stage: Stage, cache: Path) -> float:
    """Run a stage in a new Python with FASTATTN_CACHE=cache and return the number it prints."""
    package = stage.package or repository.ROOT
    # With bytecode, as an installed package has it: without, `import fastattn` takes three times
    # as long.
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    done = subprocess.run(
        [sys.executable, "-c", stage.program],
        cwd=package,
        env={**environment, "FASTATTN_CACHE": str(cache), "PYTHONPATH": str(package)},
        capture_output=True,
        text=True,
        check=True,
    )
    return float(done.stdout)


def measure(stage: Stage, cache: Path) -> float:
    """Seconds of one stage. cache is a warm cache; a cold stage gets an empty one of its own."""
    if not stage.cold:
        return seconds_in_fresh_process(stage, cache)
    with tempfile.TemporaryDirectory() as empty:
        return seconds_in_fresh_process(stage, Path(empty))


def run(stages: dict[str, Stage], rounds: int) -> dict[str, dict]:
    """{stage: {"seconds": [per round]}}, the stages interleaved."""
    results: dict[str, dict] = {name: {"seconds": []} for name in stages}
    with tempfile.TemporaryDirectory() as cache:
        for stage in stages.values():
            seconds_in_fresh_process(stage, Path(cache))  # fills the cache
        for _ in range(rounds):
            for name, stage in stages.items():
                results[name]["seconds"].append(measure(stage, Path(cache)))
    return results


def main() -> None:
    parser = repository.parser(__doc__)
    repository.add_json(parser)
    parser.add_argument("--rounds", type=count, default=5, help="of all stages (default 5)")
    parser.add_argument(
        "--calls", type=checked(first_calls), default=FIRST_CALLS, help="a pattern of kernels"
    )
    parser.add_argument("--warm", action="store_true", help="leave out what compiles")
    parser.add_argument("--wheel", type=Path, metavar="PATH", help="one that is built")
    options = parser.parse_args()
    stages = {**IMPORTS, **options.calls}
    if options.warm:
        stages = {name: stage for name, stage in stages.items() if not stage.cold}
    with ExitStack() as stack:
        if options.wheel:
            stages.update(stack.enter_context(installed(options.wheel)))
        results = run(stages, options.rounds)
    shown = Table("stage", "median", "fastest", "slowest")
    for stage, result in results.items():
        seconds = result["seconds"]
        cells = (float(np.median(seconds)), min(seconds), max(seconds))
        shown.add_row(stage, *map(summary.time_text, cells))
    Console().print(shown)
    if options.json:
        record.save(options.json, "startup", repository.setting(default_num_threads()), results)


if __name__ == "__main__":
    main()
