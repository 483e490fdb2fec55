"""Imports and first calls, each round in a fresh process.

The table shows whole processes, with the start of Python; extra_info has the seconds inside.
"""

import pytest
import startup


@pytest.mark.parametrize("stage", startup.STAGES)
def test_startup(benchmark, stage, tmp_path):
    benchmark.group = "startup"
    startup.measure(startup.WARM, tmp_path)  # fills the cache
    inside = []
    benchmark.pedantic(lambda: inside.append(startup.measure(stage, tmp_path)), rounds=3)
    benchmark.extra_info["seconds_inside"] = inside
