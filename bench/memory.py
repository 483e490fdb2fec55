"""Peak memory beyond inputs and output, each measurement in a fresh process. Linux only.

python bench/memory.py
python bench/memory.py --seqlens 1024,4096,16384 --json
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import repository
from rich.console import Console
from rich.table import Table

from fastattn.benchmark import cases, peers, record
from fastattn.commands.terminal import checked, count
from fastattn.machine import default_num_threads

MIB = 1 << 20
SMALL = cases.CASES["seqlen-128"]  # run first: it loads libraries, compiles and starts threads
HEADS = 2


def case_of(seqlen: int) -> cases.Case:
    """float32, 2 heads, head_dim 64."""
    sizes = {"heads_q": HEADS, "heads_kv": HEADS, "seqlen_q": seqlen, "seqlen_k": seqlen}
    return replace(SMALL, name=f"memory-{seqlen}", **sizes)


def _status_bytes(field: str) -> int:
    status = Path("/proc/self/status").read_text()
    return int(re.search(rf"^{field}:\s*(\d+) kB$", status, re.MULTILINE).group(1)) << 10


def extra_bytes(contender: str, seqlen: int, num_threads: int) -> int | None:
    """Peak resident memory of one call here, less what was resident before and the output."""
    small = peers.entry(contender, SMALL, SMALL.inputs(), num_threads)
    case = case_of(seqlen)
    entry = peers.entry(contender, case, case.inputs(), num_threads)
    if isinstance(small, str) or isinstance(entry, str):
        return None
    small.run()
    # The kernel sets the peak back to what is resident now. (ru_maxrss would also count what the
    # parent process held when it started this one.)
    Path("/proc/self/clear_refs").write_text("5")
    before = _status_bytes("VmRSS")
    result = entry.run()
    peak = _status_bytes("VmHWM")
    return max(0, peak - before - entry.unpack(result).nbytes)


def measure(contender: str, seqlen: int, num_threads: int) -> int | None:
    """extra_bytes in a fresh process."""
    done = subprocess.run(
        [sys.executable, __file__, "--one", contender, str(seqlen), str(num_threads)],
        capture_output=True,
        text=True,
        check=True,
    )
    return None if done.stdout.strip() == "None" else int(done.stdout)


def main() -> None:
    parser = repository.parser(__doc__)
    repository.add_json(parser)
    parser.add_argument("--seqlens", default="1024,4096,16384", help="comma-separated")
    among = "parts of " + ", ".join(peers.CONTENDERS) + ", comma-separated"
    parser.add_argument(
        "--peers", type=checked(peers.select), default="fastattn,formula,torch", help=among
    )
    number = default_num_threads()
    parser.add_argument("--threads", type=count, default=number, help=f"default {number}")
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        contender, seqlen, num_threads = options.one
        print(extra_bytes(contender, int(seqlen), int(num_threads)))
        return
    seqlens = [int(seqlen) for seqlen in options.seqlens.split(",")]
    results = {
        name: {str(n): measure(name, n, options.threads) for n in seqlens} for name in options.peers
    }
    title = f"MiB beyond inputs and output: {HEADS} heads, head_dim 64, float32"
    shown = Table("contender", *(f"seqlen {n}" for n in seqlens), title=title)
    for name, found in results.items():
        cells = ("–" if size is None else f"{size / MIB:.1f}" for size in found.values())
        shown.add_row(name, *cells)
    Console().print(shown)
    if options.json:
        kept = {name: {"extra_bytes": found} for name, found in results.items()}
        record.save(options.json, "memory", repository.setting(options.threads), kept)


if __name__ == "__main__":
    main()
