"""A share of a job as the body of a parallel region, which threads of another library run.

They know nothing of Python and call body(data). A kernel is such a body if it reads nothing but its
first argument: that says where its result goes, and is `data` there.
"""

from __future__ import annotations

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from ..machine import VectorUnit
from .job import BODY_FIELDS
from .registers import I32, I64


def call_kernel(builder, entry, job, scratch, quota):
    """Call the kernel at an address (image.ENTRY); return its status."""
    answer, error = (cgutils.alloca_once(builder, I64) for _ in range(2))
    kind = ir.FunctionType(I32, (answer.type, error.type, I64, I64, I64)).as_pointer()
    return builder.call(builder.inttoptr(entry, kind), (answer, error, job, scratch, quota))


@intrinsic
def _do_share(typingctx):
    """Run the kernel that the data name, in this thread's part of the scratch."""

    def codegen(context, builder, sig, args):
        data = builder.function.args[0]  # where the result of a kernel goes, an int64

        def place(name):
            return builder.gep(data, [ir.Constant(I64, BODY_FIELDS.index(name))])

        kind = ir.FunctionType(I32, ()).as_pointer()
        thread_number = builder.inttoptr(builder.load(place("thread_number")), kind)
        number = builder.zext(builder.call(thread_number, ()), I64)
        part = builder.mul(number, builder.load(place("scratch_stride")))
        scratch = builder.add(builder.load(place("scratch")), part)
        job, quota = (builder.load(place(name)) for name in ("job", "quota"))
        status = call_kernel(builder, builder.load(place("kernel")), job, scratch, quota)
        with builder.if_then(builder.icmp_signed("!=", status, ir.Constant(I32, 0))):
            builder.store(builder.sext(status, I64), place("status"))
        return ir.Constant(I64, 0)

    return types.int64(), codegen


def body_kernel(unit: VectorUnit):
    """Return the kernel: body(data), data int64s in the order of BODY_FIELDS."""

    def kernel(job, scratch, quota):
        return _do_share()

    return kernel
