"""Prefill: many queries against many keys."""

import cases

CASES = cases.FORWARD


def test_forward(benchmark, run):
    benchmark(run)
