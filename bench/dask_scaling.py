"""fastattn.dask on clusters of this machine: scaling, overhead and peak memory. Linux only.

python bench/dask_scaling.py
python bench/dask_scaling.py --rounds 3 --chunk 2048 --json

Every worker is a process with one thread. Keys and values lie in files. The contenders take turns:
one call of fastattn.attention() on one thread, one worker, two workers.
"""

from __future__ import annotations

import re
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import repository
from dask.distributed import Client, LocalCluster, get_task_stream, wait
from rich.table import Table

import fastattn
import fastattn.dask
from fastattn.benchmark import record
from fastattn.commands import terminal

MIB = 1 << 20
HEADS, HEAD_DIM = 8, 64


def write_arrays(folder: Path, seqlen: int) -> list[Path]:
    rng = np.random.default_rng(0)
    paths = [folder / f"{name}.npy" for name in "qkv"]
    for path in paths:
        np.save(path, rng.standard_normal((HEADS, seqlen, HEAD_DIM), np.float32))
    return paths


def memory(field: str) -> int:
    """Bytes of this process, as Linux counts them."""
    status = Path("/proc/self/status").read_text()
    found = re.search(rf"^{field}:\s*(\d+) kB$", status, re.MULTILINE)
    assert found is not None
    return int(found.group(1)) << 10


def forget_peak() -> int:
    """Let the peak begin here; return what is resident."""
    Path("/proc/self/clear_refs").write_text("5")
    return memory("VmRSS")


def one_call(paths: list[Path]) -> Callable[[], float]:
    q, k, v = map(np.load, paths)

    def run() -> float:
        with fastattn.num_threads(1):
            start = time.perf_counter()
            fastattn.attention(q, k, v, causal=True)
            return time.perf_counter() - start

    return run


def lazily(paths: list[Path], chunk: int) -> Any:
    chunks = (HEADS, chunk, HEAD_DIM)
    maps = (np.load(path, mmap_mode="r") for path in paths)
    q, k, v = (fastattn.dask.from_memmap(a, chunks=chunks) for a in maps)
    return fastattn.dask.attention(q, k, v, causal=True)


def on_cluster(client: Client, paths: list[Path], chunk: int) -> Callable[[], float]:
    def run() -> float:
        start = time.perf_counter()
        result = client.persist(lazily(paths, chunk))
        wait(result)
        return time.perf_counter() - start

    return run


def overhead(client: Client, run: Callable[[], float], workers: int) -> float:
    """Share of the workers' time in which they compute no task."""
    with get_task_stream(client) as stream:
        seconds = run()
    steps = (step for task in stream.data for step in task["startstops"])
    busy = sum(step["stop"] - step["start"] for step in steps if step["action"] == "compute")
    return 1 - busy / (workers * seconds)


def peaks(client: Client, paths: list[Path], chunk: int) -> list[int]:
    """Bytes that each worker needs beyond what it had before, where no result is kept."""
    before = client.run(forget_peak)
    wait(client.persist(lazily(paths, chunk).sum()))
    return [peak - before[worker] for worker, peak in client.run(memory, "VmHWM").items()]


def measure(paths: list[Path], chunk: int, rounds: int) -> dict[str, Any]:
    shape = {"threads_per_worker": 1, "dashboard_address": ":0", "processes": True}
    with (
        LocalCluster(n_workers=1, **shape) as one,
        LocalCluster(n_workers=2, **shape) as two,
        Client(one) as client_one,
        Client(two) as client_two,
    ):
        contenders = {
            "one call": one_call(paths),
            "1 worker": on_cluster(client_one, paths, chunk),
            "2 workers": on_cluster(client_two, paths, chunk),
        }
        small = write_arrays(Path(tempfile.mkdtemp(dir=paths[0].parent)), 2048)
        for client in (client_one, client_two):  # workers import and load the kernel
            on_cluster(client, small, 512)()
        samples: dict[str, list[float]] = {name: [] for name in contenders}
        for _ in range(rounds):
            for name, run in contenders.items():
                samples[name].append(run())
        found = {name: {"seconds": values} for name, values in samples.items()}
        found["1 worker"]["overhead"] = overhead(client_one, contenders["1 worker"], 1)
        found["2 workers"]["overhead"] = overhead(client_two, contenders["2 workers"], 2)
        found["2 workers"]["peak"] = peaks(client_two, paths, chunk)
    return found


def ratio(found: dict[str, Any], name: str, to: str) -> float:
    """Median over the rounds of the time of one contender over that of another."""
    pairs = zip(found[name]["seconds"], found[to]["seconds"], strict=True)
    return statistics.median(a / b for a, b in pairs)


def print_table(found: dict[str, Any], seqlen: int, chunk: int) -> None:
    shape = f"{HEADS} heads x {seqlen} x {HEAD_DIM}, causal, float32, chunks of {chunk}"
    block = HEADS * chunk * HEAD_DIM * 4
    limit = (3 * 2 * block + block) / MIB
    caption = f"3 chunks of k and v and one of out are {limit:.0f} MiB"
    table = Table(title=shape, caption=caption)
    for heading in ("", "seconds", "of 1 worker", "no task", "peak of a worker"):
        table.add_column(heading, justify="right")
    for name, values in found.items():
        seconds, times = statistics.median(values["seconds"]), ratio(found, "1 worker", name)
        idle, peak = values.get("overhead"), max(values.get("peak", [0])) / MIB
        cells = [
            f"{100 * idle:.1f} %" if idle is not None else "",
            f"{peak:.0f} MiB" if peak else "",
        ]
        table.add_row(name, f"{seconds:.2f}", f"{times:.2f}", *cells)
    terminal.console().print(table)


def main() -> None:
    parser = repository.parser(__doc__)
    repository.add_json(parser)
    parser.add_argument("--rounds", type=terminal.count, default=2)
    parser.add_argument("--seqlen", type=terminal.count, default=32768)
    parser.add_argument("--chunk", type=terminal.count, default=4096)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        paths = write_arrays(Path(folder), options.seqlen)
        found = measure(paths, options.chunk, options.rounds)
    print_table(found, options.seqlen, options.chunk)
    if options.json:
        record.save(options.json, "dask", repository.setting(1), found)


if __name__ == "__main__":
    main()
