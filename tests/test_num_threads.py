"""The number of threads: what the user sets, and the machine's own limits."""

from __future__ import annotations

import asyncio
import os
import threading

import numpy as np
import pytest

import fastattn
from fastattn import machine
from fastattn.cpu import threads


@pytest.fixture(autouse=True)
def restore_limit(monkeypatch):
    monkeypatch.setattr(threads, "_limit", None)


def in_thread(function):
    """What function() answers in a thread of its own."""
    found = []
    thread = threading.Thread(target=lambda: found.append(function()))
    thread.start()
    thread.join()
    return found[0]


def test_set_num_threads_holds_everywhere():
    fastattn.set_num_threads(5)
    assert fastattn.get_num_threads() == 5
    assert in_thread(fastattn.get_num_threads) == 5
    in_thread(lambda: fastattn.set_num_threads(3))
    assert fastattn.get_num_threads() == 3


def test_num_threads_holds_in_its_block_and_thread_only():
    fastattn.set_num_threads(5)
    with fastattn.num_threads(2):
        assert fastattn.get_num_threads() == 2
        assert in_thread(fastattn.get_num_threads) == 5
        with fastattn.num_threads(3):
            assert fastattn.get_num_threads() == 3
        assert fastattn.get_num_threads() == 2
        fastattn.set_num_threads(4)  # the block is the nearer one
        assert fastattn.get_num_threads() == 2
    assert fastattn.get_num_threads() == 4


def test_num_threads_ends_with_an_exception():
    fastattn.set_num_threads(5)
    with pytest.raises(KeyError), fastattn.num_threads(2):
        raise KeyError
    assert fastattn.get_num_threads() == 5


def test_num_threads_is_per_task():
    async def task(n):
        with fastattn.num_threads(n):
            await asyncio.sleep(0)
            return fastattn.get_num_threads()

    async def main():
        return await asyncio.gather(*(task(n) for n in (2, 3, 4)))

    assert asyncio.run(main()) == [2, 3, 4]


@pytest.mark.parametrize("change", [fastattn.set_num_threads, fastattn.num_threads])
@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        (0, ValueError, "num_threads must be an int >= 1, got 0"),
        (-2, ValueError, "num_threads must be an int >= 1, got -2"),
        (1.0, TypeError, "num_threads must be an int >= 1, got float"),
        ("2", TypeError, "num_threads must be an int >= 1, got str"),
        (None, TypeError, "num_threads must be an int >= 1, got NoneType"),
        (True, TypeError, "num_threads must be an int >= 1, got bool"),
    ],
    ids=repr,
)
def test_what_is_no_number_of_threads(change, value, error, message):
    with pytest.raises(error) as caught, change(value):
        pass
    assert str(caught.value) == message
    assert fastattn.get_num_threads() == machine.default_num_threads()


def test_a_numpy_integer_is_a_number_of_threads():
    fastattn.set_num_threads(np.int64(2))
    assert fastattn.get_num_threads() == 2
    assert type(fastattn.get_num_threads()) is int


@pytest.mark.parametrize(
    ("cpus", "omp", "files", "expected"),
    [
        (8, None, {}, 8),
        (8, "3", {}, 3),
        (8, "4,2", {}, 4),  # nested levels: the first is the outermost
        (8, "100", {}, 8),
        (8, "0", {}, 8),
        (8, "many", {}, 8),
        (8, "", {}, 8),
        (8, None, {"/sys/fs/cgroup/cpu.max": "200000 100000"}, 2),
        (8, None, {"/sys/fs/cgroup/cpu.max": "150000 100000"}, 2),
        (8, None, {"/sys/fs/cgroup/cpu.max": "10000 100000"}, 1),
        (8, None, {"/sys/fs/cgroup/cpu.max": "max 100000"}, 8),
        (8, "2", {"/sys/fs/cgroup/cpu.max": "400000 100000"}, 2),
        (8, None, {"/sys/fs/cgroup/a/b/cpu.max": "300000 100000"}, 3),
        # a group is also held to what the groups around it may use
        (8, None, {"/sys/fs/cgroup/a/cpu.max": "200000 100000"}, 2),
        (
            8,
            None,
            {
                "/sys/fs/cgroup/a/b/cpu.max": "700000 100000",
                "/sys/fs/cgroup/a/cpu.max": "500000 100000",
            },
            5,
        ),
        (
            8,
            None,
            {
                "/sys/fs/cgroup/cpu/cpu.cfs_quota_us": "250000",
                "/sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
            },
            3,
        ),
        (
            8,
            None,
            {
                "/sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1",
                "/sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
            },
            8,
        ),
    ],
    ids=str,
)
def test_default_is_the_least_of_all_limits(monkeypatch, cpus, omp, files, expected):
    files = {"/proc/self/cgroup": "0::/a/b"} | files
    monkeypatch.setattr(machine, "_read", lambda path: files.get(path, ""))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(cpus), raising=False)
    if omp is None:
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    else:
        monkeypatch.setenv("OMP_NUM_THREADS", omp)
    assert machine.default_num_threads.__wrapped__() == expected


def test_control_groups_may_have_any_name(monkeypatch, tmp_path):
    name = b"\xfcbung"  # not UTF-8
    os.mkdir(os.fsencode(tmp_path) + b"/" + name)
    (tmp_path / os.fsdecode(name) / "cpu.max").write_text("100000 100000", encoding="ascii")
    (tmp_path / "cgroup").write_bytes(b"0::/" + name)
    read = machine._read
    monkeypatch.setattr(machine, "_read", lambda path: read(moved(path)))

    def moved(path):
        path = path.replace("/proc/self/cgroup", str(tmp_path / "cgroup"))
        return path.replace("/sys/fs/cgroup", str(tmp_path))

    assert machine._cgroup_quota() == 1


def test_default_where_affinity_is_unknown(monkeypatch):
    monkeypatch.setattr(machine, "_read", lambda path: "")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    for count, expected in ((6, 6), (None, 1)):
        monkeypatch.setattr(os, "cpu_count", lambda count=count: count)
        assert machine.default_num_threads.__wrapped__() == expected
