"""Memory as kernels see it: typed pointers, and offsets in elements."""

from __future__ import annotations

import functools

from llvmlite import ir
from numba.core import cgutils, types
from numba.core.datamodel import PrimitiveModel, register_default
from numba.extending import intrinsic

from ..machine import NEON, VectorUnit
from .registers import (
    I32,
    I64,
    NUMBA,
    STORED,
    from_storage,
    prefetch_line,
    row_offset,
    to_storage,
)


@intrinsic
def at(typingctx, pointer, index):
    """pointer + index elements."""
    return pointer(pointer, types.int64), lambda c, b, s, args: b.gep(args[0], [args[1]])


@intrinsic
def address(typingctx, pointer):
    """A pointer as an address (int64)."""
    return types.int64(pointer), lambda c, b, s, args: b.ptrtoint(args[0], I64)


@intrinsic
def row_at(typingctx, pointer, rows, n):
    """Where row n lies. `rows` is the distance of two, in elements, or the address of the offsets
    of each.
    """

    def codegen(context, builder, sig, args):
        return builder.gep(args[0], [row_offset(builder, args[1], args[2])])

    return pointer(pointer, rows, types.int64), codegen


@intrinsic
def rows_from(typingctx, pointer, rows, n):
    """(pointer, rows) of the rows from n on."""
    pair = types.Tuple((pointer, types.unliteral(rows)))

    def codegen(context, builder, sig, args):
        start, step, first = args
        if isinstance(step.type, ir.PointerType):
            step = builder.gep(step, [first])
        else:
            start = builder.gep(start, [row_offset(builder, step, first)])
        return context.make_tuple(builder, pair, (start, step))

    return pair(pointer, rows, types.int64), codegen


@intrinsic
def rows_follow(typingctx, rows, width):
    """Whether rows of `width` elements lie one behind the other; never where a table says."""

    def codegen(context, builder, sig, args):
        if isinstance(args[0].type, ir.PointerType):
            return ir.Constant(ir.IntType(1), 0)
        return builder.icmp_signed("==", *args)

    return types.boolean(types.unliteral(rows), types.int64), codegen


class Storage(types.Opaque):
    """A float type that memory may hold but Numba's CPU target cannot compute with."""


@register_default(Storage)
class StorageModel(PrimitiveModel):
    def __init__(self, manager, storage):
        super().__init__(manager, storage, STORED[storage.name])


@functools.cache
def pointer_to(dtype: str):
    """Intrinsic: an address (int64) as a pointer to dtype."""
    halves = {name: Storage(name) for name in ("float16", "bfloat16")}
    element = {"bool": types.uint8, **halves}.get(dtype)
    pointer = types.CPointer(element or getattr(types, dtype))

    @intrinsic
    def cast(typingctx, address):
        return pointer(types.int64), lambda c, b, s, args: b.inttoptr(
            args[0], c.get_value_type(pointer)
        )

    return cast


def _prefetch(level: int):
    """Intrinsic: ask for the line of pointer[index]: see registers.prefetch_line()."""

    @intrinsic
    def prefetch(typingctx, pointer, index):
        def codegen(context, builder, sig, args):
            prefetch_line(builder, *args, level)
            return context.get_dummy_value()

        return types.void(pointer, types.int64), codegen

    return prefetch


prefetch, prefetch_near = _prefetch(2), _prefetch(1)


@intrinsic
def fetch_add(typingctx, pointer, value):
    """Add to *pointer atomically, after all that this thread wrote; return what it held before."""

    def codegen(context, builder, sig, args):
        return builder.atomic_rmw("add", args[0], args[1], "acq_rel")

    return types.int64(types.CPointer(types.int64), types.int64), codegen


@intrinsic
def load_acquire(typingctx, pointer):
    """*pointer, and with it all that was written before store_release() wrote it."""

    def codegen(context, builder, sig, args):
        return builder.load_atomic(args[0], "acquire", 8)

    return types.int64(types.CPointer(types.int64)), codegen


@intrinsic
def store_release(typingctx, pointer, value):
    """*pointer = value, after all that this thread wrote before."""

    def codegen(context, builder, sig, args):
        builder.store_atomic(args[1], args[0], "release", 8)
        return context.get_dummy_value()

    return types.void(types.CPointer(types.int64), types.int64), codegen


@intrinsic
def swap(typingctx, pointer, old, new):
    """Let *pointer be `new` if it is `old`, atomically; return whether it was."""

    def codegen(context, builder, sig, args):
        found = builder.cmpxchg(*args, "acq_rel", "acquire")
        return builder.extract_value(found, 1)

    return types.boolean(types.CPointer(types.int64), types.int64, types.int64), codegen


@functools.cache
def pause(unit: VectorUnit):
    """Intrinsic: tell the processor that this thread waits in a loop, so that another on the same
    core gets its share. On Arm `isb`, which takes as long as x86's `pause`; `yield` takes no time.
    """
    name, numbers = ("llvm.aarch64.isb", [15]) if unit == NEON else ("llvm.x86.sse2.pause", [])

    @intrinsic
    def wait(typingctx):
        def codegen(context, builder, sig, args):
            values = [ir.Constant(I32, n) for n in numbers]
            kind = ir.FunctionType(ir.VoidType(), [I32] * len(values))
            builder.call(cgutils.get_or_insert_function(builder.module, kind, name), values)
            return context.get_dummy_value()

        return types.void(), codegen

    return wait


@functools.cache
def element_loader(storage: str, dtype: str):
    """Intrinsic: pointer[index], stored as one float type, as another."""

    @intrinsic
    def load(typingctx, pointer, index):
        def codegen(context, builder, sig, args):
            value = builder.load(builder.gep(args[0], [args[1]]))
            return from_storage(builder, value, storage, dtype)

        return NUMBA[dtype](pointer, types.int64), codegen

    return load


@functools.cache
def element_storer(storage: str, dtype: str):
    """Intrinsic: pointer[index] = value, rounded to what memory holds."""

    @intrinsic
    def store(typingctx, pointer, index, value):
        def codegen(context, builder, sig, args):
            place = builder.gep(args[0], [args[1]])
            builder.store(to_storage(builder, args[2], storage), place)
            return context.get_dummy_value()

        return types.void(pointer, types.int64, NUMBA[dtype]), codegen

    return store
