"""Kernel -> LLVM IR, by Numba, and no more of Numba than that takes.

Left to itself, Numba optimises every helper, links it into each of its callers, those into theirs,
and makes machine code of all. Here nobody calls a helper from outside a kernel, and the optimiser
sees everything once, at the end.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.util
from collections.abc import Callable, Iterator
from threading import get_ident
from typing import Any

from numba import njit, types
from numba.core import cgutils, typed_passes, untyped_passes
from numba.core.codegen import CodeLibrary
from numba.core.compiler import CompilerBase
from numba.core.compiler_lock import global_compiler_lock
from numba.core.compiler_machinery import PassManager
from numba.core.postproc import PostProcessor
from numba.core.registry import cpu_target
from numba.core.transforms import canonicalize_cfg
from numba.core.types import functions
from numba.np import linalg

from .lowering import KernelLowering

SIGNATURE = (types.voidptr, types.voidptr, types.int64)
# Numba's own, without those that look for what kernels have not: closures, object mode, literal
# loops, arrays, reference counts.
PASSES = (
    untyped_passes.TranslateByteCode,
    untyped_passes.FixupArgs,
    untyped_passes.IRProcessing,
    untyped_passes.RewriteSemanticConstants,
    untyped_passes.DeadBranchPrune,
    untyped_passes.GenericRewrites,
    untyped_passes.ReconstructSSA,
    untyped_passes.DeadBranchPrune,
    typed_passes.NopythonTypeInference,
    typed_passes.PreLowerStripPhis,
    typed_passes.AnnotateTypes,
    KernelLowering,
    typed_passes.NoPythonBackend,
)


class Parts(CodeLibrary):
    """The IR of one function as text, and the libraries of those that it calls."""

    def __init__(self, generator: Any, name: str):
        super().__init__(generator, name)
        self.texts: list[str] = []
        self.needed: list[CodeLibrary] = []

    def add_ir_module(self, ir_module: Any) -> None:
        self.texts.append(cgutils.normalize_ir_text(str(ir_module)))

    def add_linking_library(self, library: CodeLibrary) -> None:
        self.needed.append(library)

    def finalize(self) -> None:
        self._finalized = True

    def get_llvm_str(self) -> str:
        return "\n".join(self.texts)

    def get_function(self, name: str) -> Any:
        raise NotImplementedError(f"{name} is not compiled by itself")

    get_asm_str = get_function


class Translator(CompilerBase):
    """Numba's compiler with fewer passes, which stops at IR."""

    def define_pipelines(self) -> list[PassManager]:
        self.state.library = Parts(self.state.targetctx.codegen(), self.state.func_id.func_qualname)
        passes = PassManager("kernels")
        for one in PASSES:
            passes.add_pass(one, one.__name__)
        passes.finalize()
        return [passes]


# Serial code without exceptions, reference counts (or the symbols of Numba's runtime that they
# need) or wrappers for Python.
jit = njit(
    error_model="numpy",
    _nrt=False,
    no_cpython_wrapper=True,
    no_cfunc_wrapper=True,
    pipeline_class=Translator,
)


def translate(function: Callable) -> tuple[list[str], str]:
    """(LLVM IR of a kernel and of each helper, entry name)."""
    dispatcher = jit(function)
    with _alone(), _uncollected(), _translating():
        dispatcher.compile(SIGNATURE)
        (compiled,) = dispatcher.overloads.values()
        return list(_texts(compiled.library)), compiled.fndesc.llvm_func_name


def _texts(library: CodeLibrary) -> Iterator[str]:
    """The IR of all that a library needs, itself included."""
    known, waiting = {library}, [library]
    while waiting:
        one = waiting.pop()
        if not isinstance(one, Parts):  # Numba's own, with all that it needs
            yield str(one._get_module_for_linking())
            continue
        yield from one.texts
        new = [other for other in dict.fromkeys(one.needed) if other not in known]
        known.update(new)
        waiting += new


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """Hold the two locks under which Numba compiles and types, without waiting for one while
    holding the other: a numba.stencil that is called types under the second and may wait for the
    first, others the other way round.
    """
    typing = cpu_target.typing_context.callstack._lock
    while True:
        with global_compiler_lock:
            if typing.acquire(blocking=False):
                try:
                    yield
                finally:
                    typing.release()
                return
        with typing:  # until the other thread is done
            pass


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """Keep Python from looking for garbage among Numba's many objects (3.3 -> 2.9 s), also right
    after: frozen and thawed, they count as old (0.25 s).
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            if not gc.get_freeze_count():  # what others have frozen stays so
                gc.freeze()
                gc.unfreeze()
            gc.enable()


@contextlib.contextmanager
def _translating() -> Iterator[None]:
    """Make no machine code of Parts. The locks keep other threads' compilations out meanwhile, but
    not what Numba does first with a function that numba.stencil decorates.
    """
    from unittest import mock  # here, as it costs a warm process 30 ms

    context, typing = cpu_target.target_context, cpu_target.typing_context
    real, process, here = context.get_executable, PostProcessor.run, get_ident()
    add_error = functions._ResolutionFailures.add_error

    def executable(library: CodeLibrary, fndesc: Any, env: Any) -> Any:
        # The dispatcher wants a built-in function, a new one for each helper.
        return [].append if isinstance(library, Parts) else real(library, fndesc, env)

    def canonical(processor: PostProcessor, emit_dels: bool = False, **others: bool) -> None:
        # Where every variable lives, too, is found after each pass, and needed by none of PASSES.
        function = processor.func_ir
        if emit_dels or function.is_generator or get_ident() != here:
            process(processor, emit_dels, **others)
        else:
            function.blocks = canonicalize_cfg(function.blocks)

    remembered = _remembered(typing.resolve_function_type)
    with (
        mock.patch.object(context, "get_executable", executable),
        mock.patch.object(typing, "resolve_function_type", remembered),
        mock.patch.object(PostProcessor, "run", canonical),
        mock.patch.object(linalg, "ensure_blas", _find_blas),
        mock.patch.object(functions._ResolutionFailures, "add_error", _without_frames(add_error)),
    ):
        yield


def _find_blas() -> None:
    """In place of importing scipy.linalg (0.1 to 0.2 s) to find out that there is one."""
    if importlib.util.find_spec("scipy") is None:
        raise ImportError("no SciPy")


def _without_frames(add_error: Callable) -> Callable:
    """Note why a function does not take such arguments without the frames of that, which hold all
    that whoever calls has, his arrays too, until a full search for garbage.
    """

    def add(failures: Any, template: Any, matched: bool, error: Any, literal: bool) -> None:
        cause: BaseException | None = error if isinstance(error, Exception) else None
        while cause is not None:
            cause.__traceback__ = None
            cause = cause.__context__
        add_error(failures, template, matched, error, literal)

    return add


def _remembered(resolve: Callable) -> Callable:
    """Type each call once: Numba asks again in every round of inference, seven times on average
    (3.8 -> 2.9 s).
    """
    known: dict[Any, Any] = {}

    def resolve_once(function: Any, args: Any, kws: Any) -> Any:
        if kws or not all(isinstance(argument, types.Type) for argument in args):
            return resolve(function, args, kws)
        key = function, tuple(args)
        if key not in known:
            signature = resolve(function, args, kws)
            if signature is None:
                return None
            known[key] = signature
        return known[key]

    return resolve_once
