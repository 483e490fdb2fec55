"""A thread block whose warpgroups go their own ways: wgmma, bulk copies, barriers in shared memory.

A copy arrives as late as the rules allow: when no thread can go on, and one of them waits for it;
another one, though it was started earlier, may still be on its way. Whoever waits for a phase goes
on as soon as it is over, before those that ended it. A product reads its operands from when it is
started until it is waited for, and its registers belong to it for so long.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

import numpy as np
import ptx_matrices as matrices
from ptx_block import LANES, Block
from ptx_memory import SHARED_WINDOW
from ptx_text import EmulationError

GROUP = 128  # threads
REGISTERS = 65536
MAP_PLACE = 1 << 20  # addresses of parameters that are tensor maps
BOX_COLUMNS, LINE = 64, 128


@dataclass
class Barrier:
    """Eight bytes of shared memory."""

    count: int  # arrivals of a phase
    pending: int
    maker: int  # the thread
    made: int  # when, by its warp's clock
    clocks: np.ndarray  # of those that have arrived in this phase
    over: np.ndarray  # and in the last one
    phase: int = 0
    nbytes: int = 0  # that are still to come
    seen_by_copies: bool = False


@dataclass
class Products:
    """What a warpgroup has started and not waited for, between two commits."""

    reads: list[np.ndarray] = field(default_factory=list)  # offsets in shared memory
    written: set[str] = field(default_factory=set)  # registers
    read: set[str] = field(default_factory=set)


class WarpgroupBlock(Block):
    """One thread block."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        count = self.count // GROUP
        self.mbarriers: dict[int, Barrier] = {}
        self.asleep: list[tuple[int, int, np.ndarray]] = []  # (barrier, parity, threads)
        self.woken = np.zeros(self.count, bool)
        self.tried = np.full(self.count, -1)  # the try_wait that did not end well
        self.copies: list[tuple[int, np.ndarray, np.ndarray]] = []  # (barrier, offsets, bytes)
        self.products = [[Products()] for _ in range(count)]  # the last one is open
        # Registers written since the last wgmma.fence of each warpgroup.
        self.fresh: list[set[str]] = [set() for _ in range(count)]
        self.shares = [0] * count  # registers of a thread, once setmaxnreg has said so
        self.now = range(count)  # the warpgroups of this instruction
        self.here = 0
        self.places = {name: MAP_PLACE + 128 * i for i, name in enumerate(self.parameters)}
        self.maps = {self.places[name]: value for name, value in self.parameters.items()}

    def run(self):
        super().run()
        if any(self.shares) and sum(self.shares) * GROUP > REGISTERS:
            raise EmulationError("setmaxnreg: more registers than there are")

    # Who goes on

    def _preferred(self, ready):
        first = ready & self.woken
        return first if first.any() else ready

    def _goes_on_without_threads(self):
        awaited = {barrier for barrier, _, _ in self.asleep}
        place = next((i for i, copy in enumerate(self.copies) if copy[0] in awaited), None)
        if place is None:
            return False
        address, offsets, data = self.copies.pop(place)
        self.shared.land(offsets, data)
        barrier = self.mbarriers[address]
        barrier.nbytes -= len(data)
        barrier.clocks[-1] = self.shared.seen[-1, -1]
        self._settle(address)
        return True

    def _do(self, instruction, mask, here):
        self.here = here
        groups = np.arange(self.count) // GROUP
        self.now = np.unique(groups if mask is None else groups[mask])
        return super()._do(instruction, mask, here)

    # Registers

    def _value(self, operand, bits):
        self._check_free(operand, "written", "read")
        if operand in self.places:
            return np.full(self.count, self.places[operand], np.uint64)
        return super()._value(operand, bits)

    def _register(self, name):
        self._check_free(name, "written", "read")
        return super()._register(name)

    def _put(self, name, value, mask):
        self._check_free(name, "written", "written")
        self._check_free(name, "read", "written")
        for group in self.now:
            self.fresh[group].add(name)
        super()._put(name, value, mask)

    def _check_free(self, name, use, access):
        """Fail where a product that has not been waited for uses the register."""
        for group in self.now:
            if any(name in getattr(p, use) for p in self.products[group]):
                raise EmulationError(f"{name} is {access} while a product uses it")

    # Barriers in shared memory

    def _uniform(self, operand, bits, mask, address=False):
        value = self._address(operand, bits) if address else self._value(operand, bits)
        value = np.unique(value if mask is None else value[mask])
        if len(value) != 1:
            raise EmulationError(f"{operand} is not the same in all threads")
        return int(value[0])

    def _mbarrier(self, parts, operands, mask):
        if parts[1] == "try_wait":
            return self._try_wait(operands, mask)
        threads = self._chosen(mask)
        warp = threads[0] // LANES
        if parts[1] == "init":
            address = self._uniform(operands[0], 32, mask, True)
            count = self._uniform(operands[1], 32, mask)
            clocks, now = np.zeros(len(self.shared.seen), np.int32), self.shared.seen[warp, warp]
            self.mbarriers[address] = Barrier(count, count, threads[0], now, clocks, clocks.copy())
            return False
        address = self._uniform(operands[1], 32, mask, True)
        barrier = self._barrier(address, threads)
        if "expect_tx" in parts:
            barrier.nbytes += self._uniform(operands[2], 32, mask) * len(threads)
        barrier.pending -= len(threads)
        if barrier.pending < 0:
            raise EmulationError("more arrivals than the barrier is for")
        for warp in np.unique(threads // LANES):
            np.maximum(barrier.clocks, self.shared.seen[warp], out=barrier.clocks)
            self.shared.seen[warp, warp] += 1
        return self._settle(address)

    def _barrier(self, address, threads):
        """The barrier at an address, that these threads know of."""
        if address not in self.mbarriers:
            raise EmulationError("no barrier was made there")
        barrier = self.mbarriers[address]
        if (self.shared.seen[threads // LANES, barrier.maker // LANES] < barrier.made).any():
            raise EmulationError("a barrier whose making no barrier orders")
        return barrier

    def _settle(self, address):
        """Whether a phase is over; those that wait for it go on."""
        barrier = self.mbarriers[address]
        if barrier.pending or barrier.nbytes:
            return False
        barrier.phase, barrier.pending = barrier.phase + 1, barrier.count
        barrier.over, barrier.clocks = barrier.clocks, np.zeros_like(barrier.clocks)
        woken = [s for s in self.asleep if s[0] == address and barrier.phase & 1 != s[1]]
        self.asleep = [s for s in self.asleep if not any(s is w for w in woken)]
        for _, _, threads in woken:
            self.waiting &= ~threads
            self.woken |= threads
        return True

    def _try_wait(self, operands, mask):
        addresses, parities = self._address(operands[1], 32), self._value(operands[2], 32)
        threads, stopped = self._chosen(mask), False
        self.woken[threads] = False
        for address, parity in {(int(addresses[t]), int(parities[t])) for t in threads}:
            mine = np.zeros(self.count, bool)
            mine[threads] = (addresses[threads] == address) & (parities[threads] == parity)
            barrier = self._barrier(address, np.flatnonzero(mine))
            over = barrier.phase & 1 != parity
            if over:
                for warp in np.unique(np.flatnonzero(mine) // LANES):
                    seen = self.shared.seen[warp]
                    np.maximum(seen, barrier.over, out=seen)
            elif (self.tried[mine] == self.here).all():
                self.asleep.append((address, parity, mine))
                self.waiting |= mine
                self.where[mine] = self.here
                stopped = True
                continue
            self.tried[mine] = -1 if over else self.here
            self._put(operands[0], np.full(self.count, over), mine)
        return stopped

    def _fence(self, parts, operands, mask):
        threads = self._chosen(mask)
        if parts[1] == "proxy":
            self.shared.fence(threads)
        elif parts[1] == "mbarrier_init":
            for barrier in self.mbarriers.values():
                barrier.seen_by_copies |= barrier.maker in threads

    def _setmaxnreg(self, parts, operands, mask):
        count = int(operands[0])
        if count % 8 or not 24 <= count <= 256:
            raise EmulationError("setmaxnreg of a number that cannot be")
        for group in self._whole_groups(mask):
            self.shares[group] = count

    # Bulk copies

    def _cp(self, parts, operands, mask):
        if parts[2] != "bulk":
            return super()._cp(parts, operands, mask)
        threads = self._chosen(mask)
        if len(threads) != 1:
            raise EmulationError("a bulk copy by several threads")
        to = self._uniform(operands[0], 32, mask, True)
        address = self._uniform(operands[2], 32, mask, True)
        inner = re.fullmatch(r"\[(\S+), \{(.*)\}\]", operands[1])
        tensor = self.maps.get(self._uniform(inner[1], 64, mask))
        if not isinstance(tensor, tuple):
            raise EmulationError("a bulk copy that has no map")
        start = [self._uniform(x.strip(), 32, mask) for x in inner[2].split(",")]
        start = [int(np.uint32(x).view(np.int32)) for x in start]
        data = self._box(tensor, start)
        if to % 1024:
            raise EmulationError("a bulk copy to where the swizzle does not begin")
        places = to + np.arange(data.size)
        offsets = (places ^ (places // LINE % 8 * 16)) - SHARED_WINDOW
        if offsets.min() < 0 or offsets.max() >= self.shared.bytes.size:
            raise EmulationError("shared access out of bounds")
        if not self._barrier(address, threads).seen_by_copies:
            raise EmulationError("a copy to a barrier that copies do not see yet")
        for products in self.products:
            if any(np.isin(reads, offsets).any() for p in products for reads in p.reads):
                raise EmulationError("race: copy over what a product still reads")
        self.shared.check_copy(offsets, threads[0])
        self.copies.append((address, offsets, data))
        return False

    def _box(self, tensor, start):
        """Bytes of the rows of a box, of LINE each; 0 for what does not exist."""
        column, first, *others = start
        rows = np.zeros((tensor.rows, LINE), np.uint8)
        sizes = tensor.sizes
        inside = all(0 <= x < size for x, size in zip(others, sizes[2:], strict=True))
        numbers = first + np.arange(tensor.rows)
        exist = (numbers >= 0) & (numbers < sizes[1]) if inside else np.zeros(len(numbers), bool)
        width = 2 * max(0, min(BOX_COLUMNS, sizes[0] - column))
        steps = (2, *tensor.strides)
        base = tensor.address + 2 * column
        base += sum(x * step for x, step in zip(others, steps[2:], strict=True))
        for piece in range(0, width, 16):
            addresses = (base + piece + numbers[exist] * steps[1]).astype(np.uint64)
            rows[exist, piece : piece + 16] = self.memory.load(addresses, 16)
        return rows.reshape(-1)

    # Products

    def _whole_groups(self, mask):
        if mask is None:
            return list(range(self.count // GROUP))
        threads = mask.reshape(-1, GROUP)
        if (threads.any(1) != threads.all(1)).any():
            raise EmulationError("not all threads of a warpgroup take part")
        return list(np.flatnonzero(threads.all(1)))

    def _wgmma(self, parts, operands, mask):
        for group in self._whole_groups(mask):
            products = self.products[group]
            if parts[1] == "fence":
                self.fresh[group].clear()
            elif parts[1] == "commit_group":
                products.append(Products())
            elif parts[1] == "wait_group":
                while len(products) - 1 > int(operands[0]):
                    done, warps = products.pop(0), range(4 * group, 4 * group + 4)
                    for reads in done.reads:
                        self.shared.still_reads(reads, warps)
            else:
                self._multiply(parts, operands, group)

    def _multiply(self, parts, operands, group):
        acc, a, b, more, *signs = operands
        columns = int(re.fullmatch(r"m64n(\d+)k16", parts[4])[1])
        kind, open_now = parts[-1], self.products[group][-1]
        threads = slice(GROUP * group, GROUP * group + GROUP)
        used = [*acc, *(a if isinstance(a, list) else ())]
        if any(name in self.fresh[group] for name in used if name in self.registers):
            raise EmulationError("a register of a product was written after wgmma.fence")
        if signs[:2] != ["1", "1"] or len(acc) != columns // 2:
            raise EmulationError("a product that is not known")
        if isinstance(a, list):
            self._check_free_list(a, group)
            pairs = [self.registers[name][threads] for name in a]
            left = matrices.matrix(pairs, matrices.A_PLACE, (16, 16), kind).reshape(64, 16)
            open_now.read.update(a)
        else:
            left = self._operand(a, group, 64, signs[2] == "1", kind)
        right = self._operand(b, group, columns, signs[-1] == "1", kind)
        product = left @ right.T
        rows = np.arange(GROUP) // LANES * 16 + np.tile(matrices.GROUP, 4)
        again = self.registers[more][threads].all()
        for i, name in enumerate(acc):
            column = i // 4 * 8 + 2 * np.tile(matrices.IN_GROUP, 4) + i % 2
            value = product[rows + i // 2 % 2 * 8, column]
            whole = self.registers.setdefault(name, np.zeros(self.count, np.uint32)).copy()
            if again:
                value = value + whole[threads].view(np.float32)
            whole[threads] = value.astype(np.float32).view(np.uint32)
            self.registers[name] = whole
        open_now.written.update(acc)

    def _check_free_list(self, names, group):
        if any(name in p.written for name in names for p in self.products[group]):
            raise EmulationError("a product reads what another has not left yet")

    def _operand(self, name, group, rows, transposed, kind):
        """(rows, 16) float32 that a descriptor names. transposed: rows lie beside each other."""
        threads = slice(GROUP * group, GROUP * group + GROUP)
        values = np.unique(self.registers[name][threads])
        if len(values) != 1:
            raise EmulationError("a descriptor that is not the same in all threads")
        number = int(values[0])
        start, blocks, groups = ((number >> shift & 0x3FFF) << 4 for shift in (0, 16, 32))
        if number >> 62 != 1 or number >> 49 & 7:
            raise EmulationError("a descriptor of another layout than 128 bytes swizzled")
        row, k = np.arange(rows)[:, None], np.arange(16)
        if transposed:
            place = start + row // 64 * blocks + k // 8 * groups + k % 8 * LINE + row % 64 * 2
        else:
            place = start + row // 8 * groups + row % 8 * LINE + 2 * k
        place = (place ^ (place // LINE % 8 * 16)) - SHARED_WINDOW
        offsets = place.reshape(-1, 1) + np.arange(2)
        warps = range(4 * group, 4 * group + 4)
        found = self.shared.read_by_product(offsets, warps)
        self.products[group][-1].reads.append(np.unique(offsets))
        bits = np.ascontiguousarray(found).view(np.uint16).reshape(rows, 16)
        low, _ = matrices.halves(bits.astype(np.uint32), kind)
        return low
