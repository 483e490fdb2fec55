"""Decoding: one query against a cache of keys."""

from fastattn.benchmark import cases

CASES = cases.DECODE


def test_decode(benchmark, run):
    benchmark(run)
