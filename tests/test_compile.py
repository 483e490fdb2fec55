"""The cache of machine code, the names of targets, and what happens where no compiler works."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from cases import Case
from oracle import assert_within_budget, judge

import fastattn
from fastattn.cpu import compile

pytest.importorskip("numba")

PACKAGE = Path(fastattn.__file__).parent
# A kernel that compiles at once: it leaves 2**0, as simd.py has it, and a number of its own.
SMALL = """
import json, sys
import numpy as np
from fastattn.cpu import compile

def build(unit):
    from fastattn.cpu.simd import address, operations, pointer_to
    simd = operations("float32", unit.lanes(4))
    real, exp2, splat, store = pointer_to("float32"), simd.exp2, simd.splat, simd.store
    def kernel(job, scratch, quota):
        store(real(address(job)), 0, exp2(splat(np.float32(0))))
        return quota + 1
    return kernel

out = np.zeros(64, np.float32)
run = compile.kernel("small", build)
answer = run(out.ctypes.data, 0, 41)
print(json.dumps([answer, float(out[0]), "numba" in sys.modules]))
"""
CALL = """
import json, sys
import numpy as np
import fastattn
q = np.ones((5, 3), np.float32)
out = fastattn.attention(q, q, q)
plan = fastattn.explain(q, q, q)
print(json.dumps([bool((out == 1).all()), plan.backend, dict(plan.rejected).get("cpu", "")]))
"""


def start(code, cache, *flags, **environment):
    """A process of its own that runs `code` with this cache and these variables."""
    variables = {k: v for k, v in os.environ.items() if not k.startswith("FASTATTN_")}
    if cache is not None:
        variables["FASTATTN_CACHE"] = str(cache)
    variables["PYTHONPATH"] = str(PACKAGE.parent)
    for name, value in environment.items():
        variables.pop(name, None)
        if value is not None:
            variables[name] = str(value)
    # Python looks for modules where it is started: at the root, there are none.
    command = [sys.executable, "-W", "error", *flags, "-c", code]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, env=variables, cwd=Path(os.sep), **pipes)


def finish(process):
    """What the process printed, as JSON. It must not have said anything else."""
    out, err = process.communicate(timeout=200)
    assert process.returncode == 0, err
    assert err == ""
    return json.loads(out)


def fresh(code, cache, *flags, **environment):
    return finish(start(code, cache, *flags, **environment))


def entries(folder):
    return sorted(path for path in folder.iterdir()) if folder.exists() else []


@pytest.fixture(scope="module")
def filled(tmp_path_factory):
    """A cache that holds the small kernel."""
    folder = tmp_path_factory.mktemp("cache") / "below" / "fastattn"
    assert fresh(SMALL, folder) == [42, 1.0, True]
    return folder


@pytest.fixture
def cache(filled, tmp_path):
    """A copy of it that a test may spoil."""
    folder = tmp_path / "cache"
    shutil.copytree(filled, folder)
    folder.chmod(0o700)
    return folder


# --- the cache ----------------------------------------------------------------------------------


def test_folder_and_entry_are_private(filled):
    (entry,) = entries(filled)
    assert entry.suffix == ".obj"
    if os.name == "posix":
        assert stat.S_IMODE(filled.stat().st_mode) == 0o700
        assert stat.S_IMODE(entry.stat().st_mode) == 0o600


def test_second_process_imports_no_numba(cache):
    before = [(path.name, path.stat().st_mtime_ns) for path in entries(cache)]
    assert fresh(SMALL, cache) == [42, 1.0, False]
    assert [(path.name, path.stat().st_mtime_ns) for path in entries(cache)] == before


def test_cache_0_writes_nothing(tmp_path):
    assert fresh(SMALL, 0, HOME=tmp_path, XDG_CACHE_HOME=tmp_path) == [42, 1.0, True]
    assert not entries(tmp_path)


def test_default_folder(tmp_path, monkeypatch):
    monkeypatch.delenv("FASTATTN_CACHE", raising=False)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert compile.cache_folder() == tmp_path / "xdg" / "fastattn"
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert compile.cache_folder() == tmp_path / "home" / ".cache" / "fastattn"
    monkeypatch.setattr(sys, "platform", "darwin")
    assert compile.cache_folder() == tmp_path / "home" / "Library" / "Caches" / "fastattn"
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setenv("LOCALAPPDATA", str(tmp_path / "local"))
    assert compile.cache_folder() == tmp_path / "local" / "fastattn"


@pytest.mark.skipif(os.name != "posix", reason="permission bits")
def test_folder_that_others_can_write_is_ignored(cache, monkeypatch):
    monkeypatch.setenv("FASTATTN_CACHE", str(cache))
    before = entries(cache)
    for mode, used in ((0o700, True), (0o755, True), (0o770, False), (0o702, False)):
        cache.chmod(mode)
        assert (compile.cache_folder() == cache) is used
    assert fresh(SMALL, cache) == [42, 1.0, True]  # compiled, though an entry lies there
    assert entries(cache) == before


@pytest.mark.skipif(os.name != "posix", reason="user numbers")
def test_folder_of_another_user_is_ignored(tmp_path, monkeypatch):
    monkeypatch.setenv("FASTATTN_CACHE", str(tmp_path))
    tmp_path.chmod(0o700)
    assert compile.cache_folder() == tmp_path
    monkeypatch.setattr(os, "getuid", lambda: tmp_path.stat().st_uid + 1)
    assert compile.cache_folder() is None


def damage(content, how):
    middle = len(content) // 2
    return {
        "empty": b"",
        "magic only": content[: len(compile.MAGIC)],
        "truncated": content[:middle],
        "one byte short": content[:-1],
        "one byte more": content + b"\0",
        "garbage": bytes(range(256)) * 40,
        "bit flipped": content[:middle] + bytes([content[middle] ^ 4]) + content[middle + 1 :],
        "name changed": content.replace(b"kernel", b"kermel", 1),
        "foreign version": content.replace(compile.MAGIC, b"fastattn object 0\n", 1),
    }[how]


HOW = "empty, magic only, truncated, one byte short, one byte more, garbage, bit flipped, "
HOW = (HOW + "name changed, foreign version").split(", ")


@pytest.mark.parametrize("how", HOW)
def test_damaged_entry_is_not_read(cache, how):
    (path,) = entries(cache)
    whole = compile._read_entry(path)
    assert whole is not None
    broken = damage(path.read_bytes(), how)
    assert broken != path.read_bytes()
    path.write_bytes(broken)
    assert compile._read_entry(path) is None
    compile._write_entry(path, *whole)
    assert compile._read_entry(path) == whole
    assert entries(cache) == [path], "a temporary file was left"


def test_damaged_entry_is_replaced(cache):
    (path,) = entries(cache)
    whole = path.read_bytes()
    path.write_bytes(damage(whole, "bit flipped"))
    assert fresh(SMALL, cache) == [42, 1.0, True]
    assert entries(cache) == [path]
    assert compile._read_entry(path) is not None
    assert fresh(SMALL, cache) == [42, 1.0, False]


@pytest.mark.skipif(os.name != "posix", reason="places where no folder can be made")
def test_unwritable_place_is_silent(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("in the way")
    for place in ("/dev/null/cache", "/proc/nowhere", tmp_path / "file", tmp_path / "file" / "x"):
        monkeypatch.setenv("FASTATTN_CACHE", str(place))
        assert compile.cache_folder() is None
    assert fresh(SMALL, None, HOME="/dev/null", XDG_CACHE_HOME=None) == [42, 1.0, True]


def test_missing_home_is_silent(monkeypatch):
    def missing():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("FASTATTN_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("LOCALAPPDATA", raising=False)
    monkeypatch.setattr(Path, "home", missing)
    assert compile.cache_folder() is None


def test_folder_that_fills_up_is_silent(tmp_path, monkeypatch):
    def full(source, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    compile._write_entry(tmp_path / "entry.obj", "name", b"code")
    assert not entries(tmp_path)


def test_several_processes_at_once(tmp_path):
    processes = [start(SMALL, tmp_path / "cache") for _ in range(4)]
    assert all(finish(process)[:2] == [42, 1.0] for process in processes)
    assert len(entries(tmp_path / "cache")) == 1
    assert fresh(SMALL, tmp_path / "cache") == [42, 1.0, False]


def test_edited_sources_make_new_code(tmp_path, cache):
    """The same sources elsewhere find the entry; an edit does not, and what it says runs."""
    copy = tmp_path / "copy" / "fastattn"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    where = {"PYTHONPATH": copy.parent, "PYTHONDONTWRITEBYTECODE": 1}
    assert fresh(SMALL, cache, **where) == [42, 1.0, False]
    simd = copy / "cpu" / "simd.py"
    text = simd.read_text()
    assert text.count("        1.0,\n        0.693147205353,") == 1
    simd.write_text(text.replace("1.0,\n        0.693147205", "1.5,\n        0.693147205"))
    assert fresh(SMALL, cache, **where) == [42, 1.5, True]
    assert fresh(SMALL, cache, **where) == [42, 1.5, False]
    assert fresh(SMALL, cache) == [42, 1.0, False]  # both stay
    assert len(entries(cache)) == 2


def test_key_and_target_are_part_of_the_name(tmp_path, monkeypatch):
    monkeypatch.setenv("FASTATTN_CACHE", str(tmp_path))
    tmp_path.chmod(0o700)
    a, b = (compile.Target("x86_64-unknown-linux-gnu", cpu, "") for cpu in ("x86-64-v3", "znver4"))
    paths = {compile._entry_path(key, target) for key in ("k", ("k", 1)) for target in (a, b)}
    assert len(paths) == 4
    monkeypatch.setattr(compile, "_version", lambda package: "0.1" if package == "numba" else "")
    assert compile._entry_path("k", a) not in paths


# --- targets ------------------------------------------------------------------------------------


@pytest.fixture
def named_target(monkeypatch):
    """Set FASTATTN_TARGET and look at what the host becomes."""

    def name(value):
        monkeypatch.setenv("FASTATTN_TARGET", value)
        return compile.host_target.__wrapped__()

    return name


def test_unknown_target(named_target):
    with pytest.raises(ValueError, match="FASTATTN_TARGET must be one of") as error:
        named_target("pentium")
    names = ("x86-64-v3", "x86-64-v4")
    assert str(error.value) == f"FASTATTN_TARGET must be one of {names}, got 'pentium'"
    assert named_target("") == compile.host_target()


def test_target_that_this_cpu_lacks(named_target, monkeypatch):
    monkeypatch.setitem(compile.TARGETS, "x86-64-v4", {"avx512f", "no-such-thing"})
    with pytest.raises(ValueError, match=r"that this CPU can run, got 'x86-64-v4'.*no-such-thing"):
        named_target("x86-64-v4")


def test_unknown_target_is_the_users_error_in_a_call_too(tmp_path):
    code = """
import json, numpy as np, fastattn
q = np.ones((5, 3), np.float32)
try:
    fastattn.attention(q, q, q)
except ValueError as error:
    print(json.dumps(str(error)))
"""
    assert "FASTATTN_TARGET must be one of" in fresh(code, tmp_path, FASTATTN_TARGET="pentium")


@pytest.mark.parametrize(
    ("architecture", "features", "nbytes"),
    [
        ("x86_64", {"avx2", "fma"}, 32),
        ("x86_64", {"avx2"}, None),
        ("x86_64", {"avx2", "fma", "avx512f"}, 32),
        ("x86_64", {"avx2", "fma", "avx512f", "avx512vl", "avx512dq", "avx512bw"}, 64),
        ("x86_64", set(), None),
        ("aarch64", {"neon"}, 16),
        ("arm64", {"neon"}, 16),
        ("aarch64", set(), None),
        ("riscv64", {"v"}, None),
    ],
)
def test_vector_unit(architecture, features, nbytes):
    words = ",".join(f"+{f}" for f in sorted(features)) or "-all"
    unit = compile.Target(f"{architecture}-unknown-linux-gnu", "some", words).unit
    assert (unit.nbytes if unit else None) == nbytes


def test_cpu_without_registers_for_kernels(monkeypatch):
    old = compile.Target("x86_64-unknown-linux-gnu", "core2", "+sse3,-avx")
    monkeypatch.setattr(compile, "host_target", lambda: old)
    reason = "CPU 'core2' has no AVX2 with FMA, AVX-512 or NEON registers"
    assert compile.unavailable("anything") == reason
    with pytest.raises(ImportError, match=reason):
        compile.vector_unit_of(old)


TARGET = """
import json, sys
import numpy as np
import fastattn
from fastattn.cpu import compile
sys.path.insert(0, {tests!r})
from cases import Case
case = Case("target", 70, 333, 40, heads_q=3, causal=True)
out = fastattn.attention(*case.arrays(), causal=True, backend="cpu")
print(json.dumps([compile.host_target().cpu, out.tolist()]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", compile.TARGETS)
def test_named_target_is_within_budget(tmp_path, named_target, name):
    try:
        named_target(name)
    except ValueError as error:
        pytest.skip(str(error))
    code = TARGET.format(tests=str(Path(__file__).parent))
    cpu, out = fresh(code, tmp_path, FASTATTN_TARGET=name)
    assert cpu == name
    (exact, _), (formula, _) = judge(
        *Case("target", 70, 333, 40, heads_q=3, causal=True).arrays(), causal=True
    )
    assert_within_budget(np.array(out, np.float32), exact, formula)


# --- the compiler -------------------------------------------------------------------------------


def test_new_arrays_compile_nothing(monkeypatch):
    """Another shape, stride, scale, window or number of threads is no other kernel."""
    one = np.ones((2, 3), np.float32)
    wide = np.ones((2, 4, 700, 48), np.float32)
    fastattn.attention(one, one, one)
    with fastattn.num_threads(2):  # few queries, many keys: the second kernel
        fastattn.attention(wide[:, :1, :1], wide[:, :1].repeat(8, 2), wide[:, :1].repeat(8, 2))
    monkeypatch.setattr(compile, "translate", lambda function: pytest.fail("compiled"))
    for count in (1, 3):
        with fastattn.num_threads(count):
            fastattn.attention(wide, wide, wide, causal=True, scale=0.3, window=(5, 5))
            fastattn.attention(wide[:, ::2, ::-1], wide[:, ::2], wide.swapaxes(0, 1)[:2, :2])
            fastattn.attention(wide[:, :1, :1], wide[:, :1].repeat(8, 2), wide[:, :1].repeat(8, 2))
            fastattn.attention(one, one, one, return_lse=True, out=np.empty_like(one))


def test_kernel_that_fails_names_itself():
    def build(unit):
        def kernel(job, scratch, quota):
            if quota < 0:
                raise ValueError
            return 0

        return kernel

    with pytest.raises(RuntimeError, match=r"kernel \('test', 'fails'\) failed with status 1"):
        compile.kernel(("test", "fails"), build)(0, 0, -1)


USERS_CODE = (
    SMALL
    + """
import numba
level = numba.config.OPT

@numba.njit
def total(a):
    s = 0
    for x in a:
        s += x
    return s

total(np.arange(10))
print(json.dumps([int(level), next(iter(total.inspect_asm().values()))]))
"""
)


def test_users_own_code_is_still_optimised(tmp_path):
    """fastattn lowers Numba's level while it compiles, and no longer."""
    process = start(USERS_CODE, tmp_path)
    out, err = process.communicate(timeout=200)
    assert process.returncode == 0, err
    first, second = out.splitlines()
    assert json.loads(first) == [42, 1.0, True]
    level, assembly = json.loads(second)
    assert level == 3
    assert "paddq" in assembly or "add\tv" in assembly, "the loop is not vectorised"


def test_level_is_restored_after_an_error():
    from numba import config

    before = config.OPT

    def kernel(job, scratch, quota):
        return no_such_name  # noqa: F821

    with pytest.raises(Exception, match="no_such_name"):
        compile.translate(kernel)
    assert before == config.OPT


# --- no compiler --------------------------------------------------------------------------------

BROKEN = {
    "numba missing": ("numba", "raise ModuleNotFoundError(name='numba')", "numba is not installed"),
    "llvmlite missing": (
        "llvmlite",
        "raise ModuleNotFoundError(name='llvmlite')",
        "llvmlite is not installed: pip install numba",
    ),
    "numba does not fit": (
        "numba",
        "raise ImportError('Numba needs NumPy 1.26 or less.\\nGot 2.9.')",
        "numba cannot be imported: ImportError: Numba needs NumPy 1.26 or less.",
    ),
    "numba is odd": ("numba", "1 / 0", "numba cannot be imported: ZeroDivisionError: "),
    "llvmlite is odd": (
        "llvmlite",
        "raise OSError('libLLVM.so: bad ELF')",
        "llvmlite cannot be imported: OSError: libLLVM.so: bad ELF",
    ),
    "numba lacks a part": (
        "numba",
        "import no_such_module",
        "numba cannot be imported: ModuleNotFoundError: No module named 'no_such_module'",
    ),
}
BY_NAME = """
import json
import numpy as np
import fastattn
q = np.ones((5, 3), np.float32)
try:
    fastattn.attention(q, q, q, backend="cpu")
except ImportError as error:
    print(json.dumps(str(error)))
"""


@pytest.mark.parametrize("how", BROKEN)
def test_without_a_compiler_numpy_answers(tmp_path, how):
    name, text, reason = BROKEN[how]
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / f"{name}.py").write_text(text)
    where = {"PYTHONPATH": os.pathsep.join([str(tmp_path / "broken"), str(PACKAGE.parent)])}
    right, backend, why = fresh(CALL, tmp_path / "cache", **where)
    assert (right, backend) == (True, "numpy")
    assert why.startswith(reason)
    message = fresh(BY_NAME, tmp_path / "cache", **where)
    assert message.startswith(f"backend='cpu' cannot run here: {reason}")
    assert message.endswith("backend='auto' falls back to NumPy.")


# --- how long -----------------------------------------------------------------------------------

TIMED = """
import json, sys, time
import numpy as np
import fastattn
q = np.ones((4, 64, 64), np.float32)
start, spent = time.perf_counter(), time.process_time()
fastattn.attention(q, q, q, causal=True, backend="cpu")
print(json.dumps([min(time.perf_counter() - start, time.process_time() - spent)]))
"""


@pytest.mark.slow
def test_first_call(tmp_path):
    """The processor time of it, so that a busy machine does not count."""
    (cold,) = fresh(TIMED, tmp_path / "cache")
    warm = min(fresh(TIMED, tmp_path / "cache")[0] for _ in range(3))
    assert cold <= 6
    assert warm <= 0.2
