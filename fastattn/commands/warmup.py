"""Compile kernels before they are wanted: here, or into a folder for other machines and images."""

from __future__ import annotations

import argparse
import importlib.util
import time
from pathlib import Path

from ..cpu import built_in, cache, compile, prebuilt
from ..machine import TARGETS
from ..optional import missing
from . import terminal

HELP = "compile the built-in kernels into the cache, or into a folder for other machines"
ELSEWHERE = """\
There, with the same versions of fastattn, Numba, llvmlite and Python, set FASTATTN_CACHE to the
folder{target}.
It must belong to the user who runs fastattn, and others must not be able to write to it."""


def add_options(parser: argparse.ArgumentParser) -> None:
    names = ", ".join(TARGETS)
    parser.add_argument(
        "--target",
        choices=list(TARGETS),
        metavar="NAME",
        help=f"machines to compile for: {names} (default: the best that runs here)",
    )
    parser.add_argument(
        "--into", type=Path, metavar="DIR", help="folder to fill (default: the cache of this user)"
    )


def run(options: argparse.Namespace) -> None:
    """Compile what the folder does not have yet, and say what it has.

    Raises
    ------
    ImportError  Numba is not installed
    ValueError   there is no cache folder, or the one given is not private
    OSError      the folder cannot be written
    """
    builders, elsewhere = built_in.kernels(), bool(options.into or options.target)
    kernels = [key for key in builders if elsewhere or not prebuilt.load(key)]
    if not kernels:
        print("All kernels came with the package: nothing is left to compile.")
        return
    if importlib.util.find_spec("numba") is None:
        raise missing("compiling", "numba", "numba")
    folder, start = folder_for(options.into), time.perf_counter()
    target = compile.named_target(options.target) if options.target else compile.host_target()
    before = len(list(folder.glob("*.obj")))
    for key in terminal.each(kernels, built_in.words):
        compile.store(key, builders[key], target, folder)
    new = len(list(folder.glob("*.obj"))) - before
    seconds = time.perf_counter() - start
    print(f"{len(kernels)} kernels for {target.cpu} in {folder}, {new} compiled in {seconds:.1f} s")
    if elsewhere:
        also = f" and FASTATTN_TARGET to {options.target}" if options.target else ""
        print(ELSEWHERE.format(target=also))


def folder_for(wanted: Path | None) -> Path:
    """The folder to fill: the one asked for, made if need be, or the user's cache."""
    if wanted is None:
        folder, reason = cache.folder_or_reason()
        if folder is None:
            raise ValueError(f"there is no cache folder: {reason}. --into names another one.")
        return folder
    wanted.mkdir(mode=0o700, parents=True, exist_ok=True)
    if reason := cache.not_private(wanted):
        raise ValueError(f"--into must be a folder that is yours alone: {reason}")
    return wanted
