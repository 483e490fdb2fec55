"""fastattn on torch's own threads: the same bits, errors, and what a fork leaves."""

from __future__ import annotations

import ctypes

import pytest
from processes import fresh

import fastattn

torch = pytest.importorskip("torch")

from fastattn.cpu import image  # noqa: E402
from fastattn.cpu import run as cpu_run  # noqa: E402
from fastattn.cpu import threads as pool  # noqa: E402
from fastattn.cpu.job import PLACE, Counter, Job  # noqa: E402
from fastattn.cpu.share import Share  # noqa: E402
from fastattn.torch import scaled_dot_product_attention, threads  # noqa: E402

needs_region = pytest.mark.skipif(
    threads._of_torch is None, reason="torch's OpenMP library has no GOMP_parallel"
)


@pytest.fixture
def two_threads():
    """Two threads for both."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    with fastattn.num_threads(2):
        yield
    torch.set_num_threads(before)


@pytest.fixture
def regions(monkeypatch):
    """How many threads each parallel region was opened for."""
    seen = []

    def open_region(body, data, count):
        seen.append(count)
        real.open(body, data, count)

    real = threads._of_torch
    monkeypatch.setattr(threads, "_of_torch", real._replace(open=open_region))
    return seen


@needs_region
@pytest.mark.unguarded
def test_same_bits_on_torchs_threads(two_threads, regions):
    q = torch.randn(2, 8, 300, 64)
    wanted = fastattn.attention(q, q, q)
    assert torch.equal(scaled_dot_product_attention(q, q, q), wanted)
    assert regions == [2]
    fastattn.attention(q, q, q)  # not lent any more
    assert regions == [2]
    q.requires_grad_()
    scaled_dot_product_attention(q, q, q).sum().backward()
    assert regions == [2, 2, 2]


@needs_region
@pytest.mark.unguarded
def test_regions_until_all_is_done(two_threads, regions, monkeypatch):
    monkeypatch.setattr(cpu_run, "FLOP_PER_CALL", 1)  # one item, then Python may act
    cpu_run._prepare.cache_clear()
    q = torch.randn(1, 12, 700, 32)
    wanted = fastattn.attention(q, q, q)
    assert torch.equal(scaled_dot_product_attention(q, q, q), wanted)
    assert len(regions) > 1


def test_no_more_threads_than_torchs(two_threads, monkeypatch):
    seen = []
    monkeypatch.setattr(threads, "lend", lambda run: seen.append(pool.get_num_threads()))
    q = torch.randn(1, 2, 8, 8)
    for count in (2, 1):
        torch.set_num_threads(count)
        scaled_dot_product_attention(q, q, q)
    assert set(seen) <= {2, 1}
    assert seen[-1] == 1 or threads._of_torch is None


@needs_region
def test_a_kernel_that_fails_in_a_region_is_named(two_threads):
    @image.ENTRY
    def fails(result, error, job, scratch, quota):
        return -1

    address = ctypes.cast(fails, ctypes.c_void_p).value
    kernel = image.call_at(address, "('test', 'fails')", fails)
    job, counter = Job(), Counter()
    job[PLACE["num_items"]] = 5
    pool.lend(threads._of_torch)
    try:
        with pytest.raises(RuntimeError, match=r"kernel \('test', 'fails'\) failed with status -1"):
            Share(kernel, job, counter, 64, ()).run(2, 1)
    finally:
        pool.lend(None)


@pytest.mark.slow
def test_a_forked_child_uses_its_own_threads():
    code = """
import json, os, torch, fastattn.torch
torch.set_num_threads(2)
fastattn.set_num_threads(2)
q = torch.randn(2, 8, 512, 64)
call = lambda: fastattn.torch.scaled_dot_product_attention(q, q, q).numpy().tobytes()
before = call()
child = os.fork()
if not child:
    os._exit(call() != before)
print(json.dumps(os.waitpid(child, 0)[1]))
"""
    assert fresh(code, None) == 0
