"""Numba's lowering of its own IR to LLVM's, without what kernels have no use for.

Left out are information for debuggers, reference counts, and the search, for every operator, for
code of its own for each constant that it is applied to, which only powers have.
"""

from __future__ import annotations

from typing import Any

from numba.core import cgutils, types
from numba.core.compiler_machinery import register_pass
from numba.core.lowering import Lower
from numba.core.typed_passes import NativeLowering


class KernelLower(Lower):
    """Lowers one function."""

    def lower_binop(self, resty: types.Type, expr: Any, op: Any) -> Any:
        signature = self.fndesc.calltypes[expr]
        operands = [
            self.context.cast(self.builder, self.loadvar(v.name), self.typeof(v.name), operand)
            for v, operand in zip((expr.lhs, expr.rhs), signature.args, strict=True)
        ]
        typing = self.context.typing_context
        function = typing.resolve_value_type(op)
        found = typing.resolve_function_type(function, signature.args, {})
        result = self.context.get_function(function, found)(self.builder, operands)
        return self.context.cast(self.builder, result, signature.return_type, resty)

    def storevar(self, value: Any, name: str, argidx: int | None = None) -> None:
        self._alloca_var(name, self.typeof(name))
        if name in self._singly_assigned_vars:
            self._blk_local_varmap[name] = value
        else:
            self.builder.store(value, self.getvar(name))

    def alloca(self, name: str, kind: types.Type) -> Any:
        return cgutils.alloca_once(self.builder, self.context.get_value_type(kind), name=name)


@register_pass(mutates_CFG=True, analysis_only=False)
class KernelLowering(NativeLowering):
    """The pass that does."""

    _name = "kernel_lowering"

    @property
    def lowering_class(self) -> type[Lower]:
        return KernelLower
