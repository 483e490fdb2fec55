"""What the commands share: types of options, and rich, which draws tables and progress bars."""

from __future__ import annotations

import argparse
import errno
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from ..optional import missing

if TYPE_CHECKING:
    from rich.console import Console

T = TypeVar("T")
WIDTH = 110  # of tables that go to a file or a pipe
LINE_EVERY = 60.0  # seconds


def checked(parse: Callable[[str], T]) -> Callable[[str], T]:
    """A type of an option, whose ValueError reaches the user as it is written."""

    def parse_option(text: str) -> T:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return parse_option


@checked
def count(text: str) -> int:
    """An int of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"must be an int of at least 1, got {text!r}")
    return int(text)


def check_writable(path: Path) -> None:
    """Make the folder of a file that is written in the end, after minutes. Raises OSError now if
    the file could not be.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir():
        number = errno.EISDIR
    elif not os.access(path if path.exists() else path.parent, os.W_OK):
        number = errno.EACCES
    else:
        return
    raise OSError(number, os.strerror(number), str(path))


def console() -> Console:
    """Where tables go. Raises ImportError, with the command that installs rich, where it is not."""
    try:
        from rich.console import Console
    except ImportError as error:
        raise missing("a table", "rich", "'fastattn[bench]'") from error
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # µ and – where there is but ASCII
    return Console(width=None if sys.stdout.isatty() else WIDTH)


def _has_bars() -> bool:
    """Whether progress bars can be drawn: on a terminal, by rich."""
    try:
        import rich.console
        import rich.progress  # noqa: F401
    except ImportError:
        return False
    return sys.stderr.isatty()


def each(items: Sequence[T], describe: Callable[[T], str]) -> Iterator[T]:
    """The items, with a progress bar on stderr; a line for each where there can be none."""
    if not _has_bars():
        for number, item in enumerate(items, 1):
            print(f"{number}/{len(items)} {describe(item)}", file=sys.stderr)
            yield item
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=len(items))
        for item in items:
            progress.update(task, description=describe(item))
            yield item
            progress.advance(task)


@contextmanager
def meter() -> Iterator[Callable[[float, str], None]]:
    """show(share done, text): a progress bar on stderr; a line a minute where there can be none."""
    if not _has_bars():
        yield _lines()
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (BarColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=1.0)
        yield lambda done, text: progress.update(task, completed=done, description=text)


def _lines() -> Callable[[float, str], None]:
    last = time.monotonic()

    def show(done: float, text: str) -> None:
        nonlocal last
        if time.monotonic() - last > LINE_EVERY:
            last = time.monotonic()
            print(f"{100 * done:.0f} %: {text}", file=sys.stderr)

    return show
