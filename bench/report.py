"""Turn a file of results into the tables of README.md and a picture beside the file. Those of the
same processor held to AVX2, if they lie beside it, go into bench/README.md, and so does how far
prefill is from what the machine allows.

python bench/report.py
python bench/report.py bench/results/some-processor.json
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import backward
import distance
import numpy as np
import repository

from fastattn.benchmark import cases, peers, plots, record, summary

README = repository.ROOT / "README.md"
BENCH_README = repository.ROOT / "bench" / "README.md"
PEERS = (
    "Columns of peers: how many times longer they take than fastattn, median of interleaved "
    "rounds; below 1 the peer is faster, – where it cannot run the case."
)
# What stands before and after a text in a README, by the text's name.
MARKERS = {
    name: [f"<!-- {word}{name}: written by bench/report.py -->" for word in ("begin", "end")]
    for name in ("", " distance")
}
MIB = 1 << 20


def shape_text(case: cases.Case) -> str:
    """The sizes of a case in a few words."""
    heads = f"{case.heads_q}" if case.group == 1 else f"{case.heads_q}/{case.heads_kv}"
    same = case.seqlen_q == case.seqlen_k
    seqlen = f"{case.seqlen_q}" if same else f"{case.seqlen_q} of {case.seqlen_k}"
    extras = [case.masking, "causal" if case.causal else ""]
    extras.append(case.dtype if case.dtype != "float32" else "")
    words = [f"{case.batch} × {heads} × {seqlen} × {case.head_dim}", *filter(None, extras)]
    return ", ".join(words)


def markdown(header: list[str], body: list[Sequence[str]]) -> str:
    """A table; all columns but the first to the right."""
    lines = [header, ["---"] + ["--:"] * (len(header) - 1), *body]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def speed_table(rows: dict[str, dict[str, summary.Row]], forward: dict) -> str:
    """fastattn's time and share of the limit; for each peer how many times longer it takes."""
    present = {name for found in rows.values() for name in found}
    others = [name for name in peers.CONTENDERS if name in present and name != peers.OURS]
    header = ["workload", "batch × heads × seqlen × head_dim", peers.OURS, "GFLOP/s", "limit"]
    body = []
    for name, found in rows.items():
        ours = found[peers.OURS]
        limit = "–" if ours.percent is None else f"{ours.percent:.0f} % {forward[name]['bound']}"
        time = summary.time_text(ours.seconds)
        cells = [name, shape_text(cases.CASES[name]), time, f"{ours.gflop_s:.1f}", limit]
        cells += [f"{found[other].ratio:.2f}" if other in found else "–" for other in others]
        body.append(cells)
    return markdown(header + others, body)


def gradients_table(gradients: dict) -> str:
    """Backward alone against the limit; with forward, torch's time over ours."""
    header = ["gradients", "batch × heads × seqlen × head_dim", *backward.COLUMNS]
    rows = ((case, gradients[case.name]) for case in backward.CASES if case.name in gradients)
    body = [[case.name, shape_text(case), *backward.cells(row)] for case, row in rows]
    return markdown(header, body)


def startup_table(startup: dict) -> str:
    """Median seconds of each stage."""
    times = [summary.time_text(float(np.median(result["seconds"]))) for result in startup.values()]
    return markdown(["in a fresh process", "median"], list(zip(startup, times, strict=True)))


def memory_table(memory: dict) -> str:
    """MiB beyond inputs and output."""
    seqlens = list(next(iter(memory.values()))["extra_bytes"])
    header = ["MiB beyond inputs and output", *(f"seqlen {n}" for n in seqlens)]
    return markdown(header, [[name, *memory_cells(row)] for name, row in memory.items()])


def memory_cells(row: dict) -> list[str]:
    """MiB for each seqlen; – where the contender does not apply."""
    sizes = row["extra_bytes"].values()
    return ["–" if size is None else f"{size / MIB:.1f}" for size in sizes]


def caption(*sections: dict[str, dict]) -> str:
    """On what, with what and at which commits the figures were measured."""
    settings = [result["setting"] for section in sections for result in section.values()]
    every = {name: version for each in settings for name, version in each["versions"].items()}
    commits = dict.fromkeys(each["commit"] or "unknown" for each in settings)
    versions = ", ".join(f"{name} {version}" for name, version in every.items())
    return (
        f"{record.machine_text(settings[0])}, Python {settings[0]['python']}, "
        f"{versions}; commit {', '.join(commits)}."
    )


def suite_table(forward: dict) -> str:
    """speed_table() of the suite."""
    rows = plots.rows_by_case(forward, [case.name for case in cases.SUITE])
    return f"{PEERS}\n\n{speed_table(rows, forward)}"


def lesser_text(results: dict) -> str:
    """The suite as a lesser machine runs it, for bench/README.md."""
    return f"{suite_table(results['forward'])}\n\n{caption(results['forward'])}"


def text(results: dict, picture: str) -> str:
    """All that stands between the markers of README.md."""
    forward = results["forward"]
    parts = [suite_table(forward)]
    if "backward" in results:
        parts.append(gradients_table(results["backward"]))
    if "startup" in results:
        parts.append(startup_table(results["startup"]))
    if "memory" in results:
        parts.append(memory_table(results["memory"]))
    shown = (results[name] for name in ("backward", "startup", "memory") if name in results)
    parts += [caption(forward, *shown), f"![The same as plots]({picture})"]
    return "\n\n".join(parts)


def distance_text(results: dict, lesser: dict) -> str:
    """How far prefill is from what the machine allows, for bench/README.md."""
    tables = [distance.pieces_table(results, lesser), distance.peers_table(results)]
    measured = (results["forward"], results["inside"], lesser.get("inside", {}))
    return "\n\n".join([*(markdown(*table) for table in tables), caption(*measured)])


def fill(readme: str, between: str, name: str = "") -> str:
    """readme with the text between the markers of that name replaced."""
    begin, end = MARKERS[name]
    head, _, rest = readme.partition(begin)
    _, found, tail = rest.partition(end)
    if not found:
        raise ValueError(f"README.md must hold the markers {begin} and {end}")
    return f"{head}{begin}\n{between}\n{end}{tail}"


def held_to_avx2(path: Path) -> dict:
    """The results of the same processor as x86-64-v3; {} if there are none."""
    beside = path.with_name(f"{path.stem}-x86-64-v3.json")
    return json.loads(beside.read_text()) if beside.exists() else {}


def fill_bench(readme: str, results: dict, lesser: dict) -> str:
    """bench/README.md with all that the results say."""
    if "forward" in lesser:
        readme = fill(readme, lesser_text(lesser))
    if "inside" in results:
        readme = fill(readme, distance_text(results, lesser), " distance")
    return readme


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", type=Path, nargs="?", default=repository.RESULTS)
    path = parser.parse_args().results.resolve()
    results = json.loads(path.read_text())
    if any(result["setting"].get("target") for result in results["forward"].values()):
        parser.error(f"results must be those of code for the machine itself, got {path.name}")
    picture = path.with_suffix(".png")
    plots.draw(results, picture)
    between = text(results, picture.relative_to(repository.ROOT).as_posix())
    README.write_text(fill(README.read_text(), between))
    BENCH_README.write_text(fill_bench(BENCH_README.read_text(), results, held_to_avx2(path)))


if __name__ == "__main__":
    main()
