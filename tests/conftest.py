"""Options and fixtures: a seeded generator, and one run of each test per backend."""

from __future__ import annotations

import signal
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import numpy as np
import other_process
import pytest

import fastattn

BACKENDS = ("numpy", "cpu")


@pytest.fixture(scope="session", autouse=True)
def fresh_graphs(tmp_path_factory):
    """PyTorch keeps compiled graphs, and does not see that an operator of theirs has changed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("graphs")))
        yield


def pytest_addoption(parser):
    parser.addoption(
        "--backend",
        action="append",
        choices=BACKENDS,
        help="test this backend only; may be given more than once",
    )
    parser.addoption("--wheel", help="test this wheel instead of building one, which takes minutes")


def pytest_generate_tests(metafunc):
    if "backend" in metafunc.fixturenames:
        chosen = metafunc.config.getoption("--backend") or BACKENDS
        metafunc.parametrize("backend", chosen, indirect=True)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Where a file says CPU_IS_SLOW, its tests of the compiled backend are slow tests."""
    for item in items:
        callspec = getattr(item, "callspec", None)
        on_cpu = callspec is not None and callspec.params.get("backend") == "cpu"
        marked = item.get_closest_marker("cpu_is_slow") is not None
        if on_cpu and (marked or getattr(item.module, "CPU_IS_SLOW", False)):
            item.add_marker(pytest.mark.slow)


@pytest.fixture
def backend(request):
    """The name of a backend that works on this computer; others are skipped, with the reason."""
    reason = _why_not(request.param)
    if reason:
        pytest.skip(f"backend {request.param}: {reason}")
    return request.param


def _why_not(backend):
    one = np.ones((1, 1), np.float32)
    try:
        plan = fastattn.explain(one, one, one, backend=backend)
    except ImportError as error:
        return str(error)
    return "" if plan.backend == backend else dict(plan.rejected)[backend]


@pytest.fixture(scope="session", autouse=True)
def interruptible():
    """Ctrl-C raises KeyboardInterrupt: not so in what a shell has started in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def rng():
    return np.random.default_rng(0)


@pytest.fixture
def torch():
    """The module torch, without the fast path of its attention layers, which warns."""
    torch = pytest.importorskip("torch")
    fast_path = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    torch.manual_seed(0)
    yield torch
    torch.backends.mha.set_fastpath_enabled(fast_path)


@pytest.fixture(scope="session")
def jax_process():
    """An executor whose one process has JAX, with 64-bit types: see other_process."""
    pytest.importorskip("jax")
    spawn = get_context("spawn")
    with ProcessPoolExecutor(1, spawn, initializer=other_process.set_up_jax) as pool:
        yield pool
