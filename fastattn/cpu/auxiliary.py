"""The aux arrays of a modifier, read from inside a kernel: scalars, vector loads and gathers.

An index outside its array reads the nearest element, so nothing outside is ever touched.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from llvmlite import ir

from ..modifier import AuxTypes
from .registers import FLOAT, I32, I64, broadcast, constant, load_vector

STORAGE = {
    "bool": ir.IntType(8),
    "int32": I32,
    "int64": I64,
    "float32": FLOAT["float32"],
    "float64": FLOAT["float64"],
}
INT32_MAX = 2**31 - 1


class Value(NamedTuple):
    """A scalar; a register; or a run: the integers ir, ir + step, ... of the lanes."""

    form: str  # "scalar", "register" or "run"
    ir: Any
    step: int = 0


def same(value, number):
    """The number as a constant of an LLVM value's type."""
    if isinstance(value.type, ir.VectorType):
        return constant(value.type, number)
    return ir.Constant(value.type, number)


def as_register(builder, value: Value, lanes: int, wide: bool = False):
    """LLVM value: any Value as a register; integers with 32 bits, or 64 if wide.

    What does not fit becomes the nearest integer that does: comparisons with indices stay right.
    """
    if value.form == "register":
        narrow = ir.VectorType(I32, lanes)
        extend = wide and value.ir.type == narrow
        return builder.sext(value.ir, ir.VectorType(I64, lanes)) if extend else value.ir
    element = I64 if wide else I32
    if value.form == "scalar":
        scalar = value.ir
        if scalar.type == I64 and not wide:
            bounds = same(scalar, -INT32_MAX - 1), same(scalar, INT32_MAX)
            scalar = builder.trunc(_between(builder, scalar, *bounds), I32)
        return broadcast(builder, scalar, lanes)
    first = value.ir
    if not wide:
        bounds = same(first, lanes - INT32_MAX), same(first, INT32_MAX - lanes)
        first = builder.trunc(_between(builder, first, *bounds), I32)
    steps = ir.Constant(ir.VectorType(element, lanes), [value.step * n for n in range(lanes)])
    return builder.add(broadcast(builder, first, lanes), steps)


class AuxReader:
    """Emits loads from the arrays of job.aux_table()."""

    def __init__(self, builder, address, aux_types: AuxTypes, lanes: int):
        self.builder, self.address, self.types, self.lanes = builder, address, aux_types, lanes

    def element(self, slot: int, indices: list[Value]) -> Value:
        """aux[slot][indices], as stored: scalar if all indices are, else a register."""
        builder = self.builder
        dtype, rank = self.types[slot]
        start = sum(1 + 2 * r for _, r in self.types[:slot])
        pointer = builder.inttoptr(self._field(start), STORAGE[dtype].as_pointer())
        varying = []
        for axis, index in enumerate(indices):
            size, stride = self._field(start + 1 + axis), self._field(start + 1 + rank + axis)
            if index.form == "scalar":
                place = builder.mul(_inside(builder, index.ir, size), stride)
                pointer = builder.gep(pointer, [place])
            else:
                varying.append((index, size, stride))
        if not varying:
            return Value("scalar", _invariant(builder.load(pointer)))
        if len(varying) == 1 and varying[0][0].form == "run":
            return Value("register", self._load_run(pointer, *varying[0]))
        return Value("register", self._gather(pointer, varying))

    def _field(self, index: int):
        table = self.builder.inttoptr(self.address, I64.as_pointer())
        return _invariant(self.builder.load(self.builder.gep(table, [ir.Constant(I64, index)])))

    def _load_run(self, pointer, index: Value, size, stride):
        """A vector load where the run lies within the array and its elements side by side."""
        builder, last = self.builder, self.lanes - 1
        vector = ir.VectorType(pointer.type.pointee, self.lanes)
        first = index.ir if index.step == 1 else builder.sub(index.ir, same(index.ir, last))
        room = builder.sub(size, same(size, last))  # places that a run may start at
        fits = builder.icmp_signed(">", room, same(room, 0))
        contiguous = builder.icmp_signed("==", stride, same(stride, 1))
        room = builder.select(builder.and_(fits, contiguous), room, same(room, 0))
        inside = builder.icmp_unsigned("<", first, room)
        with builder.if_else(inside, likely=True) as (then, otherwise):
            with then:
                fast = _invariant(load_vector(builder, pointer, first, vector))
                if index.step == -1:
                    backwards = ir.Constant(
                        ir.VectorType(I32, self.lanes), list(range(last, -1, -1))
                    )
                    fast = builder.shuffle_vector(fast, fast, backwards)
                fast_block = builder.block
            with otherwise:
                edge_load = _edge_load(builder.module, vector, index.step)
                slow = builder.call(edge_load, [pointer, index.ir, size, stride])
                slow_block = builder.block
        value = builder.phi(vector)
        value.add_incoming(fast, fast_block)
        value.add_incoming(slow, slow_block)
        return value

    def _gather(self, pointer, varying: list[tuple]):
        """One load a lane."""
        builder = self.builder
        columns = []
        for index, size, stride in varying:
            lane = as_register(builder, index, self.lanes)
            last = Value("scalar", builder.sub(size, same(size, 1)))
            last = as_register(builder, last, self.lanes, lane.type.element == I64)
            columns.append((_between(builder, lane, same(lane, 0), last), stride))
        value = ir.Constant(ir.VectorType(pointer.type.pointee, self.lanes), ir.Undefined)
        for n in range(self.lanes):
            place = pointer
            for lane, stride in columns:
                at = builder.extract_element(lane, ir.Constant(I32, n))
                at = builder.sext(at, I64) if at.type == I32 else at
                place = builder.gep(place, [builder.mul(at, stride)])
            one = _invariant(builder.load(place))
            value = builder.insert_element(value, one, ir.Constant(I32, n))
        return value


def _invariant(load):
    """Mark a load of what no kernel writes, so that it may leave a loop that stores scores."""
    load.set_metadata("invariant.load", load.parent.module.add_metadata([]))
    return load


def _between(builder, value, low, high):
    """Integers brought into [low, high]; low where that is empty."""
    value = builder.select(builder.icmp_signed("<", value, high), value, high)
    return builder.select(builder.icmp_signed(">", value, low), value, low)


def _inside(builder, index, size):
    """A scalar index brought into [0, size)."""
    return _between(builder, index, same(index, 0), builder.sub(size, same(size, 1)))


def _edge_load(module, vector: ir.VectorType, step: int):
    """Function: `lanes` elements at start, start + step, ... of an array, those outside it being
    its nearest. Kept out of the loops that hardly ever need it.
    """
    name = f"fastattn.edge_load.{vector.element}x{vector.count}.{'down' if step < 0 else 'up'}"
    if name in module.globals:
        return module.globals[name]
    signature = ir.FunctionType(vector, [vector.element.as_pointer(), I64, I64, I64])
    function = ir.Function(module, signature, name)
    function.linkage = "internal"
    function.attributes.add("noinline")
    pointer, start, size, stride = function.args
    builder = ir.IRBuilder(function.append_basic_block("entry"))

    def element(lane: int):
        index = _inside(builder, builder.add(start, same(start, step * lane)), size)
        return index, _invariant(builder.load(builder.gep(pointer, [builder.mul(index, stride)])))

    # All outside on one side, as past the last distance of a table: one element for all lanes.
    first, one = element(0)
    last, _ = element(vector.count - 1)
    with builder.if_then(builder.icmp_signed("==", first, last)):
        builder.ret(broadcast(builder, one, vector.count))
    value = ir.Constant(vector, ir.Undefined)
    for lane in range(vector.count):
        value = builder.insert_element(value, element(lane)[1], ir.Constant(I32, lane))
    builder.ret(value)
    return function
