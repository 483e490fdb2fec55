"""fastattn on torch's own threads: the same bits, errors, and what a fork leaves."""

from __future__ import annotations

import pytest
from processes import fresh

import fastattn

torch = pytest.importorskip("torch")

from fastattn.cpu import threads as pool  # noqa: E402
from fastattn.torch import dispatch, scaled_dot_product_attention, threads  # noqa: E402

needs_region = pytest.mark.skipif(
    threads._open_region is None, reason="torch's OpenMP library has no GOMP_parallel"
)


@pytest.fixture
def two_threads(monkeypatch):
    """Two threads for both, and every call large enough to use torch's."""
    monkeypatch.setattr(dispatch, "MUCH_BYTES", 0)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    with fastattn.num_threads(2):
        yield
    torch.set_num_threads(before)


@needs_region
def test_same_bits_on_torchs_threads(two_threads, monkeypatch):
    runs = []

    def spy(work, count):
        runs.append(count)
        threads.run(work, count)

    q = torch.randn(2, 8, 300, 64)
    wanted = fastattn.attention(q, q, q)
    monkeypatch.setattr(threads, "lend", lambda run: pool.lend(run and spy))
    assert torch.equal(scaled_dot_product_attention(q, q, q), wanted)
    assert runs == [2]
    fastattn.attention(q, q, q)  # not lent any more
    assert runs == [2]
    q.requires_grad_()
    scaled_dot_product_attention(q, q, q).sum().backward()
    assert runs == [2, 2, 2]


def test_no_more_threads_than_torchs(two_threads, monkeypatch):
    seen = []
    monkeypatch.setattr(threads, "lend", lambda run: seen.append(pool.get_num_threads()))
    q = torch.randn(1, 2, 8, 8)
    for count in (2, 1):
        torch.set_num_threads(count)
        scaled_dot_product_attention(q, q, q)
    assert set(seen) <= {2, 1}
    assert seen[-1] == 1 or threads._open_region is None


@needs_region
def test_errors_reach_the_caller():
    begun = []

    def work():
        begun.append(1)
        raise KeyError("work")

    with pytest.raises(KeyError, match="work"):
        threads.run(work, 2)
    assert 1 <= len(begun) <= 2


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
