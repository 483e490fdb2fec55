"""The cache of compiled kernels: where it lies, what an entry is called, what one can be trusted.

One file an entry: MAGIC + digest of the rest + entry name + "\\n" + object code.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import stat
import sys
from collections.abc import Hashable
from pathlib import Path

log = logging.getLogger("fastattn")

MAGIC = b"fastattn object 1\n"
DIGEST = hashlib.sha256


# Sources that take part in kernels: cpu/ and cuda/, what they import, and one with kernels of its
# own. What was compiled survives an edit of all others; tests/test_cache_sources.py looks at both.
FOLDERS = ("cpu", "cuda")
BESIDE = (
    "arguments",
    "arrays",
    "benchmark/roofline",
    "block_mask",
    "dropout",
    "guards",
    "kinds",
    "large_rows",
    "machine",
    "modifier",
    "normal",
    "optional",
    "problem",
    "results",
    "trace",
)


def sources() -> list[Path]:
    """The files that kernels are made of."""
    root = Path(__file__).parent.parent
    files = [path for folder in FOLDERS for path in sorted((root / folder).rglob("*.py"))]
    return files + [path for name in BESIDE if (path := root / f"{name}.py").is_file()]


@functools.cache
def source_digest() -> bytes:
    """Digest of sources(): an edit there makes every cached kernel unknown.

    b"" where they cannot be read (from a zip file, or frozen): nothing can be known of old code.
    """
    digest, root, paths = DIGEST(), Path(__file__).parent.parent, sources()
    for path in paths:
        digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.digest() if paths else b""


def entry_name(*parts: Hashable) -> str:
    """The file name of what was made from the present sources() and these parts."""
    return DIGEST(source_digest() + repr(parts).encode()).hexdigest()[:40]


def entry_path(folder: Path, key: Hashable, target: Hashable) -> Path:
    """Where a cache folder keeps the kernel of this key and target."""
    versions = (version("numba"), version("llvmlite"), sys.implementation.cache_tag)
    return folder / (entry_name(key, target, *versions) + ".obj")


def version(package: str) -> str:
    from importlib import metadata  # here, as it costs 10 ms and prebuilt kernels need none

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "0+unknown"


def cache_folder() -> Path | None:
    """The folder of compiled kernels; None if it is turned off or not safe to use."""
    return folder_or_reason()[0]


def folder_or_reason() -> tuple[Path | None, str]:
    """(folder of compiled kernels, "") or (None, why there is none).

    FASTATTN_CACHE=0 turns it off, FASTATTN_CACHE=path moves it. It holds machine code, so it is
    used only if this user owns it and nobody else can write it.
    """
    setting = os.environ.get("FASTATTN_CACHE", "")
    if setting == "0":
        return None, "FASTATTN_CACHE=0 turns the cache off"
    if not source_digest():
        return None, "the sources of fastattn cannot be read, so old code cannot be told from new"
    try:
        folder = Path(setting) if setting else _user_cache() / "fastattn"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        reason = not_private(folder)
    except (OSError, RuntimeError) as error:  # RuntimeError: no home folder
        folder, reason = None, str(error)
    if reason:
        log.debug("no cache folder: %s", reason)
        return None, reason
    return folder, ""


def not_private(folder: Path) -> str:
    """Why others could put code into this folder; "" if they cannot."""
    if os.name != "posix":
        return ""
    status = folder.stat()
    if status.st_uid != os.getuid():
        return f"{folder} belongs to another user"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"others can write {folder}: chmod go-w"
    return ""


def _user_cache() -> Path:
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    if sys.platform == "darwin":
        return _home() / "Library" / "Caches"
    given = os.environ.get("XDG_CACHE_HOME", "")
    return Path(given) if os.path.isabs(given) else _home() / ".cache"


def _home() -> Path:
    """The user's home folder. RuntimeError if there is none."""
    given = os.environ.get("HOME")
    if given is not None and not os.path.isabs(given):  # Python takes "" for the root folder
        raise RuntimeError(f"HOME must be an absolute path, got {given!r}")
    return Path.home()


def find(key: Hashable, target: Hashable) -> tuple[str, bytes] | None:
    """(entry name, object code) of a kernel from the user's cache, or None."""
    folder = cache_folder()
    return read_entry(entry_path(folder, key, target)) if folder else None


def keep(key: Hashable, target: Hashable, entry: str, code: bytes) -> None:
    """Put a kernel into the user's cache, if there is one and room in it."""
    folder = cache_folder()
    try:
        if folder:
            write_entry(entry_path(folder, key, target), entry, code)
    except OSError as error:
        log.debug("kernel %s not kept: %s", key, error)


def read_entry(path: Path) -> tuple[str, bytes] | None:
    """(entry name, object code); None if there is no whole entry."""
    try:
        content = path.read_bytes()
    except OSError:
        return None
    start = len(MAGIC) + DIGEST().digest_size
    if (
        not content.startswith(MAGIC)
        or content[len(MAGIC) : start] != DIGEST(content[start:]).digest()
    ):
        log.debug("cache entry %s is damaged: compiled anew", path)
        return None
    entry, _, code = content[start:].partition(b"\n")
    return entry.decode(), code


def write_entry(path: Path, entry: str, code: bytes) -> None:
    """Write an entry whole, or raise OSError."""
    content = entry.encode() + b"\n" + code
    replace_file(path, MAGIC + DIGEST(content).digest() + content)


def replace_file(path: Path, content: bytes) -> None:
    """Write a file such that readers see the old one or the new one, never a part."""
    import tempfile

    handle, name = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
