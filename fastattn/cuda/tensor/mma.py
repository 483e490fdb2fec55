"""The instructions that kernels are made of, for one thread: tensor cores, shared memory, copies.

Every value is an LLVM value and never memory, so a tile of any size stays in registers: NVVM has
nothing to promote, and Numba's type inference sees a few dozen calls instead of thousands of
statements (1 s for a kernel). What no LLVM instruction expresses is inline PTX.
"""

from __future__ import annotations

from llvmlite import ir

I1, I16, I32, I64 = (ir.IntType(bits) for bits in (1, 16, 32, 64))
F32, F64 = ir.FloatType(), ir.DoubleType()
VOID = ir.VoidType()
PTX_TYPE = {"float16": "f16", "bfloat16": "bf16", "float32": "tf32"}
ALL_LANES = -1
LARGEST, INF = 3.4028234663852886e38, float("inf")  # of float32
MEMORY = "~{memory}"  # nothing may move across: loads and stores here are all inline PTX


class Emitter:
    """Emits instructions; int operands of its methods are constants."""

    def __init__(self, builder, storage: str, context=None):
        """storage: "float16" or "bfloat16", which tensor cores multiply, or "float32", of which
        they multiply what is left in 19 bits: tf32.
        """
        self.b, self.storage, self._context = builder, PTX_TYPE[storage], context

    def call(self, function, signature, arguments):
        """A plain function of scalars, translated by Numba and made a part of the kernel."""
        return self._context.compile_internal(self.b, function, signature, arguments)

    def asm(self, text: str, constraints: str, returns: list, arguments: list, keep: bool = False):
        """Inline PTX: None, one value or a list. keep: it does more than compute its result."""
        kind = VOID if not returns else returns[0]
        if len(returns) > 1:
            kind = ir.LiteralStructType(returns)
        function = ir.FunctionType(kind, [a.type for a in arguments])
        result = self.b.call(ir.InlineAsm(function, text, constraints, side_effect=keep), arguments)
        if len(returns) > 1:
            return [self.b.extract_value(result, i) for i in range(len(returns))]
        return result if returns else None

    def _known(self, name: str, result, *arguments):
        """Call a function of libNVVM."""
        module = self.b.module
        function = module.globals.get(name)
        if function is None:
            kind = ir.FunctionType(result, [a.type for a in arguments])
            function = ir.Function(module, kind, name)
        return self.b.call(function, arguments)

    # Integers

    def i32(self, value):
        return ir.Constant(I32, value) if isinstance(value, int) else value

    def i64(self, value):
        """A constant, or an unsigned 32-bit value made wider."""
        if isinstance(value, int):
            return ir.Constant(I64, value)
        return self.b.zext(value, I64) if value.type == I32 else value

    def add(self, x, y):
        return x if isinstance(y, int) and y == 0 else self.b.add(x, self._like(x, y))

    def sub(self, x, y):
        return self.b.sub(x, self._like(x, y))

    def mul(self, x, y):
        return self.b.mul(x, self._like(x, y))

    def both(self, x, y):
        return self.b.and_(x, self._like(x, y))

    def xor(self, x, y):
        return x if isinstance(y, int) and y == 0 else self.b.xor(x, self._like(x, y))

    def shl(self, x, bits: int):
        return self.b.shl(x, self._like(x, bits)) if bits else x

    def shr(self, x, bits: int):
        """Unsigned."""
        return self.b.lshr(x, self._like(x, bits)) if bits else x

    def less(self, x, y):
        """Signed; x may be a constant where y is none."""
        return self.b.icmp_signed("<", self._like(y, x), self._like(x, y))

    def smaller(self, x, y):
        return self.b.select(self.less(x, y), self._like(y, x), self._like(x, y))

    def larger(self, x, y):
        return self.b.select(self.less(x, y), self._like(x, y), self._like(y, x))

    def chunk_start(self, place, chunk):
        """The multiple of chunk at or below a place, which may be negative."""
        inside = self.b.srem(place, chunk)
        before = self.less(inside, self.i32(0))
        return self.sub(place, self.b.select(before, self.add(inside, chunk), inside))

    def _like(self, x, y):
        return ir.Constant(x.type, y) if isinstance(y, int) and not isinstance(x, int) else y

    def thread(self):
        """The thread's place in its block."""
        return self._known("llvm.nvvm.read.ptx.sreg.tid.x", I32)

    def lane(self):
        return self.both(self.thread(), 31)

    def warp(self):
        return self.shr(self.thread(), 5)

    # Floats

    def finite_in(self, x, factor: float):
        """x * factor; what is finite stays so, and what is not stays as it is."""
        limit = self.f32(LARGEST)
        y = self.b.fmul(x, self.f32(factor))
        y = self.fmax(self.fmin(y, limit), self.negative(limit))
        return self.b.select(self.b.fcmp_ordered("<", self.absolute(x), self.f32(INF)), y, x)

    def narrowed(self, x):
        """float64 -> float32; what is finite stays so."""
        limit = self.f64(LARGEST)
        y = self._known("llvm.minnum.f64", F64, x, limit)
        y = self._known("llvm.maxnum.f64", F64, y, self.f64(-LARGEST))
        size = self.asm("abs.f64 $0, $1;", "=d,d", [F64], [x])
        finite = self.b.fcmp_ordered("<", size, self.f64(INF))
        return self.b.fptrunc(self.b.select(finite, y, x), F32)

    def truth(self, x):
        """Numba's booleans in memory are bytes."""
        return x if x.type == I1 else self.b.trunc(x, I1)

    def absolute(self, x):
        return self.asm("abs.f32 $0, $1;", "=f,f", [F32], [x])

    def f32(self, value: float):
        return ir.Constant(F32, float(value))

    def f64(self, value: float):
        return ir.Constant(F64, float(value))

    def fmin(self, x, y):
        """The smaller; the other one where one is NaN."""
        return self._known("llvm.minnum.f32", F32, x, y)

    def fmax(self, x, y):
        """The larger; the other one where one is NaN."""
        return self._known("llvm.maxnum.f32", F32, x, y)

    def fma(self, x, y, z):
        return self.b.fma(x, y, z)

    def negative(self, x):
        return self.b.fsub(self.f32(-0.0), x)  # the LLVM 7 of libNVVM has no fneg

    def exp2(self, x):
        return self.asm("ex2.approx.ftz.f32 $0, $1;", "=f,f", [F32], [x])

    def log2(self, x):
        return self.asm("lg2.approx.ftz.f32 $0, $1;", "=f,f", [F32], [x])

    def inverse(self, x):
        return self.asm("rcp.approx.ftz.f32 $0, $1;", "=f,f", [F32], [x])

    def pack(self, low, high):
        """Two floats -> one register of two storage elements, low in bits 0 to 15."""
        text = f"cvt.rn.{self.storage}x2.f32 $0, $1, $2;"
        return self.asm(text, "=r,f,f", [I32], [high, low])

    def rounded(self, registers: list):
        """Storage elements as factors of mma: float32 to the nearest tf32, others as they are."""
        if self.storage != "tf32":
            return registers
        # mma itself would cut the last 13 bits off, and err twice as much, to one side.
        text, constraints = "cvt.rna.tf32.f32 $0, $1;", "=r,f"
        return [self.asm(text, constraints, [I32], [self.as_float(x)]) for x in registers]

    def as_float(self, x):
        """A register's bits as a float."""
        return x if x.type == F32 else self.b.bitcast(x, F32)

    def stored(self, values: list):
        """Floats -> registers of storage elements, the first ones in the lowest bits."""
        if self.storage == "tf32":
            return [self.b.bitcast(x, I32) for x in values]
        return [self.pack(*pair) for pair in zip(values[::2], values[1::2], strict=True)]

    def times(self, factor):
        """A function: a register of storage elements, each times the float `factor`."""
        if self.storage == "tf32":
            return lambda x: self.b.fmul(self.as_float(x), factor)
        # bfloat16 has no mul before sm_90; -0.0 added leaves every product as it is.
        text = f"{{ .reg .b32 z; mov.b32 z, 0x80008000; fma.rn.{self.storage}x2 $0, $1, $2, z; }}"
        pair = self.pack(factor, factor)
        return lambda x: self.asm(text, "=r,r,r", [I32], [x, pair])

    def lane_xor(self, x, mask: int):
        """x of the lane whose number differs in these bits."""
        text = f"shfl.sync.bfly.b32 $0, $1, {mask}, 31, {ALL_LANES};"
        return self.asm(text, "=f,f", [F32], [x], True)

    def any_lane(self, truth):
        """Whether it is true in any lane of the warp."""
        text = (
            "{ .reg .pred p, q; setp.ne.u32 p, $1, 0; "
            f"vote.sync.any.pred q, p, {ALL_LANES}; selp.u32 $0, 1, 0, q; }}"
        )
        result = self.asm(text, "=r,r", [I32], [self.b.zext(truth, I32)], True)
        return self.b.icmp_unsigned("!=", result, self.i32(0))

    def any_thread(self, truth):
        """The same of the whole block; a barrier."""
        text = (
            "{ .reg .pred p, q; setp.ne.u32 p, $1, 0; bar.red.or.pred q, 0, p; "
            "selp.u32 $0, 1, 0, q; }"
        )
        result = self.asm(text, f"=r,r,{MEMORY}", [I32], [self.b.zext(truth, I32)], True)
        return self.b.icmp_unsigned("!=", result, self.i32(0))

    # Tensor cores

    def mma(self, a, b, c):
        """16 x 8 floats: c + a @ b, a of 16 x 16 (4 registers), b of 16 x 8 (2), c of 4 floats. Of
        tf32, a is 16 x 8 and b 8 x 8.
        """
        depth = 8 if self.storage == "tf32" else 16
        text = (
            f"mma.sync.aligned.m16n8k{depth}.row.col.f32.{self.storage}.{self.storage}.f32 "
            "{$0,$1,$2,$3},{$4,$5,$6,$7},{$8,$9},{$10,$11,$12,$13};"
        )
        return self.asm(text, "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f", [F32] * 4, [*a, *b, *c])

    def load_matrices(self, address, place: int = 0, transposed: bool = False):
        """Four 8 x 8 matrices of storage elements; lane 8 i + r holds the address of row r of the
        i-th.
        """
        how = ".trans" if transposed else ""
        text = f"ldmatrix.sync.aligned.m8n8.x4{how}.shared.b16 {{$0,$1,$2,$3}}, [$4+{place}];"
        return self.asm(text, f"=r,=r,=r,=r,r,{MEMORY}", [I32] * 4, [address], True)

    # Copies and memory

    def copy_16(self, shared, place: int, address, source_place: int = 0, nbytes=None):
        """16 bytes of global memory to shared memory, at some time before a wait; those beyond the
        first nbytes (0 to 16) are 0, and not read.
        """
        size = ", $2" if nbytes is not None else ""
        text = f"cp.async.cg.shared.global [$0+{place}], [$1+{source_place}], 16{size};"
        arguments = [shared, address] + ([nbytes] if nbytes is not None else [])
        self.asm(text, f"r,l,{'r,' if size else ''}{MEMORY}", [], arguments, True)

    def commit(self):
        """All copies since the last one are a group."""
        self.asm("cp.async.commit_group;", MEMORY, [], [], True)

    def wait(self, groups: int):
        """Until all but the last `groups` groups of this thread have arrived."""
        self.asm(f"cp.async.wait_group {groups};", MEMORY, [], [], True)

    def barrier(self):
        self.asm("bar.sync 0;", MEMORY, [], [], True)

    def warp_barrier(self):
        self.asm(f"bar.warp.sync {ALL_LANES};", MEMORY, [], [], True)

    def shared_base(self):
        """Address of the dynamic shared memory, a multiple of 1024."""
        name = "fastattn_shared"
        memory = self.b.module.globals.get(name)
        if memory is None:
            kind = ir.ArrayType(ir.IntType(8), 0)
            memory = ir.GlobalVariable(self.b.module, kind, name, addrspace=3)
            memory.linkage, memory.align = "external", 1024
        return self.b.ptrtoint(memory, I32)

    def store_shared(self, address, place: int, values):
        """Registers of 32 bits, one or four."""
        kind, names = ("b32", "$1") if len(values) == 1 else ("v4.b32", "{$1,$2,$3,$4}")
        text = f"st.shared.{kind} [$0+{place}], {names};"
        constraints = ",".join(["r"] * (1 + len(values)) + [MEMORY])
        self.asm(text, constraints, [], [address, *values], True)

    def load_shared_16(self, address, place: int = 0):
        """Four registers."""
        text = f"ld.shared.v4.b32 {{$0,$1,$2,$3}}, [$4+{place}];"
        return self.asm(text, f"=r,=r,=r,=r,r,{MEMORY}", [I32] * 4, [address], True)

    def load_global(self, kind: str, address, wanted=None):
        """A number, 0 where it is not wanted. kind: "f32", "f64", "b64", "b32", "b16" or "u8"."""
        register, returns = LOADS[kind]
        zero = "0f00000000" if kind == "f32" else "0d0000000000000000" if kind == "f64" else "0"
        move = "b64" if register in "dl" else "b16" if register == "h" else "b32"
        move = kind if kind in ("f32", "f64") else move
        if wanted is None:
            text = f"ld.global.{kind} $0, [$1];"
            return self.asm(text, f"={register},l,{MEMORY}", [returns], [address], True)
        text = (
            f"{{ .reg .pred p; setp.ne.u32 p, $2, 0; mov.{move} $0, {zero}; "
            f"@p ld.global.{kind} $0, [$1]; }}"
        )
        wanted = self.b.zext(wanted, I32)
        return self.asm(text, f"=&{register},l,r,{MEMORY}", [returns], [address, wanted], True)

    def store_global(self, kind: str, address, values, wanted):
        """kind: "f32", "b16", "b32" or "v4.b32" of four registers."""
        constraint = {"f32": "f", "b16": "h", "b32": "r", "v4.b32": "r", "v2.f32": "f"}[kind]
        names = ",".join(f"${i + 2}" for i in range(len(values)))
        names = f"{{{names}}}" if len(values) > 1 else names
        text = f"{{ .reg .pred p; setp.ne.u32 p, $1, 0; @p st.global.{kind} [$0], {names}; }}"
        constraints = ",".join(["l", "r", *[constraint] * len(values), MEMORY])
        self.asm(text, constraints, [], [address, self.b.zext(wanted, I32), *values], True)


LOADS = {
    "f32": ("f", F32),
    "f64": ("d", F64),
    "b64": ("l", I64),
    "b32": ("r", I32),
    "b16": ("h", I16),
    "u8": ("r", I32),
}
