"""Kernel -> object code -> cache -> callable. Only this file and translation.py know Numba's and
llvmlite's interfaces as a compiler.

Numba translates a kernel to LLVM IR and is then out of the way: a process that finds the object
code in the cache never imports it. Every kernel has one C signature, `int64 kernel(void *job, void
*scratch, int64 quota)`.
"""

from __future__ import annotations

import functools
import importlib
import os
import threading
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..machine import TARGETS, VectorUnit, listed_features, runnable_targets, vector_unit
from . import cache, prebuilt
from .image import Kernel, call_at

# A helper of more lines of IR than this (as Numba writes them) stays a function. Copied into its
# callers, and those into theirs, the block and tile kernels would be compiled twice (3.0 -> 1.8 s);
# smaller ones are called for each row, where a call would show.
LARGE = 800
EXCEPTION = ".const.picklebuf."  # what Numba calls one that code may raise
UNITS = "AVX2 with FMA, AVX-512 or NEON registers"


@dataclass(frozen=True)
class Target:
    """A machine to compile for, in LLVM's words."""

    triple: str
    cpu: str
    features: str  # "+avx2,-avx512f,...", or "" for what the cpu implies

    @property
    def unit(self) -> VectorUnit | None:
        """Its vector registers; None if it has none that kernels can use."""
        architecture = self.triple.partition("-")[0]
        if self.features:
            words = self.features.split(",")
            has = frozenset(word[1:] for word in words if word[0] == "+")
        else:
            arm = architecture in ("aarch64", "arm64")
            has = TARGETS["aarch64"] if arm else TARGETS.get(self.cpu, frozenset())
        return vector_unit(architecture, has)


@functools.cache
def _llvm() -> Any:
    import llvmlite.binding as llvm

    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    return llvm


@functools.cache
def host_target() -> Target:
    """The best named target that runs here, or the lesser one that FASTATTN_TARGET names (for
    caches shared by unlike machines); this very processor only if no name fits it.

    For the name and not the processor: LLVM unrolls for some what runs slower and compiles longer
    (AMD Zen 4, one query over grouped heads: 1.02 ms, for x86-64-v4: 0.78 ms).
    """
    features = _host_features()
    able = runnable_targets(features)
    name = os.environ.get("FASTATTN_TARGET") or (able[-1] if able else "")
    if not name:
        llvm = _llvm()
        words = llvm.get_host_cpu_features().flatten()
        return Target(llvm.get_process_triple(), llvm.get_host_cpu_name(), words)
    if name not in TARGETS:
        raise ValueError(f"FASTATTN_TARGET must be one of {tuple(TARGETS)}, got {name!r}")
    if name not in able:
        missing = sorted(TARGETS[name] - features)
        raise ValueError(
            f"FASTATTN_TARGET must be a target that this CPU can run, got {name!r}: no {missing}"
        )
    return named_target(name)


def _host_features() -> frozenset[str]:
    """What the system grants its programs, or where it does not say, what LLVM finds."""
    llvm = _llvm()
    if llvm.get_process_triple().startswith(("aarch64", "arm64")):
        return TARGETS["aarch64"]  # there is none without; LLVM finds nothing on Apple's
    found = frozenset(name for name, has in llvm.get_host_cpu_features().items() if has)
    return listed_features() or found


def named_target(name: str) -> Target:
    """The target of a name in TARGETS, under this operating system; it need not be this machine.

    Raises
    ------
    ValueError  there is no such name
    """
    if name not in TARGETS:
        raise ValueError(f"target must be one of {tuple(TARGETS)}, got {name!r}")
    system = _llvm().get_process_triple().partition("-")[2]
    if name == "aarch64":
        # LLVM's code for this core runs on all: AES and CRC, its only extensions, are of no use to
        # kernels. For others, it uses the stack in the tile's loop: generic twice, Neoverse N1 10
        # times, Apple M1 8, Cortex-A53 29. LLVM 15 (Numba 0.61) does so for this one, 19 times, and
        # not for Exynos M3, for which LLVM 20 makes kernels of 1.2 times the size.
        core = "cortex-a72" if _llvm().llvm_version_info >= (20,) else "exynos-m3"
        return Target(f"aarch64-{system}", core, "")
    return Target(f"x86_64-{system}", name, "")


def unavailable(key: Hashable) -> str:
    """Why this kernel cannot be had here, in one line; "" if it can. Imports Numba only if it must
    compile.
    """
    if prebuilt.load(key):
        return ""
    problem = _import_problem("llvmlite.binding", "llvmlite")
    if problem:
        return problem
    target = host_target()
    if target.unit is None:
        return f"CPU {target.cpu!r} has no {UNITS}"
    if key in _loaded or cache.find(key, target) is not None:
        return ""
    # Numba and all its parts that translation needs, some of which another version may not have.
    return _import_problem(f"{__package__}.translation", "numba")


def not_kept(key: Hashable) -> str:
    """Why every process compiles this kernel anew, in one line; "" if it need not."""
    return "" if prebuilt.load(key) else cache.folder_or_reason()[1]


@functools.cache
def _import_problem(module: str, package: str) -> str:
    """Why a module, which needs this package, cannot be imported, in one line; "" if it can."""
    try:
        importlib.import_module(module)
    except Exception as error:  # one that does not fit this NumPy or Python raises many things
        if isinstance(error, ModuleNotFoundError) and error.name == package:
            return f"{package} is not installed: pip install numba"
        return f"{package} cannot be imported: {type(error).__name__}: {error}".splitlines()[0]
    return ""


_loaded: dict[Hashable, Kernel] = {}
_lock = threading.RLock()
if hasattr(os, "register_at_fork"):
    # A child forked amid another thread's compilation would wait for it for ever. Its parent waits.
    os.register_at_fork(
        before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release
    )


def kernel(key: Hashable, build: Callable[[VectorUnit], Callable]) -> Kernel:
    """The compiled kernel of this key: from this process, from the package, from the cache, or from
    build(unit) through Numba.

    key   names the kernel and every constant that build() closes over; its repr must be stable
    build returns the Python function, written for Numba; called only if nothing is cached
    """
    found = _loaded.get(key)
    if found is not None:
        return found
    with _lock:
        if key not in _loaded:
            _loaded[key] = prebuilt.load(key) or _cached_or_compiled(key, build)
        return _loaded[key]


def _cached_or_compiled(key: Hashable, build: Callable[[VectorUnit], Callable]) -> Kernel:
    target = host_target()
    entry = cache.find(key, target)
    if entry is None:
        entry = compile_object(build(vector_unit_of(target)), target)
        cache.keep(key, target, *entry)
    return _load(*entry, str(key))


def store(
    key: Hashable, build: Callable[[VectorUnit], Callable], target: Target, folder: Path
) -> Path:
    """Compile a kernel for a target into a folder that will be its cache; return the file.

    A file that is there already stays. The other machine needs the same fastattn, Numba and Python,
    and the target's name as FASTATTN_TARGET.

    Raises
    ------
    OSError  the file cannot be written
    """
    path = cache.entry_path(folder, key, target)
    if cache.read_entry(path) is None:
        cache.write_entry(path, *compile_object(build(vector_unit_of(target)), target))
    return path


def host_unit() -> VectorUnit:
    """The vector registers that kernels use here. Needs no LLVM where the system lists them."""
    name = prebuilt.host_name()
    unit = vector_unit(name, TARGETS[name]) if name else None
    return unit or vector_unit_of(host_target())


def vector_unit_of(target: Target) -> VectorUnit:
    """The target's vector registers, which it must have."""
    if target.unit is None:
        raise ImportError(f"CPU {target.cpu!r} has no {UNITS}")
    return target.unit


def translate(function: Callable) -> tuple[list[str], str]:
    """(LLVM IR of a kernel and of each helper, entry name), by Numba.

    Raises
    ------
    NotImplementedError  this Numba cannot: translation uses parts that another may not have
    """
    from numba import __version__ as numba

    from .translation import translate

    try:
        return translate(function)
    except MemoryError:
        raise
    except Exception as error:  # from Numba's inside, of any kind
        raise NotImplementedError(
            f"numba must translate kernel {function.__name__}, got {type(error).__name__} from "
            f"numba {numba}: backend='numpy' needs none, and another numba may do. {error}"
        ) from error


def compile_object(function: Callable, target: Target) -> tuple[str, bytes]:
    """(entry name, object code) of a kernel for a target, which need not be this machine."""
    texts, entry = translate(function)
    machine, module = optimise(texts, entry, target)
    needed = sorted(
        f.name for f in module.functions if f.is_declaration and not f.name.startswith("llvm.")
    )
    if needed:
        raise RuntimeError(f"kernel {function.__name__} needs symbols from outside: {needed}")
    if any(variable.name.startswith(EXCEPTION) for variable in module.global_variables):
        raise RuntimeError(
            f"kernel {function.__name__} can raise an exception, which nobody would see: has a "
            "range() a step that is no constant?"
        )
    return entry, machine.emit_object(module)


def _memset() -> str:
    """IR of the function that LLVM calls where a loop stores one value: kernels bring their own, so
    that they need nothing from outside.
    """
    from llvmlite import ir

    byte, integer = ir.IntType(8), ir.IntType(64)
    module = ir.Module()
    signature = ir.FunctionType(byte.as_pointer(), (byte.as_pointer(), ir.IntType(32), integer))
    function = ir.Function(module, signature, "memset")
    to, value, count = function.args
    start, loop, end = map(function.append_basic_block, ("start", "loop", "end"))
    builder = ir.IRBuilder(start)
    value = builder.trunc(value, byte)
    builder.cbranch(builder.icmp_unsigned("==", count, integer(0)), end, loop)
    builder.position_at_end(loop)
    i = builder.phi(integer)
    builder.store(value, builder.gep(to, [i], inbounds=True))
    after = builder.add(i, integer(1))
    i.add_incoming(integer(0), start)
    i.add_incoming(after, loop)
    builder.cbranch(builder.icmp_unsigned("<", after, count), loop, end)
    builder.position_at_end(end)
    builder.ret(to)
    return str(module)


def optimise(texts: list[str], entry: str, target: Target) -> tuple[Any, Any]:
    """(target machine, optimised module) with all but the entry internal."""
    llvm = _llvm()
    # The small code model, as _load() keeps code and constants together: an instruction can then
    # take a constant from memory, where the large one spends a register on its address (stack
    # accesses of the softmax loop on AVX2, float32: 8 -> 3, float64: 23 -> 3).
    machine = llvm.Target.from_triple(target.triple).create_target_machine(
        cpu=target.cpu, features=target.features, opt=3, reloc="pic", codemodel="small"
    )
    module = llvm.parse_assembly("")
    for text in texts:
        part = llvm.parse_assembly(text)
        if text.count("\n") > LARGE:
            for function in part.functions:
                if not function.is_declaration:
                    function.add_function_attribute("noinline")
        module.link_in(part)
    for function in module.functions:
        if not function.is_declaration and function.name != entry:
            function.linkage = "internal"
    _run_passes(module, machine)
    if any(function.name.startswith("llvm.memset.") for function in module.functions):
        memset = llvm.parse_assembly(_memset())
        _run_passes(memset, machine)
        module.link_in(memset)
    return machine, module


def _run_passes(module: Any, machine: Any) -> None:
    llvm = _llvm()
    # -O3 makes no faster code (0.99 to 1.03 of the time) and takes 0.14 s more, of 2.7 s for the
    # forward kernel; -O1 takes 0.14 s less, for decoding at 1.01 to 1.07 and tiny calls at 1.02.
    options = llvm.create_pipeline_tuning_options(speed_level=2)
    options.loop_unrolling = False  # code of 0.8 times the size, as fast; a cold call 0.6 s sooner
    builder = llvm.create_pass_builder(machine, options)
    builder.getModulePassManager().run(module, builder)


def assembly(function: Callable, target: Target) -> str:
    """Assembly text of a kernel for a target: what tests look at."""
    machine, module = optimise(*translate(function), target)
    return machine.emit_assembly(module)


def _load(entry: str, code: bytes, name: str) -> Kernel:
    llvm = _llvm()
    machine = llvm.Target.from_triple(llvm.get_process_triple()).create_target_machine(jit=True)
    # llvmlite's memory manager puts all sections into one block, as the small code model needs.
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine, use_lmm=True)
    engine.add_object_file(llvm.ObjectFileRef.from_data(code))
    engine.finalize_object()
    return call_at(engine.get_function_address(entry), name, engine)
