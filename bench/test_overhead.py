"""What a call costs when there is almost nothing to compute."""

from fastattn.benchmark import cases

CASES = cases.OVERHEAD


def test_overhead(benchmark, run):
    benchmark(run)
