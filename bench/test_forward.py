"""Prefill: many queries against many keys."""

from fastattn.benchmark import cases

CASES = cases.FORWARD


def test_forward(benchmark, run):
    benchmark(run)
