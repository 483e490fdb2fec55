"""The cache of machine code: what is found again, what is not, and what cannot be trusted."""

from __future__ import annotations

import os
import shutil
import stat
import sys
from pathlib import Path

import pytest
from processes import PACKAGE, SMALL, finish, fresh, start

from fastattn.cpu import cache, compile

pytest.importorskip("numba")


def entries(folder):
    return sorted(path for path in folder.iterdir()) if folder.exists() else []


@pytest.fixture(scope="module")
def filled(tmp_path_factory):
    """A cache that holds the small kernel."""
    folder = tmp_path_factory.mktemp("cache") / "below" / "fastattn"
    assert fresh(SMALL, folder) == [42, 1.0, True]
    return folder


@pytest.fixture
def folder(filled, tmp_path):
    """A copy of it that a test may spoil."""
    folder = tmp_path / "cache"
    shutil.copytree(filled, folder)
    folder.chmod(0o700)
    return folder


def test_folder_and_entry_are_private(filled):
    (entry,) = entries(filled)
    assert entry.suffix == ".obj"
    if os.name == "posix":
        assert stat.S_IMODE(filled.stat().st_mode) == 0o700
        assert stat.S_IMODE(entry.stat().st_mode) == 0o600


def test_second_process_imports_no_numba(folder):
    before = [(path.name, path.stat().st_mtime_ns) for path in entries(folder)]
    assert fresh(SMALL, folder) == [42, 1.0, False]
    assert [(path.name, path.stat().st_mtime_ns) for path in entries(folder)] == before


def test_cache_0_writes_nothing(tmp_path):
    assert fresh(SMALL, 0, HOME=tmp_path, XDG_CACHE_HOME=tmp_path) == [42, 1.0, True]
    assert not entries(tmp_path)


def test_default_folder(tmp_path, monkeypatch):
    monkeypatch.delenv("FASTATTN_CACHE", raising=False)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache.cache_folder() == tmp_path / "xdg" / "fastattn"
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache.cache_folder() == tmp_path / "home" / ".cache" / "fastattn"
    monkeypatch.setattr(sys, "platform", "darwin")
    assert cache.cache_folder() == tmp_path / "home" / "Library" / "Caches" / "fastattn"
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setenv("LOCALAPPDATA", str(tmp_path / "local"))
    assert cache.cache_folder() == tmp_path / "local" / "fastattn"


@pytest.mark.skipif(os.name != "posix", reason="permission bits")
def test_folder_that_others_can_write_is_ignored(folder, monkeypatch):
    monkeypatch.setenv("FASTATTN_CACHE", str(folder))
    before = entries(folder)
    for mode, used in ((0o700, True), (0o755, True), (0o770, False), (0o702, False)):
        folder.chmod(mode)
        assert (cache.cache_folder() == folder) is used
    assert fresh(SMALL, folder) == [42, 1.0, True]  # compiled, though an entry lies there
    assert entries(folder) == before


@pytest.mark.skipif(os.name != "posix", reason="user numbers")
def test_folder_of_another_user_is_ignored(tmp_path, monkeypatch):
    monkeypatch.setenv("FASTATTN_CACHE", str(tmp_path))
    tmp_path.chmod(0o700)
    assert cache.cache_folder() == tmp_path
    monkeypatch.setattr(os, "getuid", lambda: tmp_path.stat().st_uid + 1)
    assert cache.cache_folder() is None


def damage(content, how):
    middle = len(content) // 2
    return {
        "empty": b"",
        "magic only": content[: len(cache.MAGIC)],
        "truncated": content[:middle],
        "one byte short": content[:-1],
        "one byte more": content + b"\0",
        "garbage": bytes(range(256)) * 40,
        "bit flipped": content[:middle] + bytes([content[middle] ^ 4]) + content[middle + 1 :],
        "name changed": content.replace(b"kernel", b"kermel", 1),
        "foreign version": content.replace(cache.MAGIC, b"fastattn object 0\n", 1),
    }[how]


HOW = "empty, magic only, truncated, one byte short, one byte more, garbage, bit flipped, "
HOW = (HOW + "name changed, foreign version").split(", ")


@pytest.mark.parametrize("how", HOW)
def test_damaged_entry_is_not_read(folder, how):
    (path,) = entries(folder)
    whole = cache.read_entry(path)
    assert whole is not None
    broken = damage(path.read_bytes(), how)
    assert broken != path.read_bytes()
    path.write_bytes(broken)
    assert cache.read_entry(path) is None
    cache.write_entry(path, *whole)
    assert cache.read_entry(path) == whole
    assert entries(folder) == [path], "a temporary file was left"


def test_damaged_entry_is_replaced(folder):
    (path,) = entries(folder)
    whole = path.read_bytes()
    path.write_bytes(damage(whole, "bit flipped"))
    assert fresh(SMALL, folder) == [42, 1.0, True]
    assert entries(folder) == [path]
    assert cache.read_entry(path) is not None
    assert fresh(SMALL, folder) == [42, 1.0, False]


@pytest.mark.skipif(os.name != "posix", reason="places where no folder can be made")
def test_unwritable_place_is_silent(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("in the way")
    for place in ("/dev/null/cache", "/proc/nowhere", tmp_path / "file", tmp_path / "file" / "x"):
        monkeypatch.setenv("FASTATTN_CACHE", str(place))
        assert cache.cache_folder() is None
    assert fresh(SMALL, None, HOME="/dev/null", XDG_CACHE_HOME=None) == [42, 1.0, True]


def test_missing_home_is_silent(monkeypatch):
    def missing():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("FASTATTN_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("LOCALAPPDATA", raising=False)
    monkeypatch.setattr(Path, "home", missing)
    assert cache.cache_folder() is None


@pytest.mark.parametrize("home", ["", "here"])
@pytest.mark.parametrize("platform", ["linux", "darwin"])
def test_home_that_is_no_place_is_silent(platform, home, monkeypatch, tmp_path):
    """Neither the root folder nor one that depends on where the process is started."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(Path, "mkdir", None)
    for name, value in (("FASTATTN_CACHE", ""), ("XDG_CACHE_HOME", "relative"), ("HOME", home)):
        monkeypatch.setenv(name, value)
    why = f"HOME must be an absolute path, got {home!r}"
    assert cache.folder_or_reason() == (None, why)


def test_folder_that_fills_up_is_silent(tmp_path, monkeypatch):
    def full(source, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    monkeypatch.setenv("FASTATTN_CACHE", str(tmp_path))
    tmp_path.chmod(0o700)
    cache.keep("key", "target", "name", b"code")
    assert not entries(tmp_path)


@pytest.mark.slow
def test_several_processes_at_once(tmp_path):
    processes = [start(SMALL, tmp_path / "cache") for _ in range(4)]
    assert all(finish(process)[:2] == [42, 1.0] for process in processes)
    assert len(entries(tmp_path / "cache")) == 1
    assert fresh(SMALL, tmp_path / "cache") == [42, 1.0, False]


def test_edited_sources_make_new_code(tmp_path, folder):
    """The same sources elsewhere find the entry; an edit does not, and what it says runs."""
    copy = tmp_path / "copy" / "fastattn"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    where = {"PYTHONPATH": copy.parent, "PYTHONDONTWRITEBYTECODE": 1}
    assert fresh(SMALL, folder, **where) == [42, 1.0, False]
    elementary = copy / "cpu" / "elementary.py"
    text = elementary.read_text()
    # 2**0 where it is looked up, and where it is not
    for old, new in (
        ("np.exp2(j / vector.count)", "(1.5 * np.exp2(j / vector.count))"),
        ("        1.0,\n        0.693147205353,", "        1.5,\n        0.693147205353,"),
    ):
        assert text.count(old) == 1
        text = text.replace(old, new)
    elementary.write_text(text)
    assert fresh(SMALL, folder, **where) == [42, 1.5, True]
    assert fresh(SMALL, folder, **where) == [42, 1.5, False]
    assert fresh(SMALL, folder) == [42, 1.0, False]  # both stay
    assert len(entries(folder)) == 2


def test_key_and_target_are_part_of_the_name(tmp_path, monkeypatch):
    a, b = (compile.Target("x86_64-unknown-linux-gnu", cpu, "") for cpu in ("x86-64-v3", "znver4"))
    paths = {cache.entry_path(tmp_path, k, target) for k in ("k", ("k", 1)) for target in (a, b)}
    assert len(paths) == 4
    monkeypatch.setattr(cache, "version", lambda package: "0.1" if package == "numba" else "")
    assert cache.entry_path(tmp_path, "k", a) not in paths


def test_store_fills_the_cache_of_another_machine(tmp_path, monkeypatch):
    """What is compiled for a named target is found under that name, and there only."""

    def build(unit):
        return lambda job, scratch, quota: quota

    target = compile.named_target("x86-64-v3")
    path = compile.store("stored", build, target, tmp_path)
    monkeypatch.setattr(compile, "compile_object", lambda *args: pytest.fail("compiled"))
    assert compile.store("stored", build, target, tmp_path) == path
    monkeypatch.setenv("FASTATTN_CACHE", str(tmp_path))
    tmp_path.chmod(0o700)
    assert cache.find("stored", target) is not None
    assert cache.find("stored", compile.named_target("aarch64")) is None
