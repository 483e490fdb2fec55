"""The instructions of a whole warp on matrices: mma and ldmatrix.

Which lane holds which element is written down here from the PTX ISA ("Matrix Fragments for
mma.m16n8k16 with floating point type", "Matrix Fragments for mma.m16n8k8", "ldmatrix") and nowhere
taken from the kernels.
"""

from __future__ import annotations

import numpy as np
from ptx_arithmetic import TF32_CUT, halves
from ptx_text import EmulationError

LANES = 32
LANE = np.arange(LANES)
GROUP, IN_GROUP = LANE // 4, LANE % 4  # groupID and threadID_in_group of the PTX ISA


def _pairs(rows, columns):
    """[register, lane, half] of the (row, column) of both halves of a register."""
    return np.stack(rows)[..., None] + np.zeros(2, int), np.stack(columns)[..., None] + [0, 1]


# a: rows groupID for a0, a1 and a4, a5; columns 2 threadID_in_group, and 8 more from a4 on.
A_PLACE = _pairs(
    [GROUP, GROUP + 8, GROUP, GROUP + 8], [2 * IN_GROUP + 8 * half for half in (0, 0, 1, 1)]
)
# b: rows (of k) 2 threadID_in_group, and 8 more from b2 on; column groupID.
B_PLACE = _pairs([GROUP, GROUP], [2 * IN_GROUP, 2 * IN_GROUP + 8])[::-1]
# c: rows groupID for c0, c1 and 8 more for c2, c3; columns 2 threadID_in_group and the next.
C_ROW = np.stack([GROUP, GROUP, GROUP + 8, GROUP + 8])
C_COLUMN = np.stack([2 * IN_GROUP + i for i in (0, 1, 0, 1)])

# Of m16n8k8 with tf32, one element to a register, a: rows groupID for a0 and a2, and 8 more;
# columns threadID_in_group for a0 and a1, and 4 more.
A_TF32 = [GROUP, GROUP + 8, GROUP, GROUP + 8], [IN_GROUP, IN_GROUP, IN_GROUP + 4, IN_GROUP + 4]
# b: row threadID_in_group, and 4 more for b1; column groupID.
B_TF32 = [IN_GROUP, IN_GROUP + 4], [GROUP, GROUP]


def matrix_tf32(registers, place, shape):
    """(warps, *shape) float32 from registers of (warps * 32,) float32. A device takes no notice of
    their last 13 bits; those that have any were not rounded, and err by more than they should.
    """
    result = np.zeros((len(registers[0]) // LANES, *shape), np.float32)
    for register, row, column in zip(registers, *place, strict=True):
        x = register.view(np.float32)
        if (register[~np.isnan(x)] & TF32_CUT).any():
            raise EmulationError("a factor of mma that was not rounded to tf32")
        result[:, row, column] = x.reshape(-1, LANES)
    return result


def matrix(registers, place, shape, kind):
    """(warps, *shape) float32 from registers of (warps * 32,) pairs."""
    warps = len(registers[0]) // LANES
    result = np.zeros((warps, *shape), np.float32)
    for register, rows, columns in zip(registers, *place, strict=True):
        for half, x in enumerate(halves(register, kind)):
            result[:, rows[:, half], columns[:, half]] = x.reshape(warps, LANES)
    return result


def mma(a, b, c, parts):
    """m16n8k16, or m16n8k8 of tf32: four registers of float32 bits. parts: of the opcode."""
    shape, kind = parts[3], parts[-2]
    if (shape, kind) == ("m16n8k8", "tf32"):
        product = matrix_tf32(a, A_TF32, (16, 8)) @ matrix_tf32(b, B_TF32, (8, 8))
    elif shape == "m16n8k16" and kind in ("f16", "bf16"):
        product = matrix(a, A_PLACE, (16, 16), kind) @ matrix(b, B_PLACE, (16, 8), kind)
    else:
        raise EmulationError(f"mma not known: {shape} of {kind}")
    results = []
    for register, rows, columns in zip(c, C_ROW, C_COLUMN, strict=True):
        added = product[:, rows, columns].reshape(-1) + register.view(np.float32)
        results.append(added.view(np.uint32))
    return results


def row_addresses(addresses, count):
    """Those that ldmatrix of `count` matrices uses: of the first 8 * count lanes of each warp."""
    return addresses.reshape(-1, LANES)[:, : 8 * count].reshape(-1)


def ldmatrix(rows, count, transposed):
    """Registers from (warps * count * 8, 16) uint8 of rows: lane l gets elements 2 (l % 4) and the
    next of row l / 4, or where transposed, of column l / 4.
    """
    elements = np.ascontiguousarray(rows).view(np.uint16).reshape(-1, count, 8, 8)
    if transposed:
        elements = elements.swapaxes(-1, -2)
    low = elements[:, :, GROUP, 2 * IN_GROUP].astype(np.uint32)
    high = elements[:, :, GROUP, 2 * IN_GROUP + 1].astype(np.uint32)
    return [(low[:, i] | (high[:, i] << 16)).reshape(-1) for i in range(count)]
