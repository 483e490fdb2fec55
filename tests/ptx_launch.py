"""Kernels on an emulated device."""

from __future__ import annotations

from ptx_block import Block
from ptx_memory import GlobalMemory
from ptx_text import parse
from ptx_warpgroups import WarpgroupBlock


def launch(ptx: str, memory: GlobalMemory, arguments, grid: int, shared_bytes: int):
    """Run a grid of one dimension, block after block; return the last one."""
    program, block = parse(ptx), None
    kind = WarpgroupBlock if "mbarrier" in ptx else Block
    for number in range(grid):
        block = kind(program, memory, arguments, number, grid, shared_bytes)
        block.run()
    return block
