"""The results as one picture: a small plot for each thing that was measured."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..optional import missing
from . import peers, summary
from .cases import CASES, SUITE, SWEEP

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MIB = 1 << 20
COLORS = {name: f"C{index}" for index, name in enumerate(peers.CONTENDERS)}
Rows = dict[str, dict[str, summary.Row]]  # by case and contender


def figure_class() -> type[Figure]:
    """matplotlib's Figure, which draws without a screen.

    Raises ImportError, with the command that installs matplotlib, where it is not.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise missing("--plot", "matplotlib", "'fastattn[bench]'") from error
    return Figure


def check(path: Path) -> None:
    """Raise ImportError or ValueError if draw() could not write this file."""
    canvas = figure_class()().canvas
    if path.suffix[1:] not in canvas.get_supported_filetypes():
        kinds = ", ".join(canvas.get_supported_filetypes())
        raise ValueError(f"a plot must be one of {kinds}, got {path}")


def draw(results: dict[str, Any], path: Path) -> None:
    """Write a picture of results: the sections of a file that record.save() makes."""
    panels = list(_panels(results))
    rows = -(-len(panels) // 2)
    figure = figure_class()(figsize=(11, 4 * rows), layout="constrained")
    for number, panel in enumerate(panels):
        panel(figure.add_subplot(rows, min(2, len(panels)), number + 1))
    figure.savefig(path, dpi=90)


def _panels(results: dict[str, Any]) -> list[Callable[[Axes], None]]:
    """A function that draws for each plot that there are figures for."""
    forward = results.get("forward", {})
    sweep = rows_by_case(forward, [case.name for case in SWEEP])
    found = rows_by_case(forward, [case.name for case in SUITE]) or sweep
    panels: list[tuple[Any, Callable[[Axes], None]]] = [
        (found, lambda axes: _draw_speed(axes, found)),
        (found, lambda axes: _draw_limit(axes, found)),
        (len(sweep) > 1, lambda axes: _draw_sweep(axes, sweep)),
        (results.get("memory"), lambda axes: _draw_memory(axes, results["memory"])),
        (results.get("startup"), lambda axes: _draw_startup(axes, results["startup"])),
    ]
    return [panel for figures, panel in panels if figures]


def rows_by_case(forward: dict[str, dict], names: list[str]) -> Rows:
    """{case: {contender: row}} of what was measured, in the order of names."""
    return {
        name: {row.contender: row for row in summary.rows(name, forward[name], peers.OURS)}
        for name in names
        if name in forward
    }


def _label_cases(axes: Axes, names: list[str], title: str) -> None:
    axes.set_yticks(range(len(names)), names, fontsize=7)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_title(title, fontsize=9)


def _draw_speed(axes: Axes, rows: Rows) -> None:
    """Every contender's time over that of the first, with the quartiles of the rounds."""
    for name in peers.CONTENDERS:
        points = [
            (found[name].ratio, found[name].ratio_low, found[name].ratio_high, place)
            for place, found in enumerate(rows.values())
            if name in found and name != next(iter(found))
        ]
        if points:
            ratio, low, high, place = np.array(points).T
            style = {"fmt": "o", "markersize": 3, "linewidth": 1, "color": COLORS[name]}
            axes.errorbar(ratio, place, xerr=(ratio - low, high - ratio), label=name, **style)
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_xscale("log")
    ticks = (0.1, 0.2, 0.5, 1, 2, 5, 10)
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.grid(axis="x", linewidth=0.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=6)
    _label_cases(axes, list(rows), f"time over that of {peers.OURS}; right of 1 it is slower")


def _draw_limit(axes: Axes, rows: Rows) -> None:
    """Share of the machine's limit that fastattn reaches."""
    percents = [
        found[peers.OURS].percent or 0 if peers.OURS in found else 0 for found in rows.values()
    ]
    axes.barh(range(len(rows)), percents, color=COLORS[peers.OURS])
    axes.set_xlim(0, 100)
    _label_cases(axes, list(rows), f"{peers.OURS}, per cent of the measured limit")


def _draw_lines(axes: Axes, lines: dict[str, list[tuple[int, float]]], title: str) -> None:
    """A line of (seqlen, value) for each contender."""
    for name, points in lines.items():
        if points:
            style: dict[str, Any] = {"marker": "o", "markersize": 3, "color": COLORS[name]}
            axes.plot(*zip(*points, strict=True), label=name, **style)
    axes.set_xscale("log", base=2)
    axes.set_xlabel("seqlen", fontsize=8)
    axes.set_title(title, fontsize=9)
    axes.legend(fontsize=6)


def _draw_sweep(axes: Axes, rows: Rows) -> None:
    """Speed against seqlen."""
    lines = {
        name: [
            (CASES[case].seqlen_q, found[name].gflop_s)
            for case, found in rows.items()
            if name in found
        ]
        for name in peers.CONTENDERS
    }
    _draw_lines(axes, lines, "GFLOP/s, 8 heads, head_dim 64, not causal")


def _draw_memory(axes: Axes, memory: dict[str, dict]) -> None:
    """Memory against seqlen."""
    lines = {
        name: [(int(n), size / MIB) for n, size in result["extra_bytes"].items() if size]
        for name, result in memory.items()
    }
    _draw_lines(axes, lines, "MiB beyond inputs and output, 2 heads, head_dim 64")
    axes.set_yscale("log")


def _draw_startup(axes: Axes, startup: dict[str, dict]) -> None:
    """Seconds in fresh processes, with the fastest and the slowest."""
    for place, result in enumerate(startup.values()):
        low, seconds, high = np.percentile(result["seconds"], (0, 50, 100))
        spread = [[seconds - low], [high - seconds]]
        axes.barh(place, seconds, xerr=spread, color=COLORS[peers.OURS])
        axes.text(high, place, f" {summary.time_text(float(seconds))}", va="center", fontsize=7)
    axes.set_xscale("log")
    axes.margins(x=0.2)
    axes.set_xlabel("seconds", fontsize=8)
    _label_cases(axes, list(startup), "in a fresh process")
