"""What a call costs when there is almost nothing to compute."""

import cases

CASES = cases.OVERHEAD


def test_overhead(benchmark, run):
    benchmark(run)
