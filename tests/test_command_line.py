"""python -m fastattn: what it prints, what it keeps, and what it says where it cannot."""

from __future__ import annotations

import argparse
import dataclasses
import io
import json
import os
import platform
import subprocess
import sys
from importlib import metadata

import numpy as np
import pytest
from processes import PACKAGE, fresh

import fastattn
from fastattn import commands, plan, repeat
from fastattn.benchmark import cases, peers, verify
from fastattn.commands import bench, info, terminal
from fastattn.cpu import built_in, compile, prebuilt, threads
from fastattn.cpu import run as cpu_run
from fastattn.problem import Variant

FLOAT32 = Variant("float32", "float32")
# A name of compile.TARGETS that machines of this kind can run.
TARGET = "aarch64" if platform.machine() in ("aarch64", "arm64") else "x86-64-v3"


@pytest.fixture(autouse=True)
def threads_stay(monkeypatch):
    """`bench` sets the number of threads of its process."""
    monkeypatch.setattr(threads, "_limit", threads._limit)


def run(*arguments):
    return commands.main([str(argument) for argument in arguments])


def refused(capsys, *arguments):
    """What the parser says of a wrong argument."""
    with pytest.raises(SystemExit) as stopped:
        run(*arguments)
    assert stopped.value.code == 2
    return capsys.readouterr().err.splitlines()[-1]


def test_module_runs():
    command = [sys.executable, "-W", "error", "-m", "fastattn", "--help"]
    done = subprocess.run(
        command, cwd=PACKAGE.parent, capture_output=True, text=True, check=True, timeout=250
    )
    assert all(f"\n    {name} " in done.stdout for name in ("info", "bench", "warmup"))
    assert done.stderr == ""


def test_a_reader_that_has_left():
    """As in `info | head -1`: no complaint, and the status of a program that SIGPIPE ends."""
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "fastattn", "info"]
    done = subprocess.run(
        command, cwd=PACKAGE.parent, stdout=writer, stderr=subprocess.PIPE, timeout=250
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, b"")


def test_version(capsys):
    with pytest.raises(SystemExit) as exit_:
        run("--version")
    assert (exit_.value.code, capsys.readouterr().out) == (0, f"fastattn {fastattn.__version__}\n")


def test_a_command_is_needed(capsys):
    assert "COMMAND" in refused(capsys)


@pytest.mark.parametrize("command", commands.COMMANDS)
def test_every_option_has_a_help_text(command):
    parser = argparse.ArgumentParser()
    commands.COMMANDS[command].add_options(parser)
    assert [action.dest for action in parser._actions if not action.help] == []


def facts(capsys):
    """{name: text} of what `info` prints."""
    assert run("info") == 0
    return dict(line.split(None, 1) for line in capsys.readouterr().out.splitlines())


def test_info(capsys, monkeypatch, tmp_path):
    pytest.importorskip("numba")
    monkeypatch.setenv("FASTATTN_CACHE", str(tmp_path / "kernels"))
    found = facts(capsys)
    assert f"numpy {np.__version__}" in found["versions"]
    assert found["cpu"] == "available: kernels compiled here"
    assert found["registers"].split(":")[0] in info.UNIT_NAMES.values()
    assert found["cache"].startswith(f"{tmp_path / 'kernels'}: 0 kernels")


def test_info_says_why_kernels_are_not_kept(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("FASTATTN_CACHE", "0")
    assert facts(capsys)["cache"].endswith(": FASTATTN_CACHE=0 turns the cache off")
    monkeypatch.setenv("FASTATTN_CACHE", str(tmp_path))
    tmp_path.chmod(0o770)
    assert facts(capsys)["cache"].endswith(f": others can write {tmp_path}: chmod go-w")
    (tmp_path / "file").touch()
    monkeypatch.setenv("FASTATTN_CACHE", str(tmp_path / "file"))
    assert "File exists" in facts(capsys)["cache"]


def test_info_without_a_compiler(capsys, monkeypatch):
    monkeypatch.setattr(info, "unavailable", lambda variant: "numba is not installed")
    found = facts(capsys)
    assert found["cpu"] == "not available: numba is not installed"
    assert found["numpy"] == "available: what backend='auto' uses here"


def test_info_measures(capsys, monkeypatch):
    monkeypatch.setattr(info.limits, "multiply_add_peak", lambda dtype, number: 100.0 * number)
    monkeypatch.setattr(info.limits, "read_bandwidth", lambda number: 10.0 * number)
    monkeypatch.setattr(info, "get_num_threads", lambda: 2)
    assert run("info", "--measure") == 0
    assert capsys.readouterr().out.splitlines()[-4:] == [
        "peak        100.0 GFLOP/s float32, 100.0 float64 on 1 thread",
        "memory      10.0 GB/s read by 1 thread",
        "peak        200.0 GFLOP/s float32, 200.0 float64 on 2 threads",
        "memory      20.0 GB/s read by 2 threads",
    ]


@pytest.fixture
def one_kernel(monkeypatch):
    """`warmup` knows the smallest kernel only."""
    pytest.importorskip("numba")
    key = ("combine", FLOAT32)
    monkeypatch.setattr(built_in, "kernels", lambda: {key: cpu_run.builder(*key)})


LOAD = """
import json, sys
from fastattn.cpu.run import kernel
from fastattn.problem import Variant
kernel("combine", Variant("float32", "float32"))
print(json.dumps("numba" in sys.modules))
"""


def test_warmup_for_another_machine(one_kernel, capsys, tmp_path):
    folder = tmp_path / "kernels"
    assert run("warmup", "--target", TARGET, "--into", folder) == 0
    (entry,) = folder.iterdir()
    out = capsys.readouterr().out
    assert f" in {folder}, 1 compiled in " in out
    assert f"folder and FASTATTN_TARGET to {TARGET}." in out
    before = entry.stat().st_mtime_ns
    # There, nothing is compiled and Numba not imported; without the target it is another kernel.
    assert fresh(LOAD, folder, FASTATTN_TARGET=TARGET) is False
    assert list(folder.iterdir()) == [entry]
    assert run("warmup", "--target", TARGET, "--into", folder) == 0
    assert f" in {folder}, 0 compiled in " in capsys.readouterr().out
    assert entry.stat().st_mtime_ns == before
    assert fresh(LOAD, folder) is True


def test_warmup_fills_the_cache(one_kernel, capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("FASTATTN_CACHE", str(tmp_path / "kernels"))
    assert run("warmup") == 0
    out = capsys.readouterr().out
    assert f" in {tmp_path / 'kernels'}, 1 compiled in " in out
    assert "FASTATTN_CACHE" not in out
    assert fresh(LOAD, tmp_path / "kernels") is False


@pytest.mark.slow
def test_warmup_compiles_all_there_is(capsys, tmp_path):
    pytest.importorskip("numba")
    code = """
import json, sys
import numpy as np, fastattn
ml_dtypes = __import__("ml_dtypes")
for dtype in ("float16", ml_dtypes.bfloat16, "float32", "float64"):
    q = np.ones((2, 300, 16), dtype)
    fastattn.attention(q, q, q, backend="cpu")
    k = np.ones((2, 3000, 16), dtype)
    with fastattn.num_threads(2):
        fastattn.attention(q[:, :20], k, k, backend="cpu")
        fastattn.attention(q[:, :20], k[:, None], k[:, None], block_table=[1], backend="cpu")
    out, lse = fastattn.attention(q, q, q, return_lse=True)
    fastattn.attention_backward(out, q, q, q, out, lse, backend="cpu")
    if q.dtype in (np.float32, np.float64):
        fastattn.nn.gelu(q, backend="cpu")
print(json.dumps("numba" in sys.modules))
"""
    pytest.importorskip("ml_dtypes")
    folder = tmp_path / "kernels"
    assert run("warmup", "--into", folder) == 0
    before = sorted(folder.iterdir())
    assert len(before) == len(built_in.kernels())
    assert fresh(code, folder) is False
    assert sorted(folder.iterdir()) == before


def test_kernels_that_come_with_the_package(one_kernel, capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("FASTATTN_CACHE", str(tmp_path))
    monkeypatch.setattr(prebuilt, "load", lambda key: print)
    monkeypatch.setattr(prebuilt, "host_name", lambda: TARGET)
    assert facts(capsys)["cpu"] == f"available: kernels from the package, for {TARGET}"
    assert run("warmup") == 0
    assert "came with the package: nothing is left" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


def test_warmup_needs_numba(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert run("warmup", "--into", tmp_path) == 1
    error = "compiling needs numba, which is not installed: pip install numba"
    assert capsys.readouterr().err == f"fastattn: {error}\n"


def test_warmup_says_why_not(one_kernel, capsys, monkeypatch, tmp_path):
    tmp_path.chmod(0o770)
    assert run("warmup", "--into", tmp_path) == 1
    assert "--into must be a folder that is yours alone: others can" in capsys.readouterr().err
    monkeypatch.setenv("FASTATTN_CACHE", "0")
    assert run("warmup") == 1
    assert "there is no cache folder: FASTATTN_CACHE=0 turns" in capsys.readouterr().err
    assert "invalid choice: 'z80'" in refused(capsys, "warmup", "--target", "z80")
    (tmp_path / "file").touch()
    assert run("warmup", "--into", tmp_path / "file") == 1
    assert "File exists" in capsys.readouterr().err


@pytest.mark.parametrize("lacks", ["rich", "a terminal", "nothing"])
def test_progress(lacks, one_kernel, capsys, monkeypatch, tmp_path):
    """A bar, or where none can be drawn, a line for each kernel, and one a minute."""
    if lacks == "rich":
        monkeypatch.setitem(sys.modules, "rich.console", None)
    else:
        pytest.importorskip("rich")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: lacks != "a terminal")
    assert run("warmup", "--target", TARGET, "--into", tmp_path / "kernels") == 0
    line = "1/1 combine float32\n"
    found = capsys.readouterr().err
    assert (found == line) is (lacks != "nothing")
    assert "combine float32" in found
    with terminal.meter() as show:
        show(0.5, "half")
    assert ("half" in capsys.readouterr().err) is (lacks == "nothing")


@pytest.mark.parametrize("on_terminal", [True, False])
def test_tables_are_as_wide_as_the_terminal(on_terminal, monkeypatch):
    """Also once it has been resized; those of a file or a pipe are of one width."""
    pytest.importorskip("rich")
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: on_terminal)
    screen, found = terminal.console(), []
    for columns in (80, 133):
        size = os.terminal_size((columns, 24))
        monkeypatch.setattr(os, "get_terminal_size", lambda *of, size=size: size)
        found.append(screen.width)
    assert found == ([80, 133] if on_terminal else [terminal.WIDTH] * 2)


def test_tables_where_there_is_but_ascii(monkeypatch):
    pytest.importorskip("rich")
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, "ascii"))
    terminal.console().print("5 µs")
    sys.stdout.flush()
    assert written.getvalue() == b"5 ?s\n"


@pytest.mark.skipif(os.name != "posix", reason="a shell that closes files")
def test_without_stdout_and_stderr():
    command = [sys.executable, "-m", "fastattn", "verify", "--calls", "1", "--backend", "numpy"]
    closed = ["sh", "-c", 'exec "$@" >&- 2>&-', "sh", *command]
    assert subprocess.run(closed, cwd=PACKAGE.parent, check=False).returncode == 0


def test_bench(capsys, monkeypatch, tmp_path):
    pytest.importorskip("rich")
    pytest.importorskip("threadpoolctl")
    pytest.importorskip("matplotlib")
    monkeypatch.setattr("fastattn.benchmark.contest.SETTLE_SECONDS", 0.0)
    # JAX, were it to run in this process, would refuse the forks of later tests.
    monkeypatch.setattr(peers, "_available_cores", lambda: 2)
    kept, picture = tmp_path / "a" / "samples.json", tmp_path / "picture.png"
    options = ("--rounds", 2, "--threads", 1, "--peers", "numpy,jax,ort gqa")
    assert run("bench", "--cases", "tiny", *options, "--json", kept, "--plot", picture) == 0
    out, err = capsys.readouterr()
    if not metadata.version("rich").startswith("13.0."):  # ends a bar that is not shown with a line
        assert not out.startswith("\n")
    assert err == ""
    # On one thread JAX takes no part, nor does GroupQueryAttention in what is not causal.
    for word in (
        ", 1 thread ",
        "tiny",
        "fastattn numpy",
        "numpy formula",
        "takes every core",
        "always causal",
    ):
        assert word in out
    content = json.loads(kept.read_text())["forward"]["tiny"]
    assert set(content["contenders"]) == {"fastattn numpy", "numpy formula"}
    assert [len(found["seconds"]) for found in content["contenders"].values()] == [2, 2]
    assert content["setting"]["num_threads"] == 1
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_bench_says_what_it_does_not_know(capsys):
    message = refused(capsys, "bench", "--cases", "nope")
    assert "argument --cases: cases must be groups ('suite', 'sweep', 'quick') or names" in message
    assert message.endswith("got 'nope'")
    message = refused(capsys, "bench", "--peers", "fastattn,nope")
    assert "argument --peers: contenders must be among ('fastattn cpu', " in message
    assert message.endswith("got 'nope'")
    message = refused(capsys, "bench", "--threads", 0)
    assert message.endswith("argument --threads: must be an int of at least 1, got '0'")


def test_bench_refuses_what_it_could_not_keep(capsys, monkeypatch, tmp_path):
    pytest.importorskip("rich")
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(bench, "measure", lambda options, screen: pytest.fail("measured"))
    notes = tmp_path / "notes.txt"
    notes.write_text("not results")
    assert run("bench", "--json", notes) == 1
    text = f"fastattn: results must be kept in a file of results, got {notes}\n"
    assert capsys.readouterr().err == text
    assert run("bench", "--json", notes / "x.json") == 1
    assert "fastattn: [Errno" in capsys.readouterr().err
    picture = tmp_path / "picture.png"
    for path in (tmp_path, picture):
        with monkeypatch.context() as patch:
            patch.setattr(os, "access", lambda place, mode: place != tmp_path)
            assert run("bench", "--plot", path) == 1
        assert f": '{path}'\n" in capsys.readouterr().err
    assert run("bench", "--plot", notes) == 1
    error = capsys.readouterr().err
    assert error.startswith("fastattn: a plot must be one of ")
    assert error.endswith(f", got {notes}\n")


def test_an_interrupt_is_silent(capsys, monkeypatch):
    def interrupted(options, screen):
        raise KeyboardInterrupt

    pytest.importorskip("rich")
    monkeypatch.setattr(bench, "measure", interrupted)
    assert run("bench") == 130
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("module", "options"),
    [("rich.console", ()), ("matplotlib.figure", ("--plot",)), ("threadpoolctl", ())],
)
def test_bench_says_what_to_install(module, options, capsys, monkeypatch):
    pytest.importorskip("rich")
    pytest.importorskip("matplotlib")
    monkeypatch.setitem(sys.modules, module, None)
    assert run("bench", "--cases", "tiny", *options) == 1
    error = capsys.readouterr().err
    why = "which is not installed: pip install 'fastattn[bench]'\n"
    assert error.endswith(f" needs {module.split('.')[0]}, {why}")


def test_a_peer_that_is_not_installed_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    case = cases.CASES["tiny"]
    assert peers.entry("torch sdpa", case, case.inputs(), 1) == "torch is not installed"


def test_without_a_compiler_only_numpy_takes_part(monkeypatch):
    monkeypatch.setattr("fastattn.cpu.run.unavailable", lambda variant: "numba is not installed")
    plan._plan.cache_clear()
    repeat.forget()
    case = cases.CASES["tiny"]
    why = "backend='cpu' cannot run here: numba is not installed"
    assert str(peers.entry("fastattn cpu", case, case.inputs(), 1)).startswith(why)
    assert isinstance(peers.entry("fastattn numpy", case, case.inputs(), 1), peers.Entry)
    plan._plan.cache_clear()
    repeat.forget()


@pytest.mark.parametrize("name", ["bert-128", "gpt2-1k-causal", "padding-384", "bias-512", "tiny"])
def test_contenders_are_checked(name):
    case = cases.CASES[name]
    x = case.inputs()
    exact = verify.exact_rows(case, x)
    entry = peers.entry("fastattn numpy", case, x, 1)
    out = entry.unpack(entry.run())
    assert verify.error(name, case, out, exact) < 1e-5
    wrong = out.copy()
    wrong[-1, -1, -1, -1] += 0.01 * np.abs(out).max()
    with pytest.raises(verify.WrongAnswer, match="error must be at most"):
        verify.error(name, case, wrong, exact)
    with pytest.raises(verify.WrongAnswer, match="shape must be"):
        verify.error(name, case, out[..., :-1], exact)


def test_targets_of_warmup_are_those_of_the_compiler(capsys):
    assert ", ".join(compile.TARGETS) in warmup_help(capsys)


def warmup_help(capsys):
    with pytest.raises(SystemExit):
        run("warmup", "--help")
    return " ".join(capsys.readouterr().out.split())


def test_contenders_that_store_all_scores_are_left_out_where_these_are_large():
    case = cases.CASES["long-8k"]
    long = dataclasses.replace(case, seqlen_q=4 * case.seqlen_q)
    x = cases.CASES["tiny"].inputs()  # never looked at
    assert peers.entry("numpy formula", long, x, 1) == "stores 4 GiB of scores or more"
    assert peers.entry("jax", case, x, peers._available_cores()) == "stores 1 GiB of scores or more"
