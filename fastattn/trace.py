"""A score_mod or mask_mod becomes a Modifier: it is called once, on stand-ins, and what it does to
them is recorded.

Python runs the function, so helpers, closures and loops over constants need no support of a
compiler, and what a modifier must not do fails in the user's own line.
"""

from __future__ import annotations

import inspect
import linecache
import numbers
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from .modifier import NUMPY, AuxTypes, Modifier

PARAMETERS = {
    "score_mod": ("score", "b", "h", "i", "j", "aux"),
    "score_mod_grad": ("score", "b", "h", "i", "j", "aux"),
    "mask_mod": ("b", "h", "i", "j", "aux"),
}
INPUT_KINDS = {"score": "float", "b": "int", "h": "int", "i": "int", "j": "int"}
VOCABULARY = (
    "That is: numbers, the operators + - * / // % ** < <= > >= == != & | ^ ~, the arrays of aux, "
    "and the functions of fastattn.mods: abs, exp, floor, log, logical_not, maximum, minimum, "
    "sqrt, tanh, where."
)
UFUNCS = {function: name for name, function in NUMPY.items()}
COMPARISONS = ("eq", "ge", "gt", "le", "lt", "ne")
MAX_POWER = 8
PACKAGE = Path(__file__).parent
_traced: WeakKeyDictionary[Callable, dict[tuple, Modifier]] = WeakKeyDictionary()


def trace(function: Callable, argument: str, aux: AuxTypes = ()) -> Modifier:
    """Return what `function`, the caller's score_mod or mask_mod, does.

    Raises
    ------
    TypeError   not a function, wrong number of parameters, wrong type of result, or an operation
                outside the vocabulary: names the line
    ValueError  an aux array that does not exist: names the line
    """
    _check_signature(function, argument)
    recorder = _Recorder(aux)
    names = PARAMETERS[argument]
    inputs = [Traced(recorder, recorder.step(n, INPUT_KINDS[n])) for n in names[:-1]]
    arrays = _Aux(TracedArray(recorder, slot, rank) for slot, (_, rank) in enumerate(aux))
    try:
        result = function(*inputs, arrays)
    except (TypeError, AttributeError) as error:
        raise TypeError(_explain(argument, str(error), error)) from error
    except (IndexError, ValueError) as error:
        raise ValueError(_explain(argument, str(error), error)) from error
    try:
        number = recorder.operand(result)
    except TypeError:
        raise TypeError(f"{argument} must return its result, got {result!r}") from None
    if argument == "mask_mod" and (kind := recorder.kind(number)) != "bool":
        raise TypeError(f"mask_mod must return bool, True where a row may attend, got {kind}")
    if argument != "mask_mod":
        number = recorder.convert(number, "float")
    return Modifier(argument, _needed(recorder.steps, number), aux)


def traced(function: Callable | Modifier, argument: str, aux: AuxTypes = ()) -> Modifier:
    """Return trace() of these arguments, remembered for as long as the function lives.

    So later changes of variables that it reads from outside are not seen. A Modifier is what it is.
    """
    if isinstance(function, Modifier):
        return function
    try:
        known = _traced.setdefault(function, {})
    except TypeError:  # it has no hash, or cannot be referred to weakly
        return trace(function, argument, aux)
    key = argument, aux
    if key not in known:
        known[key] = trace(function, argument, aux)
    return known[key]


def recorded(argument: str, aux: AuxTypes, build: Callable[[_Recorder], Any]) -> Modifier:
    """Return what build(recorder) makes of that recorder's stand-ins; a float but for masks."""
    recorder = _Recorder(aux)
    number = recorder.operand(build(recorder))
    if argument != "mask_mod":
        number = recorder.convert(number, "float")
    return Modifier(argument, _needed(recorder.steps, number), aux)


def apply(operation: str, *operands: Any) -> Any:
    """Do one operation of the vocabulary: record it, or do it where all operands are known."""
    for operand in operands:
        if isinstance(operand, (Traced, TracedArray)):
            return operand._recorder.apply(operation, *operands)
    return NUMPY[operation](*operands)


def _signature_error(argument: str, got: str) -> TypeError:
    return TypeError(
        f"{argument} must be a function of ({', '.join(PARAMETERS[argument])}), got {got}"
    )


def _check_signature(function: Callable, argument: str) -> None:
    if not callable(function):
        raise _signature_error(argument, type(function).__name__)
    try:
        signature = inspect.signature(function)
    except ValueError:  # written in C: no signature to look at
        return
    try:
        signature.bind(*PARAMETERS[argument])
    except TypeError:
        name = getattr(function, "__name__", type(function).__name__)
        raise _signature_error(argument, f"{name}{signature}") from None


def _explain(argument: str, reason: str, error: Exception) -> str:
    """Return the message for an error inside a modifier: reason, the user's line, vocabulary."""
    frame = _user_frame(error.__traceback__)
    place = ""
    if frame is not None:
        name, line = frame.tb_frame.f_code.co_filename, frame.tb_lineno
        place = f"\n  {name}:{line}: {linecache.getline(name, line).strip()}"
    return (
        f"{argument} must use only what every backend can run, got: {reason}{place}\n{VOCABULARY}"
    )


def _user_frame(tb: TracebackType | None) -> TracebackType | None:
    """Return the innermost frame of the first file outside this package; without one, of mods."""
    user = ready_made = None
    while tb is not None:
        name = tb.tb_frame.f_code.co_filename
        if Path(name).parent != PACKAGE:
            if user is None or name == user.tb_frame.f_code.co_filename:
                user = tb
        elif name != __file__:
            ready_made = tb
        tb = tb.tb_next
    return user or ready_made


def _needed(steps: list[tuple], result: int) -> tuple[tuple, ...]:
    """Return the steps that lead to `result`, numbered anew, the result last."""
    wanted = {result}
    for number in range(result, -1, -1):
        if number in wanted:
            wanted.update(_operands(steps[number]))
    place = {old: new for new, old in enumerate(sorted(wanted))}
    kept = []
    for number in sorted(wanted):
        step = steps[number]
        used = _operands(step)
        head = step[: len(step) - len(used)]
        kept.append((*head, *(place[n] for n in used)))
    return tuple(kept)


def _operands(step: tuple) -> tuple[int, ...]:
    if step[0] == "const":
        return ()
    return step[3:] if step[0] == "aux" else step[2:]


class _Aux(tuple):
    """The aux that a modifier gets while it is recorded."""

    __slots__ = ()

    def __getitem__(self, slot: Any) -> Any:
        try:
            return super().__getitem__(slot)
        except IndexError:
            given = f"the call was given an aux of length {len(self)}"
            raise IndexError(f"aux[{slot}] is used, but {given}: pass aux=(array, ...)") from None


class _Recorder:
    """The steps recorded so far. Equal steps are one."""

    def __init__(self, aux: AuxTypes):
        self.aux = aux
        self.steps: list[tuple] = []
        self._known: dict[tuple, int] = {}

    def step(self, *step: Any) -> int:
        """Return the number of this step, new or known."""
        if step not in self._known:
            self._known[step] = len(self.steps)
            self.steps.append(step)
        return self._known[step]

    def replay(self, step: tuple, values: Sequence[Traced]) -> Traced:
        """Record a step of another Modifier; `values` are its earlier ones, here."""
        used = _operands(step)
        head = step[: len(step) - len(used)]
        return Traced(self, self.step(*head, *(values[n]._number for n in used)))

    def kind(self, number: int) -> str:
        return self.steps[number][1]

    def operand(self, value: Any) -> int:
        """Return the number of a stand-in, or of a constant."""
        if isinstance(value, TracedArray):
            value = value._value()
        if isinstance(value, Traced):
            if value._recorder is not self:
                raise TypeError("a value of another modifier, or of an earlier call, is used")
            return value._number
        if isinstance(value, np.ndarray) and value.ndim == 0:  # where() of constants makes them
            value = value[()]
        if isinstance(value, (bool, np.bool_)):
            return self.step("const", "bool", str(bool(value)))
        if isinstance(value, numbers.Integral):
            if not -(2**63) <= int(value) < 2**63:
                raise TypeError(f"an integer must fit in 64 bits, got {value}")
            return self.step("const", "int", str(int(value)))
        if isinstance(value, numbers.Real):
            return self.step("const", "float", repr(float(value)))
        if isinstance(value, np.ndarray):
            raise TypeError("an array is used that is not in aux: pass it there, as aux=(array,)")
        raise TypeError(f"{type(value).__name__} is neither a number nor a value of the modifier")

    def convert(self, number: int, kind: str) -> int:
        return number if self.kind(number) == kind else self.step("convert", kind, number)

    def apply(self, operation: str, *values: Any) -> Traced:
        numbers_ = [self.operand(value) for value in values]
        kinds = [self.kind(number) for number in numbers_]
        if operation == "where":
            common = _common(kinds[1:], keep_bool=True)
            wanted, result = ["bool", common, common], common
        else:
            common, result = _rule(operation, kinds)
            wanted = [common] * len(kinds)
        converted = (self.convert(n, kind) for n, kind in zip(numbers_, wanted, strict=True))
        return Traced(self, self.step(operation, result, *converted))


def _common(kinds: list[str], keep_bool: bool = False) -> str:
    """Return the kind that all of `kinds` are converted to."""
    if keep_bool and set(kinds) == {"bool"}:
        return "bool"
    return "float" if "float" in kinds else "int"


def _rule(operation: str, kinds: list[str]) -> tuple[str, str]:
    """Return (kind of the operands, kind of the result) of an operation but where()."""
    if operation in ("div", "exp", "floor", "log", "sqrt", "tanh"):
        return "float", "float"
    if operation == "logical_not":
        return "bool", "bool"
    common = _common(kinds, keep_bool=operation in ("and", "or", "xor", "invert"))
    if operation in ("and", "or", "xor", "invert") and common == "float":
        raise TypeError("& | ^ ~ need truth values or integers, got a float")
    if operation in ("floordiv", "mod") and common == "float":
        raise TypeError("// and % need integers; for floats write floor(x / y)")
    return common, "bool" if operation in COMPARISONS else common


def _unary(operation: str) -> Any:
    return lambda self: apply(operation, self)


def _binary(operation: str) -> Any:
    return lambda self, other: apply(operation, self, other)


def _both_sides(operation: str) -> tuple[Any, Any]:
    return _binary(operation), lambda self, other: apply(operation, other, self)


def _unknown(reason: str) -> Any:
    def refuse(self: Any, *args: Any, **kwargs: Any) -> Any:
        raise TypeError(reason)

    return refuse


class _Operators:
    """The operators of a value that is only known when the modifier runs."""

    __slots__ = ()
    __add__, __radd__ = _both_sides("add")
    __sub__, __rsub__ = _both_sides("sub")
    __mul__, __rmul__ = _both_sides("mul")
    __truediv__, __rtruediv__ = _both_sides("div")
    __floordiv__, __rfloordiv__ = _both_sides("floordiv")
    __mod__, __rmod__ = _both_sides("mod")
    __and__, __rand__ = _both_sides("and")
    __or__, __ror__ = _both_sides("or")
    __xor__, __rxor__ = _both_sides("xor")
    __lt__, __le__ = _binary("lt"), _binary("le")
    __gt__, __ge__ = _binary("gt"), _binary("ge")
    __eq__, __ne__ = _binary("eq"), _binary("ne")
    __hash__ = None  # type: ignore[assignment]
    __neg__, __abs__, __invert__ = _unary("neg"), _unary("abs"), _unary("invert")

    def __pos__(self) -> Any:
        return self

    def __pow__(self, exponent: Any) -> Any:
        if not isinstance(exponent, (int, np.integer)) or not 1 <= exponent <= MAX_POWER:
            raise TypeError(f"x ** n needs a constant integer n, 1 <= n <= {MAX_POWER}")
        half = self if exponent == 1 else self ** (int(exponent) // 2)
        if exponent == 1:
            return half
        return half * half * self if exponent % 2 else half * half

    __rpow__ = _unknown(
        "a ** x needs a constant x: write exp(x * log(a)), with math.log for a number"
    )
    __bool__ = _unknown(
        "if, and, or, not, min(), max() and a < b < c need a value that is not known yet: "
        "use where, &, |, logical_not, minimum, maximum"
    )
    __float__ = __int__ = _unknown("float(), int() and the module math need a value not known yet")
    __index__ = _unknown("only the arrays of aux can be indexed with a value not known yet")
    __array__ = _unknown(
        "NumPy needs a value that is not known yet: for its functions use those of fastattn.mods, "
        "for an array pass aux=(array,) and index aux[0]"
    )

    def __array_ufunc__(self, ufunc: Any, method: str, *operands: Any, **options: Any) -> Any:
        """Operators with NumPy's own numbers come here, and np.exp(score): it is mods.exp."""
        if ufunc not in UFUNCS or method != "__call__" or options:
            raise TypeError(f"np.{ufunc.__name__} is not among the functions of fastattn.mods")
        return apply(UFUNCS[ufunc], *operands)


class Traced(_Operators):
    """Stands for a number while a modifier is recorded."""

    __slots__ = ("_number", "_recorder")

    def __init__(self, recorder: _Recorder, number: int):
        self._recorder, self._number = recorder, number


class TracedArray(_Operators):
    """Stands for an aux array, or for the part of one that the indices so far select."""

    __slots__ = ("_indices", "_rank", "_recorder", "_slot")

    def __init__(self, recorder: _Recorder, slot: int, rank: int, indices: tuple[int, ...] = ()):
        self._recorder, self._slot, self._rank, self._indices = recorder, slot, rank, indices

    @property
    def ndim(self) -> int:
        """Indices that are still missing."""
        return self._rank - len(self._indices)

    def __getitem__(self, index: Any) -> Traced | TracedArray:
        given = index if isinstance(index, tuple) else (index,)
        if len(given) > self.ndim:
            raise ValueError(
                f"aux[{self._slot}] must be indexed by its rank, {self._rank}, got "
                f"{len(self._indices) + len(given)} indices"
            )
        numbers_ = tuple(self._index(value) for value in given)
        part = TracedArray(self._recorder, self._slot, self._rank, self._indices + numbers_)
        return part if part.ndim else part._value()

    def _index(self, value: Any) -> int:
        if isinstance(value, slice) or value is None or value is Ellipsis:
            raise TypeError("an aux array takes integers as indices: no slice, None or ...")
        number = self._recorder.operand(value)
        operation, kind, *rest = self._recorder.steps[number]
        if kind != "int":
            raise TypeError(f"an index must be an integer, got {kind}")
        if operation == "const" and int(rest[0]) < 0:
            raise ValueError(f"an index must be at least 0, got {rest[0]}")
        return number

    def _value(self) -> Traced:
        if self.ndim:
            raise TypeError(
                f"aux[{self._slot}] has rank {self._rank}, got {len(self._indices)} indices"
            )
        name = self._recorder.aux[self._slot][0]
        kind = {"b": "bool", "i": "int", "f": "float"}[name[0]]
        return Traced(self._recorder, self._recorder.step("aux", kind, self._slot, *self._indices))

    def __iter__(self) -> Any:
        raise TypeError("an aux array cannot be looped over: index it")
