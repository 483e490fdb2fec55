"""Options and fixtures of the suite: `pytest bench`, timed by pytest-benchmark."""

from __future__ import annotations

from functools import lru_cache

import pytest
import repository
from threadpoolctl import threadpool_limits

from fastattn.benchmark import cases, peers, verify, work
from fastattn.machine import default_num_threads


def pytest_addoption(parser):
    parser.addoption("--threads", type=int, default=default_num_threads(), help="of all contenders")
    parser.addoption("--peers", default=",".join(peers.CONTENDERS), help="contenders to run")
    parser.addoption("--quick", action="store_true", help="only the quick cases")


def pytest_generate_tests(metafunc):
    """Cross the cases of a module, CASES, with the contenders that were asked for."""
    if "contender" not in metafunc.fixturenames:
        return
    chosen = metafunc.module.CASES
    if metafunc.config.getoption("quick"):
        chosen = [case for case in chosen if case in cases.GROUPS["quick"]]
    names = peers.select(metafunc.config.getoption("peers"))
    metafunc.parametrize("case", chosen, ids=str, scope="module")
    metafunc.parametrize("contender", names)


def pytest_benchmark_update_machine_info(config, machine_info):
    """Say what was measured, but not on whose machine."""
    machine_info.clear()
    machine_info.update(repository.setting(config.getoption("threads")))


@pytest.fixture(scope="session")
def num_threads(request):
    count = request.config.getoption("threads")
    with threadpool_limits(count, "blas"):
        yield count


@lru_cache(maxsize=1)
def _inputs_and_answer(case):
    x = case.inputs()
    return x, verify.exact_rows(case, x)


@pytest.fixture
def run(benchmark, case, contender, num_threads):
    """The call to be timed, checked against the oracle; skips what does not apply here."""
    x, exact = _inputs_and_answer(case)
    entry = peers.entry(contender, case, x, num_threads)
    if isinstance(entry, str):
        pytest.skip(f"{contender}: {entry}")
    error = verify.error(contender, case, entry.unpack(entry.run()), exact)
    benchmark.group = case.name
    benchmark.extra_info.update(flop=work.flop(case), nbytes=work.nbytes(case), error=error)
    return entry.run
