"""A thread block of an emulated device: runs the PTX that Numba and NVVM have made.

Every register is an array over the threads. Threads go together as long as they stand at the same
instruction; where they part, those that stand first in the text go on. A copy that cp.async starts
arrives as late as the rules allow: when the thread that started it waits for it. What the memory
model leaves open besides, and time, is not emulated.
"""

from __future__ import annotations

import numpy as np
import ptx_arithmetic as arithmetic
import ptx_matrices as matrices
from ptx_memory import SHARED_WINDOW, SharedMemory
from ptx_text import EmulationError, Program

LANES = 32
MAX_STEPS = 5_000_000
# Bits of registers, by their names.
WIDTHS = {"%r": 32, "%rd": 64, "%f": 32, "%fd": 64, "%rs": 16, "%h": 16}


class Block:
    """One thread block."""

    def __init__(self, program: Program, memory, arguments, number, grid, shared_bytes):
        self.program, self.memory = program, memory
        self.count = program.threads
        self.threads = np.arange(self.count)
        self.shared = SharedMemory(shared_bytes, self.count)
        self.parameters = dict(zip(program.parameters, arguments, strict=True))
        self.registers: dict[str, np.ndarray] = {}
        special = {"%ctaid.x": number, "%nctaid.x": grid, "%ntid.x": self.count}
        self.special = {k: np.full(self.count, v, np.uint32) for k, v in special.items()}
        self.special["%tid.x"] = self.threads.astype(np.uint32)
        # Of each warp: groups of copies that were committed, and the one that is open.
        self.groups: list[list[list]] = [[] for _ in range(self.count // LANES)]
        self.open: list[list] = [[] for _ in self.groups]
        self.steps = 0
        self.where = np.zeros(self.count, np.int64)  # the instruction that each thread stands at
        self.waiting = np.zeros(self.count, bool)  # at a barrier
        # Of each barrier: who is there, and what bar.red asks of them.
        self.barriers: dict[int, tuple[np.ndarray, np.ndarray, str]] = {}

    def run(self):
        """To the end of all threads."""
        end = len(self.program.instructions)
        with np.errstate(all="ignore"):
            while True:
                ready = ~self.waiting & (self.where < end)
                if ready.any():
                    self._go_on(self._preferred(ready), ready, end)
                elif not self.waiting.any():
                    return
                elif not self._goes_on_without_threads():
                    raise EmulationError("a barrier that not all threads reach")

    def _preferred(self, ready):
        """The threads that go on first, of those that can."""
        return ready

    def _goes_on_without_threads(self):
        """Whether something happens while all of them wait."""
        return False

    def _go_on(self, first, ready, end):
        """Of some threads those that stand first in the text: until they part, wait, or meet
        others.
        """
        where = self.where
        here = int(where[first].min())
        active = ready & (where == here)
        mask = None if active.all() else active
        others = where[ready & ~active]
        meeting = int(others.min()) if len(others) and others.min() > here else end
        while here < meeting:
            self.steps += 1
            if self.steps > MAX_STEPS:
                raise EmulationError("too many steps: is there an endless loop?")
            instruction = self.program.instructions[here]
            chosen = self._guarded(instruction, mask)
            kind = instruction.parts[0]
            if kind in ("bra", "ret", "exit"):
                target = instruction.target if kind == "bra" else end
                leaving = active if chosen is None else chosen
                if not leaving.any():
                    here += 1
                    continue
                where[active] = here + 1
                where[leaving] = target
                if kind == "bra" and mask is None and leaving is active:
                    here = target
                    continue
                return
            if chosen is None or chosen.any():
                where[active] = here + 1
                if self._do(instruction, chosen, here):
                    return
            here += 1
        where[active] = here

    def _guarded(self, instruction, mask):
        """Which threads do it; None: all."""
        if instruction.guard is None:
            return mask
        truth = self._register(instruction.guard)
        truth = ~truth if instruction.negated else truth
        truth = truth if mask is None else truth & mask
        return None if truth.all() else truth

    def _do(self, instruction, mask, here):
        """Whether the threads stop there, or others may go on."""
        try:
            handler = getattr(self, f"_{instruction.parts[0]}", self._arithmetic)
            return handler(instruction.parts, instruction.operands, mask)
        except EmulationError as error:
            raise EmulationError(f"{error}: {instruction.text!r}, instruction {here}") from None

    # Registers

    def _register(self, name):
        if name not in self.registers:
            raise EmulationError(f"read of {name}, which nothing has written")
        return self.registers[name]

    def _value(self, operand, bits):
        """An operand's bits, an array over the threads."""
        if operand in self.special:
            return self.special[operand].astype(arithmetic.UNSIGNED[bits])
        if operand in self.registers:
            value = self.registers[operand]
            if bits != 1 and value.dtype.itemsize * 8 != bits:
                raise EmulationError(f"{operand} has not {bits} bits")
            return value
        number = self._constant(operand, bits)
        return np.full(self.count, number, bool if bits == 1 else arithmetic.UNSIGNED[bits])

    def _constant(self, text, bits):
        if text[:2] in ("0f", "0d"):
            return int(text[2:], 16)
        if (
            text.lstrip("-").rstrip("U").replace("0x", "", 1).isalnum()
            and text.lstrip("-")[0].isdigit()
        ):
            return int(text.rstrip("U"), 0) & ((1 << bits) - 1)
        if "shared" in text and not text.startswith("%"):
            return SHARED_WINDOW
        raise EmulationError(f"read of {text}, which nothing has written")

    def _put(self, name, value, mask):
        if name == "_":
            return
        old = self.registers.get(name)
        if mask is None:
            self.registers[name] = value
        elif old is None or old.dtype != value.dtype:
            self.registers[name] = np.where(mask, value, np.zeros((), value.dtype))
        else:
            self.registers[name] = np.where(mask, value, old)

    def _address(self, operand, bits):
        """Of [register + constant]."""
        base, _, more = operand.strip("[] ").partition("+")
        value = self._value(base.strip(), bits)
        return value + value.dtype.type(int(more or 0) & ((1 << bits) - 1))

    def _chosen(self, mask):
        return self.threads if mask is None else np.flatnonzero(mask)

    def _whole_warps(self, mask):
        """The warps that take part, of which every lane must."""
        if mask is None:
            return np.arange(self.count // LANES)
        lanes = mask.reshape(-1, LANES)
        if (lanes.any(1) != lanes.all(1)).any():
            raise EmulationError("not all lanes of a warp take part")
        return np.flatnonzero(lanes.all(1))

    # Arithmetic

    def _arithmetic(self, parts, operands, mask):
        kind = parts[-1]
        bits = arithmetic.bits_of(kind)
        if kind == "pred":
            return self._predicates(parts[0], operands, mask)
        values = (
            [
                self._value(x, 32 if parts[0] in ("shl", "shr") and i else bits)
                for i, x in enumerate(operands[1:])
            ]
            if not ("wide" in parts and parts[0] == "mad")
            else [
                *(self._value(x, bits) for x in operands[1:3]),
                self._value(operands[3], 2 * bits),
            ]
        )
        self._put(operands[0], arithmetic.compute(parts, values), mask)

    def _predicates(self, name, operands, mask):
        x = [self._value(o, 1) for o in operands[1:]]
        result = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}.get(name)
        self._put(operands[0], result(*x) if result else ~x[0] if name == "not" else x[0], mask)

    def _setp(self, parts, operands, mask):
        bits = arithmetic.bits_of(parts[-1])
        x, y = (self._value(o, bits) for o in operands[1:3])
        result = arithmetic.compare(parts[1], parts[-1], x, y)
        if len(operands) > 3:
            also = self._value(operands[3], 1)
            result = result & also if parts[2] == "and" else result | also
        self._put(operands[0], result, mask)

    def _selp(self, parts, operands, mask):
        bits = arithmetic.bits_of(parts[-1])
        x, y = (self._value(o, bits) for o in operands[1:3])
        self._put(operands[0], np.where(self._register(operands[3]), x, y), mask)

    def _cvt(self, parts, operands, mask):
        bits = arithmetic.bits_of(parts[-1])
        values = [self._low(x, bits) for x in operands[1:]]
        self._put(operands[0], arithmetic.convert(parts, values), mask)

    def _low(self, operand, bits):
        """The low bits of a register that may have more, which is how cvt reads one."""
        value = self.registers.get(operand)
        if value is None or value.dtype.itemsize * 8 <= bits:
            return self._value(operand, bits)
        return value.astype(arithmetic.UNSIGNED[bits])

    def _cvta(self, parts, operands, mask):
        self._put(operands[0], self._value(operands[1], 64), mask)

    def _mov(self, parts, operands, mask):
        to, source = operands
        bits = arithmetic.bits_of(parts[-1])
        if isinstance(source, list):
            width = bits // len(source)
            whole = arithmetic.UNSIGNED[bits]
            value = sum(
                self._value(x, width).astype(whole) << whole(width * i)
                for i, x in enumerate(source)
            ).astype(whole)
            return self._put(to, value, mask)
        value = self._value(source, bits)
        if isinstance(to, list):
            width = bits // len(to)
            for i, name in enumerate(to):
                part = value >> value.dtype.type(width * i)
                self._put(name, part.astype(arithmetic.UNSIGNED[width]), mask)
            return None
        return self._put(to, value, mask)

    def _bfi(self, parts, operands, mask):
        bits = arithmetic.bits_of(parts[-1])
        inserted, into = (self._value(x, bits) for x in operands[1:3])
        first, count = int(operands[3]), int(operands[4])
        field = into.dtype.type(((1 << count) - 1) << first)
        shifted = (inserted << into.dtype.type(first)) & field
        self._put(operands[0], (into & ~field) | shifted, mask)

    # Memory

    def _ld(self, parts, operands, mask):
        kind = parts[-1]
        bits = arithmetic.bits_of(kind)
        if parts[1] == "param":
            return self._parameter(kind, operands, mask)
        names = operands[0] if isinstance(operands[0], list) else [operands[0]]
        nbytes, chosen = bits // 8 * len(names), self._chosen(mask)
        if parts[1] == "shared":
            addresses = self._address(operands[1], 32)[chosen]
            data = self.shared.read(addresses, nbytes, chosen, "ld")
        else:
            data = self.memory.load(self._address(operands[1], 64)[chosen], nbytes)
        data = np.ascontiguousarray(data).view(arithmetic.numpy_type(kind))
        for i, name in enumerate(names):
            # A register may be wider than what is loaded.
            wide = arithmetic.UNSIGNED[WIDTHS.get(name.rstrip("0123456789"), max(bits, 32))]
            same = data.dtype.kind == "f" or data.dtype.itemsize == np.dtype(wide).itemsize
            value = np.zeros(self.count, wide)
            value[chosen] = data[:, i].view(wide) if same else data[:, i].astype(wide)
            self._put(name, value, mask)
        return None

    def _parameter(self, kind, operands, mask):
        number = self.parameters[operands[1].strip("[]")]
        value = np.array(number, np.float64 if isinstance(number, float) else np.int64)
        bits = arithmetic.bits_of(kind)  # fewer than 64: its low half
        value = value.view(np.uint64).astype(arithmetic.UNSIGNED[bits])
        self._put(operands[0], np.full(self.count, value), mask)

    def _st(self, parts, operands, mask):
        bits = arithmetic.bits_of(parts[-1])
        names = operands[1] if isinstance(operands[1], list) else [operands[1]]
        chosen = self._chosen(mask)
        data = np.stack([self._value(x, bits)[chosen] for x in names], axis=1).view(np.uint8)
        if parts[1] == "shared":
            addresses = self._address(operands[0], 32)[chosen]
            offsets = self.shared.check_write(addresses, data.shape[1], chosen, "st")
            self.shared.write(offsets, data, chosen)
        else:
            self.memory.store(self._address(operands[0], 64)[chosen], data)

    def _cp(self, parts, operands, mask):
        if parts[2] in ("commit_group", "wait_group"):
            for warp in self._whole_warps(mask):
                if parts[2] == "commit_group":
                    self.groups[warp].append(self.open[warp])
                    self.open[warp] = []
                    continue
                while len(self.groups[warp]) > int(operands[0]):
                    for copied in self.groups[warp].pop(0):
                        self.shared.write(*copied)
            return
        chosen, nbytes = self._chosen(mask), int(operands[2])
        wanted = np.full(len(chosen), nbytes)
        if len(operands) > 3:
            wanted = self._value(operands[3], 32)[chosen].view(np.int32)
            if (wanted < 0).any() or (wanted > nbytes).any():
                raise EmulationError("cp.async of fewer than no bytes, or more than all")
        addresses = self._address(operands[1], 64)[chosen]
        data = np.zeros((len(chosen), nbytes), np.uint8)
        if (addresses % np.uint64(nbytes)).any():
            raise EmulationError("global access that is not aligned")
        for count in np.unique(wanted[wanted > 0]):
            some = wanted == count
            width = int(count & -count)  # in aligned pieces
            for first in range(0, int(count), width):
                at = addresses[some] + np.uint64(first)
                data[some, first : first + width] = self.memory.load(at, width)
        offsets = self.shared.check_write(
            self._address(operands[0], 32)[chosen], nbytes, chosen, "cp"
        )
        self.shared.forget(offsets, nbytes)
        for warp in np.unique(chosen // LANES):
            mine = chosen // LANES == warp
            self.open[warp].append((offsets[mine], data[mine], chosen[mine]))

    # Warps and barriers

    def _bar(self, parts, operands, mask):
        warps = self._whole_warps(mask)
        if parts[1] == "warp":
            self.shared.warp_time[warps] += 1
            return False
        asks = parts[1] == "red"
        number, *threads = (int(x) for x in operands[asks : len(operands) - asks])
        nobody = np.zeros(self.count, bool)
        there, truth, _ = self.barriers.pop(number, (nobody, nobody, ""))
        here = np.isin(self.threads // LANES, warps)
        if (there & here).any():
            raise EmulationError("a warp comes to a barrier where it already is")
        there, result = there | here, operands[0] if asks else ""
        if asks:
            truth = truth | (here & self._register(operands[2 + len(threads)]))
        wanted = threads[0] if threads else self.count
        if there.sum() < wanted:
            self.barriers[number] = there, truth, result
            self.waiting |= here
            return True
        self.waiting &= ~there
        self.shared.meet(np.unique(self.threads[there] // LANES))
        if asks:
            self._put(result, np.full(self.count, truth.any()), there)
        return True

    def _shfl(self, parts, operands, mask):
        self._whole_warps(mask)
        source, by = self._value(operands[1], 32), self._value(operands[2], 32).astype(np.int64)
        fellow = self.threads ^ by if parts[2] == "bfly" else self.threads // LANES * LANES + by
        to, _, exists = operands[0].partition("|")
        self._put(to, source[fellow], mask)
        if exists:
            self._put(exists, np.ones(self.count, bool), mask)

    def _vote(self, parts, operands, mask):
        self._whole_warps(mask)
        truth = self._register(operands[1]).reshape(-1, LANES)
        result = {"any": truth.any, "all": truth.all}[parts[2]](axis=1)
        self._put(operands[0], np.repeat(result, LANES), mask)

    def _mma(self, parts, operands, mask):
        self._whole_warps(mask)
        a, b, c = ([self._value(x, 32) for x in names] for names in operands[1:])
        for name, value in zip(operands[0], matrices.mma(a, b, c, parts), strict=True):
            self._put(name, value, mask)

    def _ldmatrix(self, parts, operands, mask):
        warps = self._whole_warps(mask)
        count = int(parts[4][1:])
        chosen = self._chosen(mask)
        addresses = matrices.row_addresses(self._address(operands[1], 32)[chosen], count)
        readers = matrices.row_addresses(chosen, count)
        rows = self.shared.read(addresses, 16, readers, "ldmatrix", whole_warps=True)
        values = matrices.ldmatrix(rows, count, "trans" in parts)
        for name, value in zip(operands[0], values, strict=True):
            whole = np.zeros(self.count, np.uint32)
            whole.reshape(-1, LANES)[warps] = value.reshape(-1, LANES)
            self._put(name, whole, mask)
