"""What a user waits for before the first result: imports and the first call, in fresh processes.

    python bench/startup.py
    python bench/startup.py --rounds 9 --json

Seconds are taken inside the fresh process, so that starting Python is not counted.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import repository
from rich.console import Console
from rich.table import Table

from fastattn.benchmark import record, summary
from fastattn.commands.terminal import count
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
q = np.ones((1, 8, 256, 64), np.float32)
start = time.perf_counter()
import fastattn
fastattn.attention(q, q, q)
print(time.perf_counter() - start)
"""

WARM = "first call, warm cache"

# (program, whether FASTATTN_CACHE is a fresh folder)
STAGES = {
    "import numpy": (IMPORT.format(module="numpy"), False),
    "import fastattn": (IMPORT.format(module="fastattn"), False),
    "first call, cold cache": (FIRST_CALL, True),
    WARM: (FIRST_CALL, False),
}


def seconds_in_fresh_process(program: str, cache: Path) -> float:
    """Run program in a new Python with FASTATTN_CACHE=cache and return the number it prints."""
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=repository.ROOT,
        env={**os.environ, "FASTATTN_CACHE": str(cache)},
        capture_output=True,
        text=True,
        check=True,
    )
    return float(done.stdout)


def measure(stage: str, cache: Path) -> float:
    """Seconds of one stage. cache is a warm cache; a cold stage gets an empty one of its own."""
    program, cold = STAGES[stage]
    if not cold:
        return seconds_in_fresh_process(program, cache)
    with tempfile.TemporaryDirectory() as empty:
        return seconds_in_fresh_process(program, Path(empty))


def run(rounds: int) -> dict[str, dict]:
    """{stage: {"seconds": [per round]}}, the stages interleaved."""
    results = {stage: {"seconds": []} for stage in STAGES}
    with tempfile.TemporaryDirectory() as cache:
        measure(WARM, Path(cache))  # fills the cache
        for _ in range(rounds):
            for stage, result in results.items():
                result["seconds"].append(measure(stage, Path(cache)))
    return results


def main() -> None:
    parser = repository.parser(__doc__)
    repository.add_json(parser)
    parser.add_argument("--rounds", type=count, default=5, help="of all stages (default 5)")
    options = parser.parse_args()
    results = run(options.rounds)
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
