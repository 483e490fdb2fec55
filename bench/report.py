"""Turn a file of results into the tables of README.md and a picture beside the file.

python bench/report.py
python bench/report.py bench/results/some-processor.json
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import cases
import matplotlib as mpl
import numpy as np
import peers
import record
import summary
from matplotlib.patches import Patch

README = record.ROOT / "README.md"
BEGIN = "<!-- begin: written by bench/report.py -->"
END = "<!-- end: written by bench/report.py -->"
MIB = 1 << 20

COLORS = {name: f"C{index}" for index, name in enumerate(peers.CONTENDERS)}


def rows_by_case(forward: dict, names: list[str]) -> dict[str, dict[str, summary.Row]]:
    """{case: {contender: row}} for the cases of names that were measured."""
    return {
        name: {row.contender: row for row in summary.rows(name, forward[name], peers.OURS)}
        for name in names
        if name in forward
    }


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


def caption(setting: dict) -> str:
    """On what, with what and at which commit the figures were measured."""
    versions = ", ".join(f"{name} {version}" for name, version in setting["versions"].items())
    return (
        f"{setting['cpu']}, {setting['num_threads']} threads, Python {setting['python']}, "
        f"{versions}; commit {setting['commit'] or 'unknown'}."
    )


def text(results: dict, picture: str) -> str:
    """All that stands between the markers of README.md."""
    forward = results["forward"]
    rows = rows_by_case(forward, [case.name for case in cases.SUITE])
    parts = [
        "Columns of peers: how many times longer they take than fastattn, median of interleaved "
        "rounds; below 1 the peer is faster, – where it cannot run the case.",
        speed_table(rows, forward),
    ]
    if "startup" in results:
        parts.append(startup_table(results["startup"]))
    if "memory" in results:
        parts.append(memory_table(results["memory"]))
    parts += [caption(next(iter(forward.values()))["setting"]), f"![The same as plots]({picture})"]
    return "\n\n".join(parts)


def fill(readme: str, between: str) -> str:
    """readme with the text between the markers replaced."""
    head, _, rest = readme.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not end:
        raise ValueError(f"README.md must hold the markers {BEGIN} and {END}")
    return f"{head}{BEGIN}\n{between}\n{END}{tail}"


def draw(results: dict, path: Path) -> None:
    """Four small plots in one picture."""
    mpl.use("agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(2, 2, figsize=(10, 8), layout="constrained")
    forward = results["forward"]
    rows = rows_by_case(forward, [case.name for case in cases.SUITE])
    draw_speed(axes[0, 0], rows)
    draw_limit(axes[0, 1], rows)
    draw_sweep(axes[1, 0], rows_by_case(forward, [case.name for case in cases.SWEEP]))
    draw_memory(axes[1, 1], results.get("memory", {}))
    figure.savefig(path, dpi=90)


def draw_speed(axes, rows: dict[str, dict[str, summary.Row]]) -> None:
    """Time of the fastest peer over fastattn's, with the quartiles of the rounds."""
    fastest = [summary.fastest_peer(list(found.values()), peers.OURS) for found in rows.values()]
    for place, row in enumerate(fastest):
        if row is None:
            continue
        spread = [[row.ratio - row.ratio_low], [row.ratio_high - row.ratio]]
        axes.barh(place, row.ratio, xerr=spread, color=COLORS[row.contender])
    axes.axvline(1, color="black", linewidth=0.8)
    shown = dict.fromkeys(row.contender for row in fastest if row)
    axes.legend([Patch(color=COLORS[name]) for name in shown], list(shown), fontsize=6)
    axes.set_yticks(range(len(rows)), list(rows), fontsize=7)
    axes.invert_yaxis()
    axes.set_title("time of the fastest peer / time of fastattn", fontsize=9)


def draw_limit(axes, rows: dict[str, dict[str, summary.Row]]) -> None:
    """Share of the machine's limit that fastattn reaches."""
    percents = [found[peers.OURS].percent or 0 for found in rows.values()]
    axes.barh(range(len(rows)), percents, color=COLORS[peers.OURS])
    axes.set_yticks(range(len(rows)), list(rows), fontsize=7)
    axes.set_xlim(0, 100)
    axes.invert_yaxis()
    axes.set_title("fastattn, per cent of the measured limit", fontsize=9)


def line(axes, name: str, points: list[tuple[int, float]]) -> None:
    """One contender's points, if it has any."""
    if points:
        style = {"marker": "o", "markersize": 3, "color": COLORS[name]}
        axes.plot(*zip(*points, strict=True), label=name, **style)


def draw_sweep(axes, rows: dict[str, dict[str, summary.Row]]) -> None:
    """Speed against seqlen."""
    for name in peers.CONTENDERS:
        points = [
            (cases.CASES[case].seqlen_q, found[name].gflop_s)
            for case, found in rows.items()
            if name in found
        ]
        line(axes, name, points)
    axes.set_xscale("log", base=2)
    axes.set_xlabel("seqlen", fontsize=8)
    axes.set_title("GFLOP/s, 8 heads, head_dim 64, not causal", fontsize=9)
    if rows:
        axes.legend(fontsize=6)


def draw_memory(axes, memory: dict) -> None:
    """Memory against seqlen."""
    for name, result in memory.items():
        points = [(int(n), size / MIB) for n, size in result["extra_bytes"].items() if size]
        line(axes, name, points)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("seqlen", fontsize=8)
    axes.set_title("MiB beyond inputs and output, 2 heads, head_dim 64", fontsize=9)
    if memory:
        axes.legend(fontsize=6)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", type=Path, nargs="?", default=record.default_path())
    path = parser.parse_args().results.resolve()
    results = json.loads(path.read_text())
    picture = path.with_suffix(".png")
    draw(results, picture)
    between = text(results, picture.relative_to(record.ROOT).as_posix())
    README.write_text(fill(README.read_text(), between))


if __name__ == "__main__":
    main()
