"""Many random problems, one after another, in a process that may not come back."""

from __future__ import annotations

import multiprocessing
import signal
import time
from collections.abc import Callable, Iterator
from ctypes import c_int64
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from . import peer
from .case import has_bfloat16
from .draw import draw
from .oracle import WrongAnswer
from .shrink import shrink
from .trial import Inputs, Trial, error_ratio, inputs_of, results

STUCK = 300.0  # seconds without an answer: the longest drawn problems take less than one
REPORT_EVERY = 0.2  # seconds
MOST_FAILURES = 5  # the campaign ends there: more of them say no more


@dataclass(frozen=True)
class Failure:
    """A problem that an implementation did not solve."""

    number: int
    implementation: str
    what: str
    trial: Trial
    shrunk: Trial | None = None


@dataclass
class Tally:
    """What became of the problems of one implementation."""

    calls: int = 0
    worst_ratio: float = 0.0  # of the error to what is allowed, up to 1 if all is right
    worst_number: int = -1

    def add(self, number: int, ratio: float) -> None:
        """Enter problem `number`."""
        self.calls += 1
        if ratio > self.worst_ratio:
            self.worst_ratio, self.worst_number = ratio, number


@dataclass
class Outcome:
    """What a campaign found."""

    seed: int
    problems: int = 0
    seconds: float = 0.0
    tallies: dict[str, Tally] = field(default_factory=dict)
    failures: list[Failure] = field(default_factory=list)
    resident_bytes: list[int] = field(default_factory=list)  # of the process, now and then
    is_interrupted: bool = False  # by Ctrl-C, before it was over


def campaign(
    seed: int,
    numbers: range,
    implementations: tuple[str, ...],
    is_over: Callable[[Outcome], bool],
) -> Outcome:
    """Run the problems of `seed` that have these numbers, until is_over(), which is asked several
    times a second, or Ctrl-C, or too many have failed.

    A process of its own makes the calls: one that crashes or hangs is a failure like another.
    """
    outcome = Outcome(seed, tallies={name: Tally() for name in implementations})
    try:
        _run(outcome, numbers, implementations, is_over)
    except KeyboardInterrupt:
        outcome.is_interrupted = True
    return outcome


def _run(
    outcome: Outcome,
    numbers: range,
    implementations: tuple[str, ...],
    is_over: Callable[[Outcome], bool],
) -> None:
    """Enter into the outcome what becomes of the problems."""
    seed, start, over = outcome.seed, time.monotonic(), False
    while not over and outcome.problems < len(numbers):
        with _Worker(seed, numbers[outcome.problems :], implementations) as worker:
            for message in worker.messages():
                _enter(outcome, message)
                outcome.seconds = time.monotonic() - start
                over = is_over(outcome) or len(outcome.failures) >= MOST_FAILURES
                if over or outcome.problems == len(numbers):
                    break
            else:
                number = worker.number
                outcome.failures.append(Failure(number, "", worker.end, draw(seed, number)))
                outcome.problems = numbers.index(number) + 1
                over = len(outcome.failures) >= MOST_FAILURES


def _enter(outcome: Outcome, message: dict[str, Any]) -> None:
    for number, name, ratio in message["ratios"]:
        outcome.tallies[name].add(number, ratio)
    outcome.failures += message["failures"]
    outcome.problems += message["problems"]
    outcome.resident_bytes.append(message["resident_bytes"])


class _Worker:
    """The process that makes the calls."""

    def __init__(self, seed: int, numbers: range, implementations: tuple[str, ...]):
        context = multiprocessing.get_context("spawn")
        self._receive, send = context.Pipe(duplex=False)
        self._number = context.Value(c_int64, numbers[0], lock=False)
        arguments = (_work, send, self._number, seed, numbers, implementations)
        self._process: BaseProcess = context.Process(target=_begin, args=arguments, daemon=True)
        self._process.start()
        send.close()  # so that its death is the end of what can be received
        self.end = ""

    def __enter__(self) -> _Worker:
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        self._process.join()

    @property
    def number(self) -> int:
        """The problem that is being solved."""
        return int(self._number.value)

    def messages(self) -> Iterator[dict[str, Any]]:
        """What the process says, until it ends or is stuck, which `end` describes."""
        while True:
            if not self._receive.poll(STUCK):
                self.end = f"no answer within {STUCK:g} seconds"
                return
            try:
                yield self._receive.recv()
            except EOFError:
                self._process.join()
                self.end = f"the process ended with status {self._process.exitcode}"
                return


def _begin(work: Callable[..., None], *arguments: Any) -> None:
    """In the process: Ctrl-C is for the other one, which then ends this one."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    work(*arguments)


def _work(
    send: Connection, current: Any, seed: int, numbers: range, implementations: tuple[str, ...]
) -> None:
    """In the process: solve problems, and tell now and then."""
    message, last, any_dtype = _nothing(), time.monotonic(), has_bfloat16()
    for number in numbers:
        current.value = number
        trial = draw(seed, number)
        if any_dtype or "bfloat16" not in (trial.case.dtype, trial.case.bias_dtype):
            _enter_answers(message, number, trial, implementations)
        message["problems"] += 1
        is_time = time.monotonic() - last > REPORT_EVERY
        if is_time or message["failures"] or number == numbers[-1]:
            send.send(message | {"resident_bytes": _resident_bytes()})
            message, last = _nothing(), time.monotonic()


def _enter_answers(
    message: dict[str, Any], number: int, trial: Trial, implementations: tuple[str, ...]
) -> None:
    """Let each solve the problem."""
    x = inputs_of(trial)
    for name in implementations:
        try:
            ratio = solve(trial, x, name)
        except Exception as error:
            message["failures"].append(_failure(number, name, error, trial))
        else:
            message["ratios"] += [] if ratio is None else [(number, name, ratio)]


def _nothing() -> dict[str, Any]:
    return {"ratios": [], "failures": [], "problems": 0}


def solve(trial: Trial, x: Inputs, name: str) -> float | None:
    """The error ratio of an implementation; None if the problem is not for it.

    Raises WrongAnswer if it is more than 1, and whatever the call raises.
    """
    if name == peer.NAME:
        if not peer.expresses(trial):
            return None
        found, most = peer.results(trial, x), peer.MOST_RATIO
    else:
        found, most = results(trial, x, name), 1.0
    ratio = error_ratio(trial, x, found, name == "cuda")
    if not ratio <= most:
        raise WrongAnswer(f"the error is {ratio:.3g} times what is allowed")
    return ratio


def _failure(number: int, name: str, error: Exception, trial: Trial) -> Failure:
    """What failed, and a small problem that fails in the same way."""

    def fails(smaller: Trial) -> bool:
        try:
            solve(smaller, inputs_of(smaller), name)
        except Exception as other:
            return type(other) is type(error)
        return False

    what = f"{type(error).__name__}: {error}"
    return Failure(number, name, what, trial, shrink(trial, fails))


def _resident_bytes() -> int:
    """Of this process; 0 where Linux does not tell."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            pages = int(file.read().split()[1])
    except OSError:
        return 0
    import resource

    return pages * resource.getpagesize()
