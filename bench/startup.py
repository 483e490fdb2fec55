"""What a user waits for before the first result: imports and the first call, in fresh processes.

    python bench/startup.py
    python bench/startup.py --rounds 9 --json
    python bench/startup.py --dtypes float16,bfloat16,float64

Seconds are taken inside the fresh process, so that starting Python is not counted.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
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
q = np.ones((1, 8, 256, 64), "{dtype}")
start = time.perf_counter()
import fastattn
fastattn.attention(q, q, q)
print(time.perf_counter() - start)
"""

DTYPES = ("float32", "float16", "bfloat16", "float64")


class Stage(NamedTuple):
    """What is timed in a process of its own."""

    program: str
    cold: bool = False  # whether FASTATTN_CACHE is a fresh folder


IMPORTS = {f"import {name}": Stage(IMPORT.format(module=name)) for name in ("numpy", "fastattn")}


def first_calls(dtype: str) -> dict[str, Stage]:
    """The first call with arrays of one dtype; float32 goes without saying."""
    program, of = FIRST_CALL.format(dtype=dtype), "" if dtype == "float32" else f", {dtype}"
    return {
        f"first call, cold cache{of}": Stage(program, cold=True),
        f"first call, warm cache{of}": Stage(program),
    }


def seconds_in_fresh_process(program: str, cache: Path) -> float:
    """Run program in a new Python with FASTATTN_CACHE=cache and return the number it prints."""
    # With bytecode, as an installed package has it: without, `import fastattn` takes three times
    # as long.
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=repository.ROOT,
        env={**environment, "FASTATTN_CACHE": str(cache)},
        capture_output=True,
        text=True,
        check=True,
    )
    return float(done.stdout)


def measure(stage: Stage, cache: Path) -> float:
    """Seconds of one stage. cache is a warm cache; a cold stage gets an empty one of its own."""
    if not stage.cold:
        return seconds_in_fresh_process(stage.program, cache)
    with tempfile.TemporaryDirectory() as empty:
        return seconds_in_fresh_process(stage.program, Path(empty))


def run(stages: dict[str, Stage], rounds: int) -> dict[str, dict]:
    """{stage: {"seconds": [per round]}}, the stages interleaved."""
    results: dict[str, dict] = {name: {"seconds": []} for name in stages}
    with tempfile.TemporaryDirectory() as cache:
        for stage in stages.values():
            seconds_in_fresh_process(stage.program, Path(cache))  # fills the cache
        for _ in range(rounds):
            for name, stage in stages.items():
                results[name]["seconds"].append(measure(stage, Path(cache)))
    return results


def dtypes_of(text: str) -> list[str]:
    """Names of dtypes by a comma-separated list."""
    for word in text.split(","):
        if word not in DTYPES:
            raise ValueError(f"dtypes must be among {DTYPES}, got {word!r}")
    return text.split(",")


def main() -> None:
    parser = repository.parser(__doc__)
    repository.add_json(parser)
    parser.add_argument("--rounds", type=count, default=5, help="of all stages (default 5)")
    parser.add_argument(
        "--dtypes", type=checked(dtypes_of), default="float32", help="of first calls"
    )
    options = parser.parse_args()
    stages = dict(IMPORTS)
    for dtype in options.dtypes:
        stages.update(first_calls(dtype))
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
