"""Where Python finds fastattn, and what it may write: archives, frozen programs, -O, -I, limits."""

from __future__ import annotations

import compileall
import os
import shutil
import stat
import sys
import zipfile

import pytest
from processes import PACKAGE, SMALL, finish, fresh, start

from fastattn.cpu import cache

pytest.importorskip("numba")

ATTEND = """
import json, os, sys
import numpy as np
import fastattn
q = np.ones((4, 70, 16), np.float32)
right = [bool((fastattn.attention(q, q, q, causal=True, backend=b) == 1).all()) for b in {backends}]
print(json.dumps([all(right), fastattn.__file__.startswith({place!r})]))
"""


def sources(folder):
    """A copy of the package in a folder of its own."""
    ignored = shutil.ignore_patterns("__pycache__", "prebuilt")
    return shutil.copytree(PACKAGE, folder / "fastattn", ignore=ignored)


def zipped(folder):
    path = folder / "packages.zip"
    with zipfile.ZipFile(path, "w") as archive:
        for file in sources(folder / "sources").rglob("*.py"):
            archive.write(file, file.relative_to(folder / "sources"))
    return path


def frozen(folder):
    """Bytecode alone, as programs that bundle Python have it."""
    copy = sources(folder)
    assert compileall.compile_dir(copy, quiet=2, legacy=True)
    for file in copy.rglob("*.py"):
        file.unlink()
    return folder


@pytest.mark.parametrize("place", [zipped, frozen])
def test_places_without_sources(place, tmp_path):
    """NumPy answers; kernels are not kept, as nobody could tell old ones from new."""
    home, where = tmp_path / "cache", place(tmp_path)
    code = ATTEND.format(backends=("numpy",), place=str(where))
    assert fresh(code, home, PYTHONPATH=where) == [True, True]
    code = "import json; from fastattn.cpu import cache; print(json.dumps(cache.cache_folder()))"
    assert fresh(code, home, PYTHONPATH=where) is None
    assert not home.exists()


@pytest.mark.slow
@pytest.mark.parametrize("place", [zipped, frozen])
def test_kernels_are_compiled_without_sources(place, tmp_path):
    home, where = tmp_path / "cache", place(tmp_path)
    assert fresh(SMALL, home, PYTHONPATH=where) == [42, 1.0, True]
    assert not home.exists()


@pytest.fixture(scope="module")
def filled(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cache") / "fastattn"
    assert fresh(SMALL, folder) == [42, 1.0, True]
    return folder


NAMED = ("-W", "error::EncodingWarning", "-X", "warn_default_encoding")


@pytest.mark.parametrize(
    "flags", [("-O",), ("-OO",), ("-I",), ("-I", "-S", "-B"), ("-X", "utf8"), NAMED]
)
def test_flags_of_python(flags, filled):
    """Under -I, neither PYTHONPATH nor the present folder is looked at; -S has no site-packages."""
    import llvmlite
    import numpy as np

    folders = [str(PACKAGE.parent), *(os.path.dirname(m.__path__[0]) for m in (np, llvmlite))]
    code = f"import sys; sys.path += {folders}\n" + SMALL
    assert fresh(code, filled, *flags) == [42, 1.0, False]


# Root may write anywhere, but for this capability, CAP_DAC_OVERRIDE: bit 1 of two of the sets.
LIKE_OTHERS = """
import ctypes, os
if os.getuid() == 0:
    words = ctypes.c_uint32
    system, header, sets = ctypes.CDLL(None), (words * 2)(0x20080522), (words * 6)()
    assert system.capget(header, sets) == 0
    sets[0], sets[1] = sets[0] & ~2, sets[1] & ~2
    assert system.capset(header, sets) == 0
"""


@pytest.mark.skipif(sys.platform != "linux", reason="capabilities of Linux")
def test_read_only_folder(filled, tmp_path):
    folder = shutil.copytree(filled, tmp_path / "cache")
    folder.chmod(0o500)
    try:
        assert fresh(LIKE_OTHERS + SMALL, folder) == [42, 1.0, False]
        folder.chmod(0o700)
        for path in folder.iterdir():
            path.unlink()
        folder.chmod(0o500)
        assert fresh(LIKE_OTHERS + SMALL, folder) == [42, 1.0, True]
        assert not list(folder.iterdir())
    finally:
        folder.chmod(stat.S_IRWXU)


def test_a_bit_flipped_anywhere_is_noticed(filled, tmp_path):
    (path,) = filled.iterdir()
    whole, broken = path.read_bytes(), tmp_path / "broken"
    for place in {*range(200), *range(200, len(whole), 5), len(whole) - 1}:
        content = bytearray(whole)
        content[place] ^= 1 << place % 8
        broken.write_bytes(content)
        assert cache.read_entry(broken) is None, place


@pytest.mark.slow
def test_sixteen_processes_compile_at_once(tmp_path):
    folder = tmp_path / "cache"
    processes = [start(SMALL, folder) for _ in range(16)]
    assert all(finish(process)[:2] == [42, 1.0] for process in processes)
    assert len(list(folder.iterdir())) == 1
    assert fresh(SMALL, folder) == [42, 1.0, False]


WATCHED = """
import json, os, sys
written, network = [], []

def watch(event, args):
    if event == "open" and isinstance(args[0], str):
        path, mode, flags = args
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            written.append(path)
    elif event in ("os.mkdir", "os.rename", "os.remove", "os.symlink", "shutil.copyfile"):
        written.append(str(args[0]))
    elif event.startswith("socket."):
        network.append(event)

sys.addaudithook(watch)
"""


@pytest.mark.slow
def test_nothing_is_written_elsewhere_and_nothing_sent(tmp_path):
    """Import, compilation, calls, gradients and explain(), without bytecode files."""
    folder = tmp_path / "cache"
    code = WATCHED + (
        "import numpy as np, fastattn\n"
        "from fastattn import nn, mods, udl\n"
        "q = np.ones((4, 300, 16), np.float32)\n"
        "out, lse = fastattn.attention(q, q, q, return_lse=True, backend='cpu')\n"
        "fastattn.attention_backward(out, q, q, q, out, lse, backend='cpu')\n"
        "fastattn.explain(q, q, q), nn.gelu(q)\n"
        f"print(json.dumps([[p for p in written if not p.startswith({str(folder)!r})], network]))\n"
    )
    written, network = fresh(code, folder, PYTHONDONTWRITEBYTECODE=1)
    assert [path for path in written if path != os.devnull] == []
    assert network == []
