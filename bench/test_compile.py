"""Imports and first calls, each round in a fresh process.

The table shows whole processes, with the start of Python; extra_info has the seconds inside.
"""

import pytest
import startup

STAGES = {**startup.IMPORTS, **startup.FIRST_CALLS}


@pytest.mark.parametrize("stage", STAGES.values(), ids=STAGES)
def test_startup(benchmark, stage, tmp_path):
    benchmark.group = "startup"
    startup.seconds_in_fresh_process(stage, tmp_path)  # fills the cache
    inside = []
    benchmark.pedantic(lambda: inside.append(startup.measure(stage, tmp_path)), rounds=3)
    benchmark.extra_info["seconds_inside"] = inside
