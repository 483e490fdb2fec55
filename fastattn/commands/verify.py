"""Random problems against the definition in float64: whether this install can be trusted."""

from __future__ import annotations

import argparse
import json
import random
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from ..api import explain
from ..benchmark import record
from ..check import BACKENDS
from ..cpu.threads import get_num_threads
from ..optional import missing
from ..verifying import peer
from ..verifying.campaign import Failure, Outcome, campaign
from ..verifying.case import has_bfloat16
from ..verifying.oracle import WrongAnswer
from .terminal import check_writable, checked, count, meter

HELP = "hold random calls against the definition in float64"
DEFAULT_MINUTES = 1.0
ENDLESS = 1 << 60


@checked
def minutes(text: str) -> float:
    """A number of minutes."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise ValueError(f"must be a number of minutes above 0, got {text!r}")
    return number


@checked
def whole(text: str) -> int:
    """An int of at least 0."""
    if not text.isdecimal():
        raise ValueError(f"must be an int of at least 0, got {text!r}")
    return int(text)


def add_options(parser: argparse.ArgumentParser) -> None:
    length = parser.add_mutually_exclusive_group()
    length.add_argument(
        "--minutes", type=minutes, default=DEFAULT_MINUTES, help="how long (default 1)"
    )
    length.add_argument("--calls", type=count, help="how many problems, instead")
    parser.add_argument("--seed", type=whole, help="of all problems (default: one at random)")
    parser.add_argument("--first", type=whole, default=0, help="number of the first (default 0)")
    parser.add_argument(
        "--backend",
        action="append",
        choices=[*BACKENDS[1:], peer.NAME],
        help="try this one; may be given more than once (default: all that run here, and PyTorch)",
    )
    parser.add_argument("--json", type=Path, metavar="PATH", help="write a report")


def run(options: argparse.Namespace) -> None:
    """Solve the problems, and print what became of them.

    Raises
    ------
    ImportError  a backend that was asked for cannot run here
    OSError      the report cannot be written
    WrongAnswer  a problem was not solved
    """
    if options.json:
        check_writable(options.json)
    names = implementations(options.backend)
    seed = random.getrandbits(32) if options.seed is None else options.seed
    if not has_bfloat16():
        print("problems with bfloat16 are left out: ml_dtypes is not installed")
    print(f"seed {seed}, from number {options.first}: {', '.join(names)}")
    with meter() as show:

        def is_over(outcome: Outcome) -> bool:
            if options.calls:
                done = outcome.problems / options.calls
            else:
                done = outcome.seconds / (60 * options.minutes)
            show(done, f"{outcome.problems} problems, {len(outcome.failures)} failures")
            return done >= 1

        numbers = range(options.first, options.first + (options.calls or ENDLESS))
        outcome = campaign(seed, numbers, names, is_over)
    if options.json:
        options.json.write_text(json.dumps(report(outcome), indent=1) + "\n", encoding="utf-8")
    print("\n".join(lines(outcome)))
    if outcome.failures:
        raise WrongAnswer(f"{len(outcome.failures)} failures in {outcome.problems} problems")
    if outcome.is_interrupted:
        raise KeyboardInterrupt


def implementations(asked: list[str] | None) -> tuple[str, ...]:
    """What to try: those asked for, or all that can run here."""
    one = np.ones((1, 1), np.float32)
    found = []
    for name in asked or [*BACKENDS[1:], peer.NAME]:
        try:
            if name == peer.NAME and not peer.installed():
                raise missing(f"--backend {peer.NAME}", "torch", "torch")
            if name != peer.NAME:
                explain(one, one, one, backend=name)
        except ImportError:
            if asked:
                raise
            continue
        found.append(name)
    return tuple(found)


def lines(outcome: Outcome) -> list[str]:
    """What a user reads."""
    ended = ", then interrupted" if outcome.is_interrupted else ""
    texts = [f"{outcome.problems} problems in {outcome.seconds:.1f} s{ended}"]
    for name, tally in outcome.tallies.items():
        worst = f"worst error {tally.worst_ratio:.3f} of what is allowed"
        texts.append(f"{name:<7} {tally.calls} answers, {worst} (number {tally.worst_number})")
    for failure in outcome.failures:
        texts += ["", f"number {failure.number}, {failure.implementation}: {failure.what}"]
        texts.append(f"  {failure.shrunk or failure.trial}")
        texts.append(f"  again: {command(outcome.seed, failure)}")
    return texts


def command(seed: int, failure: Failure) -> str:
    """What runs one problem again."""
    backend = f" --backend {failure.implementation}" if failure.implementation else ""
    number = f"--seed {seed} --first {failure.number} --calls 1"
    return f"python -m fastattn verify {number}{backend}"


def report(outcome: Outcome) -> dict[str, Any]:
    """All that is known, for a file."""
    content = {"setting": record.setting(get_num_threads()), **asdict(outcome)}
    for entry, failure in zip(content["failures"], outcome.failures, strict=True):
        entry["command"] = command(outcome.seed, failure)
    resident = content.pop("resident_bytes")
    # A process takes its time to reach its size: the first reports say nothing of a leak.
    tenths = np.array_split(np.array(resident, np.int64), 10)
    content["resident_bytes"] = [int(part.max(initial=0)) for part in tenths]
    return content
